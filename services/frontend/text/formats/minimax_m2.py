"""Tool calls as MiniMax M2 writes them, after content.

<minimax:tool_call>
<invoke name="find">
<parameter name="what">whales</parameter>
</invoke>
</minimax:tool_call>
"""

from services.frontend.text.formats.checkpoint import Checkpoint
from services.frontend.text.formats.tagged_parameters import TaggedParameters, Tags


class MiniMaxM2(TaggedParameters):
    """The format of tool calls of MiniMax M2."""

    name = "minimax_m2"
    models = "MiniMax M2"
    tags = Tags(
        block="<minimax:tool_call>",
        block_end="</minimax:tool_call>",
        call='<invoke name="',
        call_end="</invoke>",
        parameter='<parameter name="',
        parameter_end="</parameter>",
        name_end='">',
    )
    markers = (tags.block, tags.block_end)

    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format: `<minimax:tool_call>` is in
        the chat template or is a special token."""
        return checkpoint.has(self.tags.block)
