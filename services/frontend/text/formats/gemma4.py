"""Tool calls as Gemma 4 writes them, among content.

    <|tool_call>call:find{what:<|"|>whales<|"|>,n:3}<tool_call|>

After its calls the model may write `<|tool_response>`, the mark that begins the result of a call.
"""

import re
from collections.abc import Sequence

from services.frontend.request.output_format import quoted
from services.frontend.text.formats.arriving_text import SPACES, Steps
from services.frontend.text.formats.call_reader import CallRules, ToolCallReader
from services.frontend.text.formats.checkpoint import Checkpoint
from services.frontend.text.formats.grammar import Markers, ToolRule, one_of
from services.frontend.text.formats.literal_grammar import GemmaGrammar
from services.frontend.text.formats.literals import (
    GEMMA_QUOTE,
    LiteralReader,
    word_or_text_as_json,
)
from services.frontend.text.formats.tool_format import ToolFormat
from services.frontend.text.message_reader import MessageReader

BEGIN, END = "<|tool_call>", "<tool_call|>"

RESULT = "<|tool_response>"

PREFIX = "call:"

_NAME = re.compile(r"[\w.-]+")


class Gemma4(ToolFormat):
    """The format of tool calls of Gemma 4."""

    name = "gemma4"
    models = "Gemma 4"
    markers = (BEGIN, END, RESULT, GEMMA_QUOTE)

    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format: `<|tool_call>` is in the
        chat template or is a special token."""
        return checkpoint.has(BEGIN)

    def reader(self, rules: CallRules) -> MessageReader:
        return Gemma4Reader(rules)

    def grammar(
        self, tools: Sequence[ToolRule], markers: Markers, *, is_single: bool, is_free: bool
    ) -> str:
        answer = markers.answer(BEGIN, "body", is_free=is_free, is_single=is_single)
        values = {tool.name: GemmaGrammar(tool, f"{tool.arguments}_", markers) for tool in tools}
        rules = one_of(
            tools,
            lambda tool: f"{quoted(f'{PREFIX}{tool.name}')} {values[tool.name].value(tool.schema)}",
        )
        lines = [line for one in values.values() for line in one.rules.lines]
        return "\n".join([f"{answer}body: call {markers[END]}\n{rules}", *lines])


class Gemma4Reader(ToolCallReader):
    """Reads an answer with tool calls in the format of Gemma 4."""

    marks = (BEGIN, END)

    def _read(self) -> Steps[None]:
        text = self._text
        while (yield from self._until(BEGIN)):
            text.keep()
            text.take(len(BEGIN))
            yield from text.run(SPACES)
            if (yield from self._read_call_of()):
                yield from self._skip_marks("}", END, RESULT)
            self._say_no_call(text.kept())

    def _read_call_of(self) -> Steps[bool]:
        """Reads a call and returns True. If no call comes next, returns False. The caller then
        treats the text that was read as content."""
        text = self._text
        yield from text.take_one(PREFIX)
        name = yield from text.run(_NAME)
        yield from text.run(SPACES)
        if not name or not (yield from text.comes_next("{")):
            return False
        self._begin(name)
        is_whole = yield from LiteralReader(text, self._argue, word_or_text_as_json).read_all()
        if is_whole or not text.is_read:
            self._end_call()
        return True
