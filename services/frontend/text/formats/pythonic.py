"""Tool calls as a list in Python.

    [find(what="whales", deep=True), dive()]

Llama 3.2 and models made from Llama write such a list instead of content; Llama 4 may put marks
around the list. LFM 2 writes the list between marks, among content:

    <|tool_call_start|>[find(what="whales")]<|tool_call_end|>

Without a mark, a list holds calls only if the list begins a line and begins with the name of an
existing tool. Arguments without a name get the names of the parameters in the tool's schema, in
order.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import ClassVar

from services.frontend.request.output_format import quoted
from services.frontend.text.formats.arriving_text import SPACES, Steps
from services.frontend.text.formats.call_reader import CallRules, ToolCallReader
from services.frontend.text.formats.checkpoint import Checkpoint
from services.frontend.text.formats.grammar import Markers, ToolRule, one_of, repeated
from services.frontend.text.formats.literal_grammar import PythonGrammar
from services.frontend.text.formats.literals import LiteralReader, word_or_text_as_json
from services.frontend.text.formats.parameters import Parameters, read_schema
from services.frontend.text.formats.tool_format import ToolFormat
from services.frontend.text.message_reader import MessageReader

BEGIN, END = "<|python_start|>", "<|python_end|>"

LFM_BEGIN, LFM_END = "<|tool_call_start|>", "<|tool_call_end|>"

_LINE = r"[ \t\r]*([^\[ \t\r\n][^\n]*)?"
"""Pattern of a line of text that does not begin with a list."""

_NAME = re.compile(r"[\w.-]+")


class Pythonic(ToolFormat):
    """The format of tool calls of Llama 3.2 and 4."""

    name = "pythonic"
    models = "Llama 3.2, Llama 4"
    begin: ClassVar[str] = BEGIN
    """Mark that may come before the calls."""
    end: ClassVar[str] = END
    """Mark after the calls, if there is a mark before them."""
    markers = (BEGIN, END)
    has_bare_calls = True

    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format: the chat template contains
        `[func_name1(`, `[func_call1(` or `<|python_start|>`."""
        return any(text in checkpoint.template for text in ("[func_name1(", "[func_call1(", BEGIN))

    def reader(self, rules: CallRules) -> MessageReader:
        return PythonicReader(rules, self)

    def grammar(
        self, tools: Sequence[ToolRule], markers: Markers, *, is_single: bool, is_free: bool
    ) -> str:
        """Returns the rule `answer` of a grammar. The rule allows tool calls. With `is_free`, the
        rule also allows other text."""
        calls = _list(tools, is_single=is_single)
        if not is_free:
            return f"answer: list\n{calls}"
        return f"answer: list | OTHER\nOTHER: /({_LINE}\\n)*{_LINE}/\n{calls}"


