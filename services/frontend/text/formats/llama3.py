"""Tool calls as Llama 3 writes them, instead of content.

    {"name": "find", "parameters": {"what": "whales"}}; {"name": "dive", "parameters": {}}

`<|python_tag|>` may come before the calls. Without this tag, an answer holds calls only if its
first object has the name of an existing tool: other JSON is content.
"""

from collections.abc import Callable, Sequence

from services.frontend.text.formats.arriving_text import SPACES, Steps
from services.frontend.text.formats.call_reader import CallRules, ToolCallReader
from services.frontend.text.formats.checkpoint import Checkpoint
from services.frontend.text.formats.grammar import (
    Markers,
    ToolRule,
    call_object,
    one_of,
    repeated,
)
from services.frontend.text.formats.tool_format import ToolFormat
from services.frontend.text.message_reader import MessageReader

TAG = "<|python_tag|>"


class Llama3(ToolFormat):
    """The format of tool calls of Llama 3."""

    name = "llama3"
    models = "Llama 3.1, 3.2, 3.3"
    markers = (TAG,)
    has_bare_calls = True

    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format: the chat template contains
        the word `tools`, and `<|python_tag|>` is in the template or is a special token."""
        return "tools" in checkpoint.template and checkpoint.has(TAG)

    def reader(self, rules: CallRules) -> MessageReader:
        return Llama3Reader(rules)

    def grammar(
        self, tools: Sequence[ToolRule], markers: Markers, *, is_single: bool, is_free: bool
    ) -> str:
        """Returns the rule `answer` of a grammar. The rule allows tool calls. With `is_free`, the
        rule also allows other text."""
        calls = repeated("call", "; ", is_single=is_single)
        rules = one_of(tools, call_object("parameters"))
        if not is_free:
            return f"answer: {calls}\n{rules}"
        other = r"OTHER: /[ \t\r\n]*[^{ \t\r\n](.|\n)*/"
        return f"answer: {markers[TAG]}? {calls} | OTHER?\n{other}\n{rules}"


class Llama3Reader(ToolCallReader):
    """Reads an answer with tool calls in the format of Llama 3."""

    marks = (TAG,)

    def _read(self) -> Steps[None]:
        text = self._text
        text.keep()
        yield from text.run(SPACES)
        if (yield from text.peek()) in ("{", "["):
            yield from self._read_all(self._rules.tools.__contains__)
        self._say_no_call(text.kept())
        while (yield from self._until(TAG)):
            text.keep()
            text.take(len(TAG))
            yield from text.run(SPACES)
            yield from self._read_all(bool)
            self._say_no_call(text.kept())

    def _read_all(self, is_call: Callable[[str], object]) -> Steps[None]:
        """Reads calls. If the text turns out to be something else, leaves it recorded
        (`ArrivingText.keep`), and the caller treats it as content."""
        if (yield from self._read_calls(is_call)):
            self._text.kept()
