"""Tool calls as Functionary writes them, after content.

    Let me see.<function=find>{"what": "whales"}</function>

    all
    Let me see.>>>find
    {"what": "whales"}

Version 3.1 writes the first form. Version 3.2 writes the second: a recipient, a newline and what
the recipient gets. The recipient `all` stands for the user. `>>>` comes before each recipient. The
prompt ends with `>>>`, so answers without tools have this form too.
"""

import re
from collections.abc import Sequence

from services.frontend.request.output_format import quoted
from services.frontend.text.formats.arriving_text import SPACES, Steps
from services.frontend.text.formats.call_reader import CallRules, ToolCallReader
from services.frontend.text.formats.checkpoint import Checkpoint
from services.frontend.text.formats.grammar import (
    Markers,
    ToolRule,
    one_of,
    pattern_of,
    repeated,
)
from services.frontend.text.formats.tool_format import ToolFormat
from services.frontend.text.message_reader import MessageReader

BEGIN, END = "<function=", "</function>"

TURN, USER = ">>>", "all\n"

_NAME = re.compile(r"[\w.-]+")


class Functionary31(ToolFormat):
    """The format of tool calls of Functionary 3.1."""

    name = "functionary_v31"
    models = "Functionary 3.1"
    markers = ()

    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format: the chat template contains
        `<function=` and `</function>`."""
        return BEGIN in checkpoint.template and END in checkpoint.template

    def reader(self, rules: CallRules) -> MessageReader:
        return Functionary31Reader(rules)

    def grammar(
        self, tools: Sequence[ToolRule], markers: Markers, *, is_single: bool, is_free: bool
    ) -> str:
        answer = markers.answer(BEGIN, "call", is_free=is_free, is_single=is_single)
        return answer + one_of(
            tools, lambda tool: f"{quoted(f'{tool.name}>')} {tool.arguments} {quoted(END)}"
        )


class Functionary31Reader(ToolCallReader):
    """Reads an answer with tool calls in the format of Functionary 3.1."""

    marks = (BEGIN, END)

    def _read(self) -> Steps[None]:
        text = self._text
        while (yield from self._until(BEGIN)):
            text.keep()
            text.take(len(BEGIN))
            name = yield from text.run(_NAME)
            is_named = bool(name) and (yield from text.take_one(">"))
            yield from text.run(SPACES)
            if is_named and (yield from self._read_object_of(name, END)):
                yield from self._skip_marks("}", END)
            self._say_no_call(text.kept())


class Functionary32(ToolFormat):
    """The format of tool calls of Functionary 3.2."""

    name = "functionary_v32"
    models = "Functionary 3.2"
    markers = ()
    before_content = USER

    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format: the chat template contains
        `>>>all`, which comes before a message to the user."""
        return f"{TURN}all" in checkpoint.template

    def reader(self, rules: CallRules) -> MessageReader:
        return Functionary32Reader(rules)

    def grammar(
        self, tools: Sequence[ToolRule], markers: Markers, *, is_single: bool, is_free: bool
    ) -> str:
        """Returns the rule `answer` of a grammar. The rule allows tool calls. With `is_free`, the
        rule also allows a message with calls after it."""
        calls = one_of(tools, lambda tool: f"{quoted(_header(tool))} {tool.arguments}")
        if not is_free:
            return f"answer: {repeated('call', TURN, is_single=is_single)}\n{calls}"
        later = [
            f"later_{number}: after_{number} {tool.arguments}\n"
            rf"after_{number}[lazy]: /(.|\n)*{pattern_of(TURN + _header(tool))}/"
            for number, tool in enumerate(tools)
        ]
        marked = " | ".join(f"later_{number}" for number in range(len(tools)))
        rest = f"{quoted(USER)} (marked | TEXT) | call"
        if not is_single:
            rest = f"({quoted(USER)} | call) marked* TEXT"
        return "\n".join([f"answer: {rest}", f"marked: {marked}", *later, calls])


def _header(tool: ToolRule) -> str:
    return f"{tool.name}\n"


class Functionary32Reader(ToolCallReader):
    """Reads an answer with tool calls in the format of Functionary 3.2."""

    def _read(self) -> Steps[None]:
        text = self._text
        text.keep()
        yield from self._read_turn()
        self._say_no_call(text.kept())
        while (yield from self._until(TURN)):
            text.keep()
            text.take(len(TURN))
            yield from self._read_turn()
            self._say_no_call(text.kept())

    def _read_turn(self) -> Steps[None]:
        """Reads the name of a recipient and, if the recipient is a tool, the arguments. Any other
        text is left to the caller, which treats it as content."""
        text = self._text
        if (yield from text.begins_with(USER)):
            text.take(len(USER))
            text.kept()
            self._is_speaking = False
            return
        name = yield from text.run(_NAME)
        if name in self._rules.tools and (yield from text.take_one("\n")):
            yield from text.run(SPACES)
            if (yield from self._read_object_of(name, TURN)):
                yield from self._skip_marks("}")
