"""Reasoning between two tags, before the message itself.

    <think>Whales are mammals, so …</think>They are mammals.

Some templates open the tag themselves, so that the answer begins inside it. If the tag is never
closed, the message has no content and no calls. Some models also write tags around the message
itself; these tags are left out. A closing tag that is alone on its line in the message, and has no
opening tag, is left out too.
"""

from collections.abc import Callable
from dataclasses import dataclass

from services.frontend.request.output_format import quoted
from services.frontend.text.formats.arriving_text import (
    NEWLINES,
    SPACES,
    ArrivingText,
    Steps,
    may_begin,
)
from services.frontend.text.formats.checkpoint import Checkpoint
from services.frontend.text.formats.grammar import Markers
from services.frontend.text.formats.reasoning_format import ReasoningFormat
from services.frontend.text.message_reader import MessageDelta, MessageReader, Words


@dataclass(frozen=True, slots=True)
class Tags:
    """Tags around the reasoning and, if the format has them, around the message that follows.
    `title` is the text that the model writes after the opening tag of reasoning."""

    begin: str
    end: str
    title: str = ""
    begin_message: str = ""
    end_message: str = ""

    @property
    def all(self) -> tuple[str, ...]:
        """All tags that the format has."""
        return tuple(filter(None, (self.begin, self.end, self.begin_message, self.end_message)))


MAX_SPACES = 2
"""Largest number of white-space characters between the opening tag and the text with which a client
has begun the reasoning."""

THINK = Tags("<think>", "</think>")


