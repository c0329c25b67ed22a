"""Tool calls as DeepSeek V3, R1 and V3.1 write them, after content.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find
    ```json
    {"what": "whales"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{"what": "whales"}
    <｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3 and R1 write the first form. V3.1 writes the second, without newlines. The reader accepts both
forms.
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

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

FENCE, FENCE_END = "```json", "```"

_NAME = re.compile(r"[^\s<`{]+")


class DeepSeekV3(ToolFormat):
    """The format of tool calls of DeepSeek V3 and R1."""

    name = "deepseek_v3"
    models = "DeepSeek V3, DeepSeek R1"
    markers = (BEGIN, END, CALL, SEPARATOR, CALL_END)
    between_calls = "\n"

    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format: the chat template contains
        `<｜tool▁call▁begin｜>` and a fence, "```json"."""
        return CALL in checkpoint.template and FENCE in checkpoint.template

    def reader(self, rules: CallRules) -> MessageReader:
        return DeepSeekReader(rules)

    def grammar(
        self, tools: Sequence[ToolRule], markers: Markers, *, is_single: bool, is_free: bool
    ) -> str:
        """Returns the rule `answer` of a grammar. The rule allows one block of calls. With
        `is_free`, the rule also allows text before such a block."""
        calls = repeated("marked", self.between_calls, is_single=is_single)
        answer = markers.answer(BEGIN, "body", is_free=is_free, is_single=True)
        answer += f"body: {calls} {markers[END]}\n"
        answer += f"marked: {markers[CALL]} call {markers[CALL_END]}\n"
        return answer + one_of(tools, lambda tool: self._call(tool, markers))

    def _call(self, tool: ToolRule, markers: Markers) -> str:
        before, after = quoted(f"{tool.name}\n{FENCE}\n"), quoted(f"\n{FENCE_END}")
        return f'"function" {markers[SEPARATOR]} {before} {tool.arguments} {after}'


class DeepSeekV31(DeepSeekV3):
    """The format of tool calls of DeepSeek V3.1."""

    name = "deepseek_v31"
    models = "DeepSeek V3.1"
    between_calls = ""

    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format: the chat template contains
        `<｜tool▁call▁begin｜>`, or this mark is a special token."""
        return checkpoint.has(CALL)

    def _call(self, tool: ToolRule, markers: Markers) -> str:
        return f"{quoted(tool.name)} {markers[SEPARATOR]} {tool.arguments}"


class DeepSeekReader(ToolCallReader):
    """Reads an answer with tool calls in the formats of DeepSeek V3 and V3.1."""

    marks = (BEGIN, END)

    def _read(self) -> Steps[None]:
        text = self._text
        while (yield from self._until(BEGIN, CALL)):
            text.keep()
            yield from text.take_one(BEGIN)
            yield from text.run(SPACES)
            while (yield from self._read_marked()):
                yield from self._skip_marks("}", FENCE_END, CALL_END, END)
            self._say_no_call(text.kept())

    def _read_marked(self) -> Steps[bool]:
        """Reads a call and returns True. If no call comes next, returns False. The caller then
        treats the text that was read as content."""
        text = self._text
        if not (yield from text.take_one(CALL)):
            return False
        name = yield from text.run(_NAME)
        if not (yield from text.take_one(SEPARATOR)):
            return False
        yield from text.run(SPACES)
        if not (yield from text.comes_next("{", CALL_END)):
            name = yield from text.run(_NAME)
            yield from text.run(SPACES)
            yield from text.take_one(FENCE)
            yield from text.run(SPACES)
        return bool(name) and (yield from self._read_object_of(name, CALL_END, FENCE_END))
