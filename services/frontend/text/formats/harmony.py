"""Messages as gpt-oss writes them, in the format Harmony: an answer is a sequence of messages, each
on a channel.

    <|channel|>analysis<|message|>Whales, so …<|end|>
    <|start|>assistant<|channel|>final<|message|>They are mammals.<|return|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>

The channel `analysis` is reasoning. A message to `functions.NAME` is a call, and its text has the
arguments. All other messages are content. The recipient may also stand before the channel. The
prompt ends with `<|start|>assistant`, so an answer begins in the header of its first message.
"""

import re
from collections.abc import Sequence

from services.frontend.request.output_format import quoted
from services.frontend.text import near_json
from services.frontend.text.formats.arriving_text import SPACES, Steps, may_begin
from services.frontend.text.formats.call_reader import CallRules, ToolCallReader
from services.frontend.text.formats.checkpoint import Checkpoint
from services.frontend.text.formats.grammar import Markers, ToolRule, one_of
from services.frontend.text.formats.reasoning_format import ReasoningFormat
from services.frontend.text.formats.tool_format import ToolFormat
from services.frontend.text.message_reader import MessageReader, Words

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)

AFTER_BODY = (END, CALL, RETURN, START, CHANNEL)
"""Marks that end the text of a message. The last two of these marks begin the next message."""

ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_HEADER_STARTS = (START, CHANNEL, CONSTRAIN, MESSAGE, "to=")


def _begun(*words: str) -> str:
    """Returns a pattern that matches each of the words, and each prefix of a word."""
    return "(?:" + "|".join(word[:n] for word in words for n in range(len(word), -1, -1)) + ")"


_CUT_HEADER = re.compile(
    rf"(?=<\||to=functions)(?:<\|start\|>{_begun('assistant')})? ?(?:to=[\w.-]*)? ?"
    rf"(?:<\|channel\|>{_begun('analysis', 'commentary', 'final')}(?: to=[\w.-]*)?)? ?"
    rf"(?:<\|constrain\|>)? ?{_begun('json')}"
)
"""Matches the header of a message, or the beginning of a header. White space around the header must
have been removed, and spaces in it must be single."""


class Harmony(ToolFormat):
    """The format Harmony, as a format of tool calls."""

    name = "harmony"
    models = "gpt-oss"
    markers = MARKERS
    end_tokens = (RETURN, CALL)
    has_parallel_calls = False

    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format: the marks of channels and
        messages are in the chat template or are special tokens."""
        return checkpoint.has(CHANNEL, MESSAGE)

    def reader(self, rules: CallRules) -> MessageReader:
        """Returns a new reader for an answer. The reader takes the channel `analysis` as
        content."""
        return HarmonyReader(rules)

    def grammar(
        self, tools: Sequence[ToolRule], markers: Markers, *, is_single: bool, is_free: bool
    ) -> str:
        """Returns the rule `answer` of a grammar. The rule allows one call. With `is_free`, the
        rule also allows content before the call, or content alone."""
        answer = "answer: call"
        if is_free:
            said = f'{markers[CHANNEL]} ("commentary" | "final") {markers[MESSAGE]}'
            answer = f'answer: ({said} body {markers[START]} "assistant")* (call | {said} TEXT)\n'
            answer += markers.up_to("body", END)
        return f"{answer}\n{one_of(tools, lambda tool: _call(tool, markers))}"


def _call(tool: ToolRule, markers: Markers) -> str:
    """Returns the grammar expression for a call. The recipient may stand after or before the
    channel."""
    recipient = quoted(f"to=functions.{tool.name}")
    channel = f'{markers[CHANNEL]} "commentary"'
    header = f'({channel} " " {recipient} | " " {recipient} {channel})'
    return f'{header} " " {markers[CONSTRAIN]}? "json" {markers[MESSAGE]} {tool.arguments}'


class HarmonyReasoning(ReasoningFormat):
    """The format Harmony, as a format of reasoning."""

    name = "harmony"
    models = "gpt-oss"
    markers = MARKERS

    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format: the marks of channels and
        messages are in the chat template or are special tokens."""
        return checkpoint.has(CHANNEL, MESSAGE)

    def is_opened_by(self, prompt: str, *, begun: str = "") -> bool:
        """Returns whether a prompt ends inside a message on the channel `analysis`."""
        at = prompt.rfind(ANALYSIS)
        return at >= 0 and prompt.find(END, at) < 0

    def reader(
        self, rest: MessageReader, *, has_begun: bool, must_call: bool = False
    ) -> MessageReader:
        """Returns a reader that returns the channel `analysis` of an answer as reasoning. If `rest`
        reads calls in the format Harmony, this is `rest` itself, otherwise a new reader that knows
        no tools."""
        reader = rest if isinstance(rest, HarmonyReader) else HarmonyReader(CallRules(new_id=str))
        reader.separate_reasoning(has_begun=has_begun)
        return reader

    def grammar(self, markers: Markers, *, is_thinking: bool) -> str:
        """Returns the grammar rule `start`: any number of messages on the channel `analysis`, then
        the rule `reply`."""
        thought = f'body {markers[START]} "assistant"'
        opened = f'{markers[CHANNEL]} "analysis" {markers[MESSAGE]} {thought}'
        start = f"start: {thought if is_thinking else ''} ({opened})* reply"
        return f"{start}\n{markers.up_to('thought_body', END)}".replace(" body ", " thought_body ")

    def message(self, rule: str, markers: Markers) -> str:
        """Returns the grammar expression for a message on the channel `final`."""
        return f'{markers[CHANNEL]} "final" {markers[MESSAGE]} {rule}'


