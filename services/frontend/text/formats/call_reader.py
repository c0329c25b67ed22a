"""Reads tool calls in the text of a model: the code that the formats of all families of models
share.

A call is a JSON object with a name and arguments. When the name is known, the arguments are passed
on as they come. Text that looked like a call but is none becomes content, so that no text is lost.
White space around calls is not content. If the answer ends inside a call before its arguments, the
beginning of the call is dropped, provided that another call came before or a call is required.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from services.frontend.text import near_json
from services.frontend.text.formats.arriving_text import SPACES, ArrivingText, Steps, may_begin
from services.frontend.text.message_reader import CallDelta, MessageDelta, Part, Words

ARGUMENTS = ("arguments", "parameters")
"""Names that the member with a call's arguments may have."""

NAMES = ("name", "tool_name")
"""Names that the JSON member with the tool's name may have in a call."""

MARGINAL = ("id", "call_id", "tool_call_id", "type", "index")
"""Names of members of a call that are ignored. These members may also come after the arguments."""

_NO_KEY = re.compile(r"[{}\[\]\"]")
"""Characters that never occur in the name of a member. If the text between two quotes contains one,
it is no name: the model has written a quote too many."""

_SCALAR = re.compile(r"[^,}\]\s]+")
_BRACES = re.compile(r"[} \t\r\n]+")
FENCES = ("```json", "```")
"""Marks that some models write around calls, as they do around code."""

