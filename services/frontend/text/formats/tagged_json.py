"""A format with calls as JSON objects, or as a list of JSON objects, after a mark.

    <|tool_call|>[{"name": "find", "arguments": {"what": "whales"}}]<|/tool_call|>

The formats of many families of models differ only in the marks, in the names of the members, and in
the white space.
"""

import json
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from services.frontend.request.output_format import quoted
from services.frontend.text.formats.arriving_text import SPACES, Steps
from services.frontend.text.formats.call_reader import CallRules, ToolCallReader
from services.frontend.text.formats.checkpoint import Checkpoint
from services.frontend.text.formats.grammar import Markers, ToolRule, one_of, repeated
from services.frontend.text.formats.tool_format import ToolFormat
from services.frontend.text.message_reader import MessageReader


class TaggedJson(ToolFormat):
    """Base class of formats in which calls are JSON after a mark."""

    begin: ClassVar[str]
    """Mark before the calls, in the form in which the grammar writes it."""
    end: ClassVar[str] = ""
    """Mark after the calls."""
    other_begins: ClassVar[tuple[str, ...]] = ()
    """Other marks that may come before calls."""
    leftovers: ClassVar[tuple[str, ...]] = ()
    """Other marks that may come after calls. They do not belong to the content."""
    silent: ClassVar[tuple[str, ...]] = ()
    """Marks around content. They do not belong to the content."""
    opening: ClassVar[str] = "["
    """Text between the mark before the calls and the first call, as the grammar writes it."""
    separator: ClassVar[str] = ", "
    """Text between two calls, as the grammar writes it."""
    closing: ClassVar[str] = "]"
    """Text between the last call and the mark after the calls, as the grammar writes it."""
    call_begin: ClassVar[str] = '{"name": '
    """Text at the beginning of a call, up to the name of the tool, as the grammar writes it."""
    before_arguments: ClassVar[str] = ', "arguments": '
    """Text of a call between the tool's name and the arguments, as the grammar writes it."""
    call_end: ClassVar[str] = "}"
    """Text of a call after the arguments, as the grammar writes it."""
    needs_names: ClassVar[bool] = False
    """Whether JSON counts as a call only if it has the name of an existing tool."""

    @abstractmethod
    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format."""

    def reader(self, rules: CallRules) -> MessageReader:
        return TaggedJsonReader(rules, self)

    def grammar(
        self, tools: Sequence[ToolRule], markers: Markers, *, is_single: bool, is_free: bool
    ) -> str:
        """Returns the rule `answer` of a grammar. The rule allows tool calls. With `is_free`, the
        rule also allows text before calls."""
        is_single = is_single or not self.has_parallel_calls
        calls = repeated("call", self.separator, is_single=is_single)
        parts = (markers.written(self.opening), calls, markers.written(self.closing + self.end))
        answer = markers.answer(self.begin, "body", is_free=is_free, is_single=True)
        return f"{answer}body: {' '.join(parts)}\n{one_of(tools, self._call)}"

    def _call(self, tool: ToolRule) -> str:
        begin = self.call_begin + json.dumps(tool.name, ensure_ascii=False) + self.before_arguments
        return f"{quoted(begin)} {tool.arguments} {quoted(self.call_end)}"


class TaggedJsonReader(ToolCallReader):
    """Reads an answer in which calls are JSON after a mark."""

    def __init__(self, rules: CallRules, form: TaggedJson) -> None:
        super().__init__(rules)
        self._form = form
        self._begins = (form.begin, *form.other_begins)
        ends = tuple(filter(None, (form.end, *form.leftovers)))
        self.marks = (*self._begins, *ends)
        self._ends = ("}", "]", *ends)

    def _read(self) -> Steps[None]:
        text = self._text
        is_call = self._rules.tools.__contains__ if self._form.needs_names else bool
        while (yield from self._until(*self._begins, *self._form.silent)):
            if (yield from text.take_one(*self._form.silent)):
                self._is_speaking = False
                continue
            text.keep()
            yield from text.take_one(*self._begins)
            yield from text.run(SPACES)
            if (yield from self._read_calls(is_call)):
                yield from self._skip_marks(*self._ends)
            self._say_no_call(text.kept())
