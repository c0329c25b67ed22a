"""Tool calls as MiniMax M1 writes them, after content.

<tool_calls>
{"name": "find", "arguments": {"what": "whales"}}
{"name": "dive", "arguments": {}}
</tool_calls>
"""

from services.frontend.text.formats.checkpoint import Checkpoint
from services.frontend.text.formats.tagged_json import TaggedJson


class MiniMaxM1(TaggedJson):
    """The format of tool calls of MiniMax M1."""

    name = "minimax_m1"
    models = "MiniMax M1"
    begin, end = "<tool_calls>", "</tool_calls>"
    opening = separator = closing = "\n"
    markers = (begin, end)

    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format: the chat template contains
        `<tool_calls>`."""
        return self.begin in checkpoint.template