CLOSING = re.compile(r"[}\]]+")
"""Closing brackets after a call that match no opening bracket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """The rules that the calls of one answer must follow."""

    new_id: Callable[[int], str]
    """Function that returns the id of the call with a given index. The function must always return
    the same id for the same index."""
    tools: Mapping[str, str] = field(default_factory=dict)
    """Schema of the arguments of each existing tool as a JSON text, keyed by the name of the tool.
    An empty text allows any object."""
    is_single: bool = False
    """Whether all calls after the first are dropped."""
    must_call: bool = False
    """Whether the answer must consist of calls."""
    is_exclusive: bool = False
    """Whether the answer consists either only of calls or only of content."""


@dataclass(slots=True)
class _CallSoFar:
    """The parts of a call that have been read so far."""

    name: str = ""
    arguments: str = ""
    has_begun: bool = False
    has_other: bool = False
    """Whether the object has another member besides the arguments, or in place of them."""


class ToolCallReader(ABC):
    """Base class of the readers that separate the content and the calls of an answer. The subclass
    for each family of models defines in which order content and calls come."""

    marks: tuple[str, ...] = ()
    """Marks before and after calls. A text at the end of the answer that could be the beginning of
    a call is dropped. But if it contains one of these marks after its beginning, it becomes
    content."""

    def __init__(self, rules: CallRules) -> None:
        self.n_tool_calls = 0
        self._rules = rules
        self._text = ArrivingText()
        self._steps = self._read()
        self._new: list[Part] = []
        self._new_arguments: list[str] = []
        self._spaces: list[Words] = []  # white space that is content only if words follow
        self._is_speaking = False
        self._is_left_out = False
        self._is_in_arguments = False
        self._may_begin_mark: Callable[[str], object] | None = None
        """Function that returns whether a mark that ends the content or the reasoning may begin in
        a given text. None while the reader reads another part of the answer."""
        self._is_reasoning = False
        """Whether reasoning is being read at the moment."""
        self._note_content: Callable[[str], None] | None = None
        """Function that gets all new content, if the reader needs to see the content."""

    @property
    def ends_in_call(self) -> bool:
        """Whether the answer so far ends inside the arguments of a call."""
        return self._is_in_arguments

    def leave_out(self, n_characters: int) -> None:
        """Notes that the model has written `n_characters` characters that this reader does not get,
        after the text that the reader has been given so far."""
        self._text.leave_out(n_characters)

    def feed(self, text: str) -> MessageDelta:
        """Takes new text and returns what the text adds to the message."""
        may_begin_mark = self._may_begin_mark
        is_words = (self._is_speaking or self._is_reasoning) and text and self._text.is_empty
        if is_words and may_begin_mark and not may_begin_mark(text):  # do as the steps would
            if self._note_content:
                self._note_content(text)
            end = self._text.pass_over(len(text))
            return MessageDelta((Words(text, self._is_reasoning, end),))
        self._text.add(text)
        next(self._steps, None)
        return self._take_delta()

    def flush(self) -> MessageDelta:
        """Ends the text, and returns the part of the message that was held back."""
        self._text.end()
        next(self._steps, None)
        if not self.n_tool_calls:
            self._speak_spaces()
        return self._take_delta()

    @abstractmethod
    def _read(self) -> Steps[None]:
        """Reads the answer from its beginning to its end."""

    def _say(self, text: str) -> None:
        """Adds a text to the content. The text must end with the character that was read last.
        White space at the beginning of the content is held back until other characters follow."""
        if self._note_content:
            self._note_content(text)
        if not text:
            return
        words = [Words(part, end=end) for part, end in self._text.placed(text)]
        if self._is_speaking:
            self._new += words
            return
        self._spaces += words
        if text.strip():
            self._is_speaking = True
            self._speak_spaces()

    def _speak_spaces(self) -> None:
        """Adds the white space that was held back to the content. Before that, ends the arguments
        of the last call if they are still open."""
        self._end_arguments()
        self._new += self._spaces
        self._spaces.clear()

    def _until(self, *markers: str) -> Steps[str]:
        """Adds the text before the next marker as content, and returns the marker without moving
        past it. Returns an empty text if the text ends without a marker. With `is_exclusive`, only
        a marker at the beginning of the answer or after a call counts."""
        text = self._text
        if not self._rules.is_exclusive:
            return (yield from self._say_until(markers, self._say_cut_marker))
        if not self._is_speaking:
            text.keep()
            yield from text.run(SPACES)
            for marker in markers:
                if (yield from text.begins_with(marker)):
                    self._say(text.kept())
                    return marker
            self._say(text.kept())
            if self.n_tool_calls:
                for marker in markers:
                    yield from text.skip(marker)
        yield from text.rest(self._say)
        return ""

    def _say_until(
        self, markers: tuple[str, ...], say_cut: Callable[[str], None] | None = None
    ) -> Steps[str]:
        """Adds the text before the next marker as content, and returns the marker. If the answer
        ends with the beginning of a marker, this beginning is passed to `say_cut`, if that is
        given, instead of being added."""
        self._may_begin_mark = may_begin(markers)
        marker = yield from self._text.until(markers, self._say, say_cut)
        self._may_begin_mark = None
        return marker

    def _say_cut_marker(self, text: str) -> None:
        """Adds `text`, the beginning of a marker at the end of the answer, as content. Drops the
        text instead if a call came before or a call is required."""
        follows_call = self.n_tool_calls > 0 and not self._is_speaking
        if not (self._rules.must_call or follows_call):
            self._say(text)

    def _say_no_call(self, text: str) -> None:
        """Adds text that looked like a call, but is none, to the content. If the text may be a call
        that the end of the answer has cut off, drops the text instead."""
        may_be_cut = self._text.is_read and (self._rules.must_call or self.n_tool_calls > 0)
        first = next((mark for mark in self.marks if text.startswith(mark)), "")
        if not may_be_cut or any(mark in text[len(first) or 1 :] for mark in self.marks):
            self._say(text)

    def _begin(self, name: str, call_id: str = "") -> None:
        """Begins a call. Its arguments follow (`_argue`) until `_end_call`. The text that has been
        recorded (`ArrivingText.keep`) belongs to the call, and is dropped. `call_id` is the id that
        the model has written. It is empty if the model writes no ids."""
        self._text.kept()
        self._spaces.clear()
        self._is_speaking = False
        self._end_arguments()
        self._is_left_out = self._rules.is_single and self.n_tool_calls > 0
        self._is_in_arguments = not self._is_left_out
        if not self._is_left_out:
            index = self.n_tool_calls
            self.n_tool_calls += 1
            delta = CallDelta(index=index, id=call_id or self._rules.new_id(index), name=name)
            self._new.append(delta)

    def _argue(self, text: str) -> None:
        """Adds text to the arguments of the call that has begun."""
        if not self._is_left_out:
            self._new_arguments.append(text)

    def _end_call(self) -> None:
        """Ends the arguments of the call that has begun."""
        self._is_in_arguments = False

    def _skip_marks(self, *marks: str) -> Steps[None]:
        """Moves past marks that end a call, in any order and number, and past the white space
        between them. White space after the last mark stays recorded (`ArrivingText.keep`), because
        it may belong to the content."""
        text = self._text
        text.keep()
        yield from text.run(SPACES)
        while (yield from text.take_one(*marks)):
            text.kept()
            text.keep()
            yield from text.run(SPACES)
        yield from text.skip_cut(*marks)

    def _read_object_of(self, name: str, *ends: str, call_id: str = "") -> Steps[bool]:
        """Reads the arguments of a call of the tool `name`: a JSON object, or nothing if one of the
        marks `ends` comes next. Returns False if something else comes next, because the text is
        then not a call."""
        text = self._text
        has_object = yield from text.begins_with("{")
        if not has_object and not (yield from text.comes_next(*ends)):
            yield from text.skip_cut(*ends)
            return False
        self._begin(name, call_id)
        if not has_object:
            self._argue("{}")
        if not has_object or (yield from text.json_value(self._argue)):
            self._end_call()
        return True

    def _read_calls(self, is_call: Callable[[str], object] = bool) -> Steps[bool]:
        """Reads one or several calls, with or without the brackets of a list, and with or without a
        code fence (three backquotes) around them. Closing brackets that match no opening bracket
        are dropped. `is_call` says whether a name is the name of a tool.

        Returns False if the text is not a call. The caller then treats the text since the last call
        as content.
        """
        text = self._text
        is_fenced = yield from text.take_one(*FENCES)
        yield from text.run(SPACES)
        has_brackets = yield from text.begins_with("[")
        if has_brackets:
            text.take(1)
        while True:
            yield from text.run(SPACES)
            if not (yield from self._read_call(is_call)):
                return False
            text.keep()
            yield from text.run(_BRACES)
            follows = yield from text.peek()
            if follows in (",", ";"):
                text.take(1)
            elif follows != "{":
                break
        if follows == "]":
            yield from text.run(CLOSING)
        if is_fenced:
            yield from text.run(SPACES)
            yield from text.skip(FENCES[-1])
            yield from text.run(SPACES)
        return True

    def _read_call(self, is_call: Callable[[str], object]) -> Steps[bool]:
        """Reads a JSON object. Returns whether the object is a call."""
        text, call = self._text, _CallSoFar()
        if not (yield from text.begins_with("{")):
            return False
        text.take(1)
        if (yield from text.begins_with("{")):  # as in templates, where a brace is written twice
            text.take(1)
        while True:
            yield from text.run(SPACES)
            if (yield from text.begins_with("}")):
                text.take(1)
                break
            if not (yield from self._read_member(call, is_call)):
                return False
            yield from text.run(SPACES)
            if (yield from text.begins_with(",")):
                text.take(1)
            elif not (yield from text.begins_with("}")):
                return False
        if call.has_begun:
            return True
        if not call.name or (call.has_other and not call.arguments):
            return False
        self._begin(call.name)
        self._argue(call.arguments or "{}")
        self._end_call()
        return True

    def _read_member(self, call: _CallSoFar, is_call: Callable[[str], object]) -> Steps[bool]:
        """Reads a member of a call's JSON object: a name and its value. Returns whether the member
        is complete and may be part of a call."""
        text = self._text
        key = yield from self._read_string()
        yield from text.run(SPACES)
        if key is None or _NO_KEY.search(key) or not (yield from text.begins_with(":")):
            return False
        text.take(1)
        yield from text.run(SPACES)
        first = yield from text.peek()
        has_others = key in ARGUMENTS and call.arguments  # only these could be passed on
        if has_others or (call.has_begun and key not in MARGINAL):
            return False
        if key in ARGUMENTS and first == "{" and call.name and not call.has_begun:
            self._begin(call.name)
            call.has_begun = True
            is_whole = yield from text.json_value(self._argue)
            if is_whole:
                self._end_call()
            text.keep()
            return is_whole
        if key not in (*ARGUMENTS, *MARGINAL, "name"):
            call.has_other = True
        if first not in ("{", "[", '"', "'"):
            scalar = yield from text.run(_SCALAR)
            return bool(scalar) and (key not in ARGUMENTS or scalar in ("null", "None"))
        parts: list[str] = []
        if not (yield from text.json_value(parts.append)):
            return False
        value = "".join(parts)
        if key in NAMES and not call.name:
            name = _string_of(value)
            call.name = name if name and is_call(name) else ""
            return bool(call.name)
        if key in ARGUMENTS:
            written = _string_of(value)  # some models write the object as a JSON string
            call.arguments = value if written is None else written
        return True

    def _read_string(self) -> Steps[str | None]:
        """Returns the value of a string, if one comes next. Otherwise returns None."""
        parts: list[str] = []
        if (yield from self._text.peek()) not in ('"', "'"):
            return None
        if not (yield from self._text.json_value(parts.append)):
            return None
        return _string_of("".join(parts))

    def _end_arguments(self) -> None:
        if self._new_arguments:
            arguments = "".join(self._new_arguments)
            self._new_arguments.clear()
            self._new.append(CallDelta(index=self.n_tool_calls - 1, arguments=arguments))

    def _take_delta(self) -> MessageDelta:
        self._end_arguments()
        if not self._new:
            return _NOTHING
        delta = MessageDelta(tuple(self._new))
        self._new.clear()
        return delta


_NOTHING = MessageDelta()


def _string_of(text: str) -> str | None:
    """Returns the value of a string in JSON or in nearly correct JSON. Returns None if the text is
    not a string."""
    if not text.startswith(('"', "'")):
        return None
    return near_json.string_of(text)
