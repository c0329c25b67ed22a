"""Tool calls as GigaChat 3 writes them: one call after the content, in a message of its own,
whose role is `function call`.

Let me see.<|message_sep|>

function call<|role_sep|>
{"name": "find", "arguments": {"what": "whales"}}<|message_sep|>
"""

from services.frontend.text.formats.checkpoint import Checkpoint
from services.frontend.text.formats.tagged_json import TaggedJson

ROLE_END, MESSAGE_END = "<|role_sep|>", "<|message_sep|>"


class GigaChat3(TaggedJson):
    """The format of tool calls of GigaChat 3."""

    name = "gigachat3"
    models = "GigaChat 3"
    begin = f"function call{ROLE_END}"
    end = ""
    opening, closing = "\n", ""
    leftovers = silent = (MESSAGE_END,)
    markers = (ROLE_END, MESSAGE_END)
    has_parallel_calls = False

    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format: the chat template contains
        the role `function call` and the mark `<|role_sep|>`."""
        return "function call" in checkpoint.template and ROLE_END in checkpoint.template
