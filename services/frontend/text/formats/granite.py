"""Tool calls as Granite 3 writes them, instead of content.

    <|tool_call|>[{"name": "find", "arguments": {"what": "whales"}}]

Granite 4 writes the format of Hermes.
"""

from services.frontend.text.formats.checkpoint import Checkpoint
from services.frontend.text.formats.tagged_json import TaggedJson


class Granite(TaggedJson):
    """The format of tool calls of Granite 3."""

    name = "granite"
    models = "Granite 3"
    begin = "<|tool_call|>"
    other_begins = ("<tool_call>",)
    leftovers = ("</tool_call>",)
    markers = (begin, *other_begins)

    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format: the chat template contains
        `<|start_of_role|>` and `<|tool_call|>`."""
        return all(text in checkpoint.template for text in (self.begin, "<|start_of_role|>"))