class TaggedReasoning(ReasoningFormat):
    """A format of reasoning with tags around the reasoning."""

    def __init__(self, name: str, models: str, tags: Tags, *, mark: str = "") -> None:
        """`mark` is a text by which chat templates of the format are recognised. The default is the
        tag that closes the reasoning."""
        self.name = name
        self.models = models
        self.markers = tags.all
        self._tags = tags
        self._mark = mark or tags.end

    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format: the chat template contains
        the text by which the format is recognised."""
        return self._mark in checkpoint.template

    def is_opened_by(self, prompt: str, *, begun: str = "") -> bool:
        """Returns whether a prompt ends inside reasoning: an opening tag stands in `begun`, the end
        of the prompt, or directly before `begun`, and no closing tag follows."""
        prompt, begin = prompt.rstrip(), (self._tags.begin + self._tags.title).rstrip()
        at = prompt.rfind(begin)
        earliest = len(prompt) - len(begin) - len(begun.strip()) - MAX_SPACES
        return at >= max(0, earliest) and at > prompt.rfind(self._tags.end)

    def reader(
        self, rest: MessageReader, *, has_begun: bool, must_call: bool = False
    ) -> MessageReader:
        return ThinkReader(rest, has_begun=has_begun, must_call=must_call, tags=self._tags)

    def grammar(self, markers: Markers, *, is_thinking: bool) -> str:
        """Returns the grammar rule `start`: first reasoning, then a reply."""
        thought = r"thought /\n*/ reply"
        if not is_thinking:
            title = quoted(self._tags.title) if self._tags.title else ""
            thought = f"{markers[self._tags.begin]} {title} {thought} | reply"
        return f"start: {thought}\n{markers.up_to('thought', self._tags.end)}"

    def message(self, rule: str, markers: Markers) -> str:
        """Returns the grammar expression for a message: `rule` between the tags of a message."""
        tags = (self._tags.begin_message, self._tags.end_message)
        begin, end = (markers[tag] if tag else "" for tag in tags)
        return f"{begin} {rule} {end}"


FORMATS = (
    TaggedReasoning(
        "granite",
        "Granite 3.3",
        Tags("<think>", "</think>", begin_message="<response>", end_message="</response>"),
        mark="<response></response>",
    ),
    TaggedReasoning(
        "command",
        "Command R7B, Command A",
        Tags(
            "<|START_THINKING|>",
            "<|END_THINKING|>",
            begin_message="<|START_RESPONSE|>",
            end_message="<|END_RESPONSE|>",
        ),
    ),
    TaggedReasoning("magistral", "Magistral, Ministral 3 Reasoning", Tags("[THINK]", "[/THINK]")),
    TaggedReasoning("kimi", "Kimi-VL Thinking", Tags("◁think▷", "◁/think▷")),
    TaggedReasoning("seed", "Seed-OSS", Tags("<seed:think>", "</seed:think>")),
    TaggedReasoning("gemma4", "Gemma 4", Tags("<|channel>", "<channel|>", "thought\n")),
    TaggedReasoning("think", "DeepSeek R1 and V3, GLM 4, Kimi K2, Qwen 3, SmolLM 3", THINK),
)
"""Formats of reasoning with tags, in the order in which they are looked for in a checkpoint."""


class ThinkReader:
    """Reads the reasoning of an answer, and leaves the rest of the answer to another reader."""

    def __init__(
        self, rest: MessageReader, *, has_begun: bool, must_call: bool = False, tags: Tags = THINK
    ) -> None:
        """`has_begun` says whether the answer begins inside the reasoning. With `must_call`, only
        calls may follow the reasoning: if the text ends with the beginning of a tag, this beginning
        does not become content."""
        self._rest = rest
        self._must_call = must_call
        self._tags = tags
        self._text = ArrivingText()
        self._new = MessageDelta()
        self._n_given = 0  # characters of the answer up to the end of what `rest` has got
        self._last = ""  # last character of the message so far
        self._may_begin_tag: Callable[[str], object] | None = None
        """Function that returns whether a tag may begin in a given text: a tag that ends the
        reasoning, or that may stand in the message. None while the reader reads another part of the
        answer."""
        self._delta_of: Callable[[str], MessageDelta] = self._said
        """Function that returns what a text without tags adds to the message. The function depends
        on the part of the answer that is being read."""
        self._steps = self._read(has_begun=has_begun)

    @property
    def n_tool_calls(self) -> int:
        """Number of tool calls that have begun so far."""
        return self._rest.n_tool_calls

    @property
    def ends_in_call(self) -> bool:
        """Whether the answer so far ends inside the arguments of a call."""
        return self._rest.ends_in_call

    def leave_out(self, n_characters: int) -> None:
        """Notes that the model has written `n_characters` characters that this reader does not get,
        after the text that the reader has been given so far."""
        self._text.leave_out(n_characters)

    def feed(self, text: str) -> MessageDelta:
        """Takes new text and returns what the text adds to the message."""
        may_begin_tag = self._may_begin_tag
        if may_begin_tag and text and not may_begin_tag(text) and self._text.is_empty:
            self._text.pass_over(len(text))
            return self._delta_of(text)  # as the steps would
        self._text.add(text)
        next(self._steps, None)
        delta, self._new = self._new, MessageDelta()
        return delta

    def flush(self) -> MessageDelta:
        """Ends the text, and returns the part of the message that was held back."""
        self._text.end()
        return self.feed("") + self._rest.flush()

    def _read(self, *, has_begun: bool) -> Steps[None]:
        text, tags = self._text, self._tags
        begin = tags.begin + tags.title
        if not has_begun:
            text.keep()
            yield from text.run(SPACES)
            has_begun = yield from text.begins_with(begin)
            if has_begun:
                text.take(len(begin))
                text.kept()
        if has_begun:
            yield from text.run(NEWLINES)
            if (yield from self._until((tags.end,), self._thought)):
                text.take(len(tags.end))
                yield from text.run(NEWLINES)
        elif (yield from text.begins_with(tags.end)):
            text.take(len(tags.end))
            text.kept()
            yield from text.run(NEWLINES)
        elif self._must_call:
            text.kept()
            yield from text.skip(begin)
        else:
            self._pass_on(text.kept())
        if tags.begin_message:
            yield from self._read_message()
        yield from self._read_rest()

    def _read_message(self) -> Steps[None]:
        """If a message between tags comes next, passes the text between the tags on to the reader
        `rest`."""
        text, tags = self._text, self._tags
        text.keep()
        yield from text.run(SPACES)
        if not (yield from text.begins_with(tags.begin_message)):
            self._pass_on(text.kept())
            return
        text.take(len(tags.begin_message))
        text.kept()
        if (yield from self._until((tags.end_message,), self._said)):
            text.take(len(tags.end_message))

    def _read_rest(self) -> Steps[None]:
        """Passes the rest of the answer on to the reader `rest`. Leaves out closing tags that are
        alone on their line and have no opening tag."""
        text, tags, n_open = self._text, (self._tags.begin, self._tags.end), 0
        while True:
            tag = yield from self._until(tags, self._said)
            if not tag:
                return
            text.take(len(tag))
            is_stray = tag == self._tags.end and not n_open and self._last in ("", "\n")
            if is_stray and (yield from text.peek()) in ("", "\n"):
                yield from text.run(NEWLINES)
                continue
            n_open = n_open + 1 if tag == self._tags.begin else max(0, n_open - 1)
            self._pass_on(tag)

    def _until(self, tags: tuple[str, ...], delta_of: Callable[[str], MessageDelta]) -> Steps[str]:
        """Calls `delta_of` with the text before the next tag, adds the returned delta to the
        message, and returns the tag. Returns an empty text if the text ends without a tag."""
        self._may_begin_tag, self._delta_of = may_begin(tags), delta_of
        tag = yield from self._text.until(tags, self._add)
        self._may_begin_tag = None
        return tag

    def _thought(self, text: str) -> MessageDelta:
        """Returns the delta that adds a text to the reasoning. The text must end with the character
        that was read last."""
        return MessageDelta((Words(text, True, self._text.position),))

    def _said(self, text: str) -> MessageDelta:
        """Passes a text on to the reader of the rest of the answer, and returns the delta that this
        reader makes. The text must end with the character that was read last."""
        self._last = text[-1]
        end = self._text.position
        if n_left_out := end - len(text) - self._n_given:
            self._rest.leave_out(n_left_out)
        self._n_given = end
        return self._rest.feed(text)

    def _add(self, text: str) -> None:
        """Adds the delta that `_delta_of` returns for `text` to the message."""
        if text:
            self._new += self._delta_of(text)

    def _pass_on(self, text: str) -> None:
        """Passes a text on to the reader of the rest of the answer, and adds the result to the
        message."""
        if text:
            self._new += self._said(text)
