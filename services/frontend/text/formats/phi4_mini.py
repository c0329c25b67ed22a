"""Tool calls as Phi-4-mini writes them, instead of content.

    <|tool_call|>[{"name": "find", "arguments": {"what": "whales"}}]<|/tool_call|>

Some answers have `functools` in place of the first mark, and no other mark.
"""

from services.frontend.text.formats.checkpoint import Checkpoint
from services.frontend.text.formats.tagged_json import TaggedJson


class Phi4Mini(TaggedJson):
    """The format of tool calls of Phi-4-mini."""

    name = "phi4_mini"
    models = "Phi-4-mini"
    begin, end = "<|tool_call|>", "<|/tool_call|>"
    other_begins = ("functools",)
    markers = (begin, end)

    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format: `<|/tool_call|>` or
        `<|/tool|>` is in the chat template or is a special token."""
        return checkpoint.has(self.end) or checkpoint.has("<|/tool|>")