class HarmonyReader(ToolCallReader):
    """Reads an answer in the format Harmony."""

    def __init__(self, rules: CallRules) -> None:
        super().__init__(rules)
        self._separates_reasoning = False
        self._is_thinking = False

    def separate_reasoning(self, *, has_begun: bool) -> None:
        """Makes the reader return the channel `analysis` as reasoning. `has_begun` says whether the
        answer begins inside that channel."""
        self._separates_reasoning = True
        self._is_thinking = has_begun

    def _read(self) -> Steps[None]:
        text = self._text
        if self._is_thinking:
            yield from self._read_words(self._think_until(AFTER_BODY))
        while (yield from text.peek()):
            text.keep()
            yield from text.run(SPACES)
            if (yield from self._is_at_header()):
                yield from self._read_message()
            else:
                self._say(text.kept())
                yield from self._read_words(self._say_until(AFTER_BODY))

    def _is_at_header(self) -> Steps[bool]:
        """Returns whether the header of a message comes next."""
        for start in _HEADER_STARTS:
            if (yield from self._text.begins_with(start)):
                return True
        return False

    def _read_message(self) -> Steps[None]:
        """Reads a message with its header. Call it while the text is being recorded
        (`ArrivingText.keep`), because the header may turn out to be content."""
        header = yield from self._read_header()
        if header is None:
            return
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        tools = self._rules.tools
        name = recipient[1].removeprefix("functions.") if recipient else ""
        if recipient and tools and (name in tools or name != recipient[1]):
            yield from self._read_arguments(name)
        elif channel and channel[1] == "analysis" and self._separates_reasoning:
            yield from self._read_words(self._think_until(AFTER_BODY))
        else:
            yield from self._read_words(self._say_until(AFTER_BODY))

    def _read_header(self) -> Steps[str | None]:
        """Reads the header of a message and returns it. If the text turns out not to be a complete
        header, returns None and adds the text to the content of the answer. The beginning of a
        header at the end of the answer is dropped instead."""
        text, parts = self._text, list[str]()
        while mark := (yield from text.until(MARKERS, parts.append, _ignore)):
            if mark == START and "".join(parts).strip():
                break
            parts.append(text.take(len(mark)))
            if mark == MESSAGE:
                text.kept()
                return "".join(parts)
            if mark in (END, CALL, RETURN):
                break
        is_cut = text.is_read and _CUT_HEADER.fullmatch(" ".join("".join(parts).split()))
        kept = text.kept()
        if not is_cut:
            self._say(kept)
        return None

    def _read_arguments(self, name: str) -> Steps[None]:
        """Reads the text of a message to a tool as the arguments of a call."""
        text, parts = self._text, list[str]()

        def argue(part: str) -> None:
            parts.append(part)
            self._argue(part)

        self._begin(name)
        is_ended = yield from self._read_words(text.until(AFTER_BODY, argue))
        written = "".join(parts)
        if is_ended or (written and near_json.object_of(written) is not None):
            self._end_call()

    def _read_words(self, steps: Steps[str]) -> Steps[bool]:
        """Runs `steps`, which must read the text of a message and return the mark after it. Moves
        past the mark if it ends the message. Returns whether there was a mark."""
        mark = yield from steps
        if mark in (END, CALL, RETURN):
            self._text.take(len(mark))
        return bool(mark)

    def _think_until(self, marks: tuple[str, ...]) -> Steps[str]:
        """Adds the text before the next of the marks as reasoning, and returns the mark."""
        self._may_begin_mark, self._is_reasoning = may_begin(marks), True
        mark = yield from self._text.until(marks, self._think)
        self._may_begin_mark, self._is_reasoning = None, False
        return mark

    def _think(self, text: str) -> None:
        if text:
            self._end_arguments()
            self._new.append(Words(text, is_reasoning=True, end=self._text.position))


def _ignore(text: str) -> None:
    """Drops a text: the beginning of a mark that the end of the answer has cut off."""
