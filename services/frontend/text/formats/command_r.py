"""Tool calls as Cohere's models write them.

    <|START_ACTION|>[
        {"tool_call_id": "0", "tool_name": "find", "parameters": {"what": "whales"}}
    ]<|END_ACTION|>

    Action:
    ```json
    [
        {
            "tool_name": "find",
            "parameters": {"what": "whales"}
        }
    ]```

Command R7B and Command A write the first form instead of content; they write content between other
marks. Command R and R+ write the second form after content.
"""

from services.frontend.text.formats.checkpoint import Checkpoint
from services.frontend.text.formats.tagged_json import TaggedJson


class CommandR7B(TaggedJson):
    """The format of tool calls of Command R7B and Command A."""

    name = "command_r7b"
    models = "Command R7B, Command A"
    begin, end = "<|START_ACTION|>", "<|END_ACTION|>"
    silent = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
    leftovers = silent
    opening, separator, closing = "[\n    ", ",\n    ", "\n]"
    call_begin = '{"tool_call_id": "0", "tool_name": '
    before_arguments = ', "parameters": '
    markers = (begin, end, *silent)

    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format: `<|START_ACTION|>` is in
        the chat template or is a special token."""
        return checkpoint.has(self.begin)


class CommandR(TaggedJson):
    """The format of tool calls of Command R and Command R+."""

    name = "command_r"
    models = "Command R, Command R+"
    begin, end = "Action:\n```json\n", "```"
    other_begins = ("Action: ```json", "Action:```json")
    opening, separator, closing = "[\n    ", ",\n    ", "\n]"
    call_begin = '{\n        "tool_name": '
    before_arguments = ',\n        "parameters": '
    call_end = "\n    }"
    needs_names = True
    markers = ()

    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format: the chat template contains
        `Action:` and `"tool_name"`."""
        template = checkpoint.template
        return "Action:" in template and '"tool_name"' in template
