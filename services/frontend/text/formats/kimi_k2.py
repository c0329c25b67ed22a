"""Tool calls as Kimi K2 writes them, after content.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>
    {"what": "whales"}<|tool_call_end|><|tool_calls_section_end|>

The text before `<|tool_call_argument_begin|>`, here `functions.find:0`, is the id of the call.
Templates show this id again together with the result of the call, so clients get the id that the
model has written.
"""

import re
from collections.abc import Sequence

from services.frontend.request.output_format import quoted
from services.frontend.text.formats.arriving_text import SPACES, Steps
from services.frontend.text.formats.call_reader import CallRules, ToolCallReader
from services.frontend.text.formats.checkpoint import Checkpoint
from services.frontend.text.formats.grammar import Markers, ToolRule, one_of, repeated
from services.frontend.text.formats.tool_format import ToolFormat
from services.frontend.text.message_reader import MessageReader

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"

CALL, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"

ARGUMENTS = "<|tool_call_argument_begin|>"

NAMESPACE = "functions."

_ID = re.compile(r"[^\s<{]+")
_NUMBERED = re.compile(r"(?:functions\.)?(.+?)(?::(\d{1,9}))?")


class KimiK2(ToolFormat):
    """The format of tool calls of Kimi K2."""

    name = "kimi_k2"
    models = "Kimi K2"
    markers = (BEGIN, END, CALL, CALL_END, ARGUMENTS)

    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format:
        `<|tool_call_argument_begin|>` is in the chat template or is a special token."""
        return checkpoint.has(ARGUMENTS)

    def reader(self, rules: CallRules) -> MessageReader:
        return KimiK2Reader(rules)

    def grammar(
        self, tools: Sequence[ToolRule], markers: Markers, *, is_single: bool, is_free: bool
    ) -> str:
        """Returns the rule `answer` of a grammar. The rule allows one block of calls. With
        `is_free`, the rule also allows text before such a block."""
        answer = markers.answer(BEGIN, "body", is_free=is_free, is_single=True)
        answer += f"body: {repeated('marked', '', is_single=is_single)} {markers[END]}\n"
        answer += f"marked: {markers[CALL]} call {markers[CALL_END]}\n"
        answer += "NUMBER: /[0-9]{1,4}/\n"
        return answer + one_of(
            tools,
            lambda tool: (
                f"{quoted(f'{NAMESPACE}{tool.name}:')} NUMBER {markers[ARGUMENTS]} {tool.arguments}"
            ),
        )


class KimiK2Reader(ToolCallReader):
    """Reads an answer with tool calls in the format of Kimi K2."""

    marks = (BEGIN, END)

    def __init__(self, rules: CallRules) -> None:
        super().__init__(rules)
        self._numbers: set[int] = set()  # in the ids of the calls so far

    def _read(self) -> Steps[None]:
        text = self._text
        while (yield from self._until(BEGIN, CALL)):
            text.keep()
            yield from text.take_one(BEGIN)
            yield from text.run(SPACES)
            while (yield from self._read_marked()):
                yield from self._skip_marks("}", CALL_END, END)
            self._say_no_call(text.kept())

    def _read_marked(self) -> Steps[bool]:
        """Reads a call and returns True. If no call comes next, returns False. The caller then
        treats the text that was read as content."""
        text = self._text
        if not (yield from text.take_one(CALL)):
            return False
        yield from text.run(SPACES)
        call_id = yield from text.run(_ID)
        yield from text.run(SPACES)
        match = _NUMBERED.fullmatch(call_id)
        if match is None or not (yield from text.take_one(ARGUMENTS)):
            return False
        yield from text.run(SPACES)
        return (yield from self._read_object_of(match[1], CALL_END, call_id=self._id(match)))

    def _id(self, match: re.Match[str]) -> str:
        """Returns the id of a call in the form that templates need. The id in the model's text may
        be incomplete or may occur twice."""
        number = self.n_tool_calls if match[2] is None else int(match[2])
        while number in self._numbers:
            number += 1
        self._numbers.add(number)
        return f"{NAMESPACE}{match[1]}:{number}"
