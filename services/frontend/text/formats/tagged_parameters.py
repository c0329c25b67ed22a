"""A format in which each call is an element with tags, and contains an element for each argument.
Several families of models write it with different tags.

    <tool_call>
    <function=find>
    <parameter=what>
    whales
    </parameter>
    </function>
    </tool_call>

The outer element (here `tool_call`) is called a block. A block may hold several calls, and calls
may come without the tags of a block.
"""

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from services.frontend.request.output_format import quoted
from services.frontend.text.formats.arriving_text import SPACES, Steps
from services.frontend.text.formats.call_reader import CallRules
from services.frontend.text.formats.checkpoint import Checkpoint
from services.frontend.text.formats.grammar import Markers, ToolRule, one_of, repeated
from services.frontend.text.formats.parameter_grammar import ParameterGrammar, Spelling
from services.frontend.text.formats.parameter_reader import ParameterReader
from services.frontend.text.formats.parameters import TEXT
from services.frontend.text.formats.tool_format import ToolFormat
from services.frontend.text.message_reader import MessageReader

NOT_TEXT = frozenset(("null", "boolean", "integer", "number", "array", "object"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """The tags that a format writes around calls and arguments."""

    block: str
    """Tag that begins a block of calls, in the form in which the grammar writes it."""
    block_end: str
    other_blocks: tuple[str, ...] = ()
    """Other tags that may begin a block."""
    other_block_ends: tuple[str, ...] = ()
    """Other tags that may end a block."""
    call: str
    """Beginning of the tag of a call, up to the name of the tool."""
    call_end: str
    parameter: str
    """Beginning of the tag of an argument, up to the name of the parameter."""
    parameter_end: str
    name_end: str
    """Text after a name in a tag, up to and including the end of the tag."""
    text_kind: str = ""
    """End of the tag of an argument that is a string. Empty if the format does not write the kind
    of an argument."""
    value_kind: str = ""
    """End of the tag of an argument that is not a string. Empty if the format does not write the
    kind of an argument."""
    has_padding: bool = False
    """Whether the format puts a newline before and after each value. These newlines do not belong
    to the value."""
    has_one_call: bool = False
    """Whether a block may hold only one call."""

    @property
    def blocks(self) -> tuple[str, ...]:
        """All tags that begin a block."""
        return (self.block, *self.other_blocks)

    @property
    def ends(self) -> tuple[str, ...]:
        """All tags that end a block, a call or a parameter."""
        return (self.block_end, *self.other_block_ends, self.call_end, self.parameter_end)


class TaggedParameters(ToolFormat):
    """Base class of formats in which calls, and the arguments of calls, are elements with tags."""

    tags: ClassVar[Tags]

    @abstractmethod
    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format."""

    def reader(self, rules: CallRules) -> MessageReader:
        return TaggedParametersReader(rules, self.tags)

    def grammar(
        self, tools: Sequence[ToolRule], markers: Markers, *, is_single: bool, is_free: bool
    ) -> str:
        """Returns the rule `answer` of a grammar. The rule allows blocks of calls. With `is_free`,
        the rule also allows text with blocks in it."""
        tags = self.tags
        calls = "call" if tags.has_one_call else repeated("call", "", is_single=is_single)
        body = f"body: {quoted(NEWLINE)} {calls} {markers.written(tags.block_end)}\n"
        is_one_block = is_single or not tags.has_one_call
        answer = markers.answer(
            tags.block, "body", is_free=is_free, is_single=is_one_block, between=NEWLINE
        )
        spelling = Spelling(
            before_name=tags.parameter,
            after_name=(tags.text_kind or tags.name_end) + NEWLINE * tags.has_padding,
            after_value_name=(tags.value_kind or tags.name_end) + NEWLINE * tags.has_padding,
            name_end=tags.name_end[0],
            end=NEWLINE * tags.has_padding + tags.parameter_end,
            after=NEWLINE,
        )
        parameters = ParameterGrammar(markers, spelling)
        rules = one_of(tools, lambda tool: self._call(tool, markers, parameters))
        return "\n".join([answer + body + rules, *parameters.rules.lines])

    def _call(self, tool: ToolRule, markers: Markers, parameters: ParameterGrammar) -> str:
        begin = markers.written(f"{self.tags.call}{tool.name}{self.tags.name_end}{NEWLINE}")
        end = markers.written(self.tags.call_end + NEWLINE)
        return f"{begin} {parameters.of(tool)} {end}"


NEWLINE = "\n"


class TaggedParametersReader(ParameterReader):
    """Reads an answer that writes each call, and each argument of a call, as an element with tags.
    A block may also hold calls as JSON."""

    def __init__(self, rules: CallRules, tags: Tags) -> None:
        super().__init__(rules)
        self._tags = tags
        self.marks = (*tags.blocks, tags.block_end, *tags.other_block_ends)
        self._name = re.compile(rf"[^\n{re.escape(tags.name_end[0])}]+")
        self.has_padding = tags.has_padding

    def _read(self) -> Steps[None]:
        tags, text = self._tags, self._text
        while (yield from self._until(*tags.blocks, tags.call)):
            text.keep()
            yield from text.take_one(*tags.blocks)
            yield from text.run(SPACES)
            if (yield from text.peek()) == "{" and (yield from self._read_calls()):
                yield from self._skip_marks("}", *tags.ends)
            while (yield from self._read_element()):
                yield from self._skip_marks(*tags.ends)
            self._say_no_call(text.kept())

    def _read_element(self) -> Steps[bool]:
        """Reads a call and returns True. If no call comes next, returns False. The caller then
        treats the text that was read as content."""
        text = self._text
        name = yield from self._read_name(self._tags.call)
        if not name or not (yield from text.take_one(self._tags.name_end)):
            return False
        self._begin_object(name)
        while (yield from self._read_parameter()):
            pass
        return True

    def _read_parameter(self) -> Steps[bool]:
        """Reads an argument of a call. Returns False at the end of the arguments."""
        tags, text = self._tags, self._text
        text.keep()
        yield from text.run(SPACES)
        name = yield from self._read_name(tags.parameter)
        if not name:
            yield from self._end_element()
            return False
        types = self._parameters.types(name)
        if tags.text_kind and (yield from text.take_one(tags.text_kind)):
            types = TEXT if types is None or "string" in types else types
        elif tags.value_kind and (yield from text.take_one(tags.value_kind)):
            types = types if types == TEXT else (types or NOT_TEXT) - {"string"}
        elif not (yield from text.take_one(tags.name_end)):
            yield from self._end_element()
            return False
        text.kept()
        return (yield from self._read_value(name, tags.parameter_end, types))

    def _end_element(self) -> Steps[None]:
        """Ends a call, unless the answer ends inside the call. Text that was read and is no part of
        the call becomes content."""
        if (yield from self._text.take_one(self._tags.call_end)):
            self._text.kept()
            self._end_object()
            return
        yield from self._end_broken_object(self._tags.parameter, *self._tags.ends)

    def _read_name(self, begin: str) -> Steps[str]:
        """Returns the name in a tag that begins with `begin`. Returns an empty text if no such tag
        comes next."""
        if not (yield from self._text.take_one(begin)):
            return ""
        return (yield from self._text.run(self._name)).strip()
