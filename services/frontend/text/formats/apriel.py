"""Tool calls as Apriel writes them, after content.

<tool_calls>[{"name": "find", "arguments": {"what": "whales"}}]</tool_calls>
"""

from services.frontend.text.formats.checkpoint import Checkpoint
from services.frontend.text.formats.tagged_json import TaggedJson


class Apriel(TaggedJson):
    """The format of tool calls of Apriel."""

    name = "apriel"
    models = "Apriel 1.5, Apriel 1.6"
    begin, end = "<tool_calls>", "</tool_calls>"
    markers = (begin, end)

    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format: the chat template contains
        `<tool_calls>[`, the tag with a list directly after it."""
        return f"{self.begin}[" in checkpoint.template
