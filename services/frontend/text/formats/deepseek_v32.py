"""Tool calls as DeepSeek V3.2 and V4 write them, after content.

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="find">
    <｜DSML｜parameter name="what" string="true">whales</｜DSML｜parameter>
    <｜DSML｜parameter name="n" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

DeepSeek V4 writes `tool_calls` in place of `function_calls`.
"""

from services.frontend.text.formats.checkpoint import Checkpoint
from services.frontend.text.formats.tagged_parameters import TaggedParameters, Tags

MARK = "｜DSML｜"

V32, V4 = "function_calls>", "tool_calls>"


def _tags(block: str, other: str) -> Tags:
    return Tags(
        block=f"<{MARK}{block}",
        block_end=f"</{MARK}{block}",
        other_blocks=(f"<{MARK}{other}",),
        other_block_ends=(f"</{MARK}{other}",),
        call=f'<{MARK}invoke name="',
        call_end=f"</{MARK}invoke>",
        parameter=f'<{MARK}parameter name="',
        parameter_end=f"</{MARK}parameter>",
        name_end='">',
        text_kind='" string="true">',
        value_kind='" string="false">',
    )


class DeepSeekV32(TaggedParameters):
    """The format of tool calls of DeepSeek V3.2."""

    name = "deepseek_v32"
    models = "DeepSeek V3.2"
    markers = (MARK,)
    tags = _tags(V32, V4)

    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format: the chat template contains
        the mark `｜DSML｜` and the word `function_calls`."""
        return MARK in checkpoint.template and V32 in checkpoint.template


class DeepSeekV4(TaggedParameters):
    """The format of tool calls of DeepSeek V4."""

    name = "deepseek_v4"
    models = "DeepSeek V4"
    markers = (MARK,)
    tags = _tags(V4, V32)

    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format: the chat template contains
        the mark `｜DSML｜` and the word `tool_calls`."""
        return MARK in checkpoint.template and V4 in checkpoint.template
