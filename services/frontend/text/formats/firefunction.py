"""Tool calls as FireFunction writes them, after content.

functools[{"name": "find", "arguments": {"what": "whales"}}]
"""

from services.frontend.text.formats.checkpoint import Checkpoint
from services.frontend.text.formats.tagged_json import TaggedJson


class FireFunction(TaggedJson):
    """The format of tool calls of FireFunction."""

    name = "firefunction"
    models = "FireFunction 2"
    begin = "functools"
    markers = ()

    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format: the chat template contains
        `functools[`."""
        return f"{self.begin}[" in checkpoint.template
