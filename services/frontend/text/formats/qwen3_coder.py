"""Tool calls as Qwen3-Coder and Qwen 3.5 write them, with content before, between and after.

<tool_call>
<function=find>
<parameter=what>
whales
</parameter>
</function>
</tool_call>
"""

from services.frontend.text.formats.checkpoint import Checkpoint
from services.frontend.text.formats.tagged_parameters import TaggedParameters, Tags


class Qwen3Coder(TaggedParameters):
    """The format of tool calls of Qwen3-Coder."""

    name = "qwen3_coder"
    models = "Qwen3-Coder, Qwen 3.5, Nemotron 3"
    tags = Tags(
        block="<tool_call>",
        block_end="</tool_call>",
        call="<function=",
        call_end="</function>",
        parameter="<parameter=",
        parameter_end="</parameter>",
        name_end=">",
        has_padding=True,
        has_one_call=True,
    )
    markers = (tags.block, tags.block_end)

    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format: the chat template contains
        `<tool_call>` and `<function=`."""
        return self.tags.block in checkpoint.template and self.tags.call in checkpoint.template