class Lfm2(Pythonic):
    """The format of tool calls of LFM 2."""

    name = "lfm2"
    models = "LFM 2, LFM 2.5"
    begin, end = LFM_BEGIN, LFM_END
    markers = (LFM_BEGIN, LFM_END)
    has_bare_calls = False

    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format: `<|tool_call_start|>` is in
        the chat template or is a special token, or the template contains `List of tools: `."""
        return checkpoint.has(self.begin) or "List of tools: " in checkpoint.template

    def grammar(
        self, tools: Sequence[ToolRule], markers: Markers, *, is_single: bool, is_free: bool
    ) -> str:
        """Returns the rule `answer` of a grammar. The rule allows tool calls. With `is_free`, the
        rule also allows text before calls."""
        answer = markers.answer(self.begin, "body", is_free=is_free, is_single=True)
        return f"{answer}body: list {markers[self.end]}\n{_list(tools, is_single=is_single)}"


def _list(tools: Sequence[ToolRule], *, is_single: bool) -> str:
    """Returns the grammar rule `list`: calls between brackets."""
    literals = {tool.name: PythonGrammar(tool, f"{tool.arguments}_") for tool in tools}
    rules = one_of(tools, lambda tool: _call(tool, literals[tool.name]))
    calls = repeated("call", ", ", is_single=is_single)
    lines = [line for one in literals.values() for line in one.rules.lines]
    return "\n".join([f'list: "[" {calls} "]"\n{rules}', *lines])


def _call(tool: ToolRule, literals: PythonGrammar) -> str:
    return f'{quoted(f"{tool.name}(")} {literals.arguments()} ")"'


class PythonicReader(ToolCallReader):
    """Reads an answer in which calls are a list in Python."""

    def __init__(self, rules: CallRules, form: Pythonic) -> None:
        super().__init__(rules)
        self._form = form
        self.marks = (form.begin, form.end)
        self._is_in_line = False
        if form.has_bare_calls:
            self._note_content = self._note_line

    def _read(self) -> Steps[None]:
        text, form = self._text, self._form
        bare = ("[",) if form.has_bare_calls else ()
        while (yield from self._until(form.begin, *bare)):
            text.keep()
            is_marked = yield from text.take_one(form.begin)
            if not is_marked and self._is_in_line:
                text.kept()
                self._say(text.take(1))
                continue
            yield from text.run(SPACES)
            if (yield from self._read_list(is_marked=is_marked)):
                yield from self._skip_marks("]", form.end)
            self._say_no_call(text.kept())

    def _note_line(self, text: str) -> None:
        """Notes whether the last line of the content contains more than white space."""
        if not self._is_in_line or "\n" in text:
            _, newline, line = text.rpartition("\n")
            self._is_in_line = bool(line.strip()) or (self._is_in_line and not newline)

    def _read_list(self, *, is_marked: bool) -> Steps[bool]:
        """Reads calls, with or without the brackets of a list, and returns True. If no call comes
        next, returns False. The caller then treats the text that was read as content."""
        text = self._text
        if is_marked and (yield from text.comes_next('[{"', "[{\n", "{")):
            return (yield from self._read_calls())
        yield from text.take_one("[")
        n_read = 0
        while True:
            yield from text.run(SPACES)
            if n_read and not _NAME.match((yield from text.peek())):
                return True
            if not (yield from self._read_named(is_marked=is_marked)):
                return False
            n_read += 1
            self._is_in_line = False
            text.keep()
            yield from text.run(SPACES)
            if not (yield from text.take_one(",", ";")):
                return True

    def _read_named(self, *, is_marked: bool) -> Steps[bool]:
        """Reads a call and returns True. If no call comes next, returns False. The caller then
        treats the text that was read as content."""
        text = self._text
        name = yield from text.run(_NAME)
        if not name or not (is_marked or name in self._rules.tools):
            return False
        if not (yield from text.take_one("(")):
            return False
        self._begin(name)
        self._argue("{")
        parameters = Parameters(read_schema(self._rules.tools.get(name, "")))
        is_closed = yield from self._read_arguments_of(iter(parameters.names))
        if is_closed or not text.is_read:
            self._argue("}")
            self._end_call()
        return True

    def _read_arguments_of(self, names: Iterator[str]) -> Steps[bool]:
        """Reads arguments up to the bracket that closes them. Returns False if something else
        follows. `names` gives names to arguments that have none."""
        text, n_read = self._text, 0
        while True:
            yield from text.run(SPACES)
            if (yield from text.take_one(")")):
                return True
            if n_read:
                if not (yield from text.take_one(",")):
                    return False
                yield from text.run(SPACES)
                if (yield from text.take_one(")")):
                    return True
                self._argue(", ")
            n_read += 1
            if not (yield from self._read_argument(names)):
                return False

    def _read_argument(self, names: Iterator[str]) -> Steps[bool]:
        """Reads an argument and returns whether its value is complete. `names` gives a name to an
        argument that has none."""
        text = self._text
        word = yield from text.run(_NAME)
        yield from text.run(SPACES)
        if text.is_read:
            return False
        is_named = bool(word) and (yield from text.take_one("="))
        name = word if is_named else next(names, "arguments")
        self._argue(f"{json.dumps(name, ensure_ascii=False)}: ")
        if word and not is_named:
            self._argue(word_or_text_as_json(word))
            return True
        return (yield from LiteralReader(text, self._argue, word_or_text_as_json).read_all())
