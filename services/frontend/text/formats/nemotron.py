"""Tool calls as Nemotron Nano 2 writes them, after content.

<TOOLCALL>[{"name": "find", "arguments": {"what": "whales"}}]</TOOLCALL>
"""

from services.frontend.text.formats.checkpoint import Checkpoint
from services.frontend.text.formats.tagged_json import TaggedJson


class Nemotron(TaggedJson):
    """The format of tool calls of Nemotron Nano 2."""

    name = "nemotron"
    models = "Nemotron Nano 2"
    begin, end = "<TOOLCALL>", "</TOOLCALL>"
    markers = (begin, end)

    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format: `<TOOLCALL>` is in the chat
        template or is a special token."""
        return checkpoint.has(self.begin)
