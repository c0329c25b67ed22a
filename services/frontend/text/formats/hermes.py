"""Tool calls as Hermes, Qwen, SmolLM and other models write them, with content before, between and
after.

    <tool_call>
    {"name": "find", "arguments": {"what": "whales"}}
    </tool_call>

A tag may also hold a list of calls.
"""

from collections.abc import Sequence

from services.frontend.request.output_format import quoted
from services.frontend.text.formats.arriving_text import SPACES, Steps
from services.frontend.text.formats.call_reader import CallRules, ToolCallReader
from services.frontend.text.formats.checkpoint import Checkpoint
from services.frontend.text.formats.grammar import (
    Markers,
    ToolRule,
    call_object,
    one_of,
)
from services.frontend.text.formats.tool_format import ToolFormat
from services.frontend.text.message_reader import MessageReader

BEGIN, END = "<tool_call>", "</tool_call>"

NEWLINE = "\n"


class Hermes(ToolFormat):
    """The format of tool calls of Hermes."""

    name = "hermes"
    models = "Hermes, Qwen 2.5, Qwen 3, SmolLM 3"
    markers = (BEGIN, END)

    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format: the chat template contains
        `<tool_call>`."""
        return BEGIN in checkpoint.template

    def reader(self, rules: CallRules) -> MessageReader:
        return HermesReader(rules)

    def grammar(
        self, tools: Sequence[ToolRule], markers: Markers, *, is_single: bool, is_free: bool
    ) -> str:
        rules = one_of(tools, call_object("arguments"))
        answer = markers.answer(
            BEGIN, "body", is_free=is_free, is_single=is_single, between=NEWLINE
        )
        return f"{answer}body: {quoted(NEWLINE)} call {quoted(NEWLINE)} {markers[END]}\n{rules}"


class HermesReader(ToolCallReader):
    """Reads an answer with tool calls in the format of Hermes."""

    marks = (BEGIN, END)

    def _read(self) -> Steps[None]:
        text = self._text
        while marker := (yield from self._until(*self._no_content())):
            text.keep()
            text.take(len(marker))
            if marker == END:
                text.kept()
                continue
            yield from text.run(SPACES)
            if not (yield from self._read_calls()):
                self._say_no_call(text.kept())
                continue
            text.kept()
            yield from text.skip(END)

    def _no_content(self) -> tuple[str, ...]:
        """Returns the marks at which content ends. After the first call, these include the closing
        tag."""
        return (BEGIN, END) if self.n_tool_calls else (BEGIN,)
