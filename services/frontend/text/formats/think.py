"""Reads reasoning between `<think>` and `</think>`, before the message itself.

Some templates open the tag themselves, so that the answer begins inside it. If the reasoning is
never closed, the message has no content and no calls.
"""

from services.frontend.text.formats.arriving_text import NEWLINES, SPACES, ArrivingText, Steps
from services.frontend.text.formats.checkpoint import Checkpoint
from services.frontend.text.formats.grammar import Markers
from services.frontend.text.formats.reasoning_format import ReasoningFormat
from services.frontend.text.message_reader import MessageDelta, MessageReader, Words

BEGIN, END = "<think>", "</think>"


class Think(ReasoningFormat):
    """Reasoning between `<think>` and `</think>`."""

    name = "think"
    models = "DeepSeek R1, Qwen 3, SmolLM 3, GLM 4"
    markers = BEGIN, END

    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the template holds the closing tag."""
        return END in checkpoint.template

    def is_opened_by(self, prompt: str) -> bool:
        """Returns whether a prompt ends with the opening tag."""
        return prompt.rstrip().endswith(BEGIN)

    def reader(
        self, rest: MessageReader, *, has_begun: bool, must_call: bool = False
    ) -> MessageReader:
        """Returns a new reader for an answer."""
        return ThinkReader(rest, has_begun=has_begun, must_call=must_call)

    def grammar(self, markers: Markers, *, is_thinking: bool) -> str:
        """Returns the rule `start`: a reply after its reasoning."""
        thought = r"thought /\n*/ reply"
        if not is_thinking:
            thought = f"{markers[BEGIN]} {thought} | reply"
        return f"start: {thought}\n{markers.up_to('thought', END)}"


class ThinkReader:
    """Reads the reasoning of an answer, and leaves the rest to another reader."""

    def __init__(self, rest: MessageReader, *, has_begun: bool, must_call: bool = False) -> None:
        """`has_begun` says whether the answer begins inside the tag. With `must_call`, only calls
        may follow the reasoning: if the text ends with the beginning of a tag, this beginning does
        not become content."""
        self._rest = rest
        self._must_call = must_call
        self._text = ArrivingText()
        self._new: list[Words] = []
        self._is_read = False
        self._steps = self._read(has_begun=has_begun)

    @property
    def n_tool_calls(self) -> int:
        """Number of tool calls that have begun."""
        return self._rest.n_tool_calls

    def feed(self, text: str) -> MessageDelta:
        """Takes new text and returns what it adds to the message."""
        if self._is_read:
            return self._rest.feed(text)
        self._text.add(text)
        next(self._steps, None)
        reasoning = MessageDelta(tuple(self._new))
        self._new.clear()
        if not self._is_read:
            return reasoning
        return reasoning + self._rest.feed(self._text.kept() + self._text.take_rest())

    def flush(self) -> MessageDelta:
        """Ends the text, and returns the part of the message that was held back."""
        self._text.end()
        return self.feed("") + self._rest.flush()

    def _read(self, *, has_begun: bool) -> Steps[None]:
        text = self._text
        if not has_begun:
            text.keep()
            yield from text.run(SPACES)
            if not (yield from text.begins_with(BEGIN)):
                if self._must_call:
                    text.kept()
                    yield from text.skip(BEGIN)
                self._is_read = True
                return
            text.take(len(BEGIN))
            text.kept()
        yield from text.run(NEWLINES)
        if (yield from text.until(END, self._think)):
            text.take(len(END))
            yield from text.run(NEWLINES)
        self._is_read = True

    def _think(self, text: str) -> None:
        if text:
            self._new.append(Words(text, is_reasoning=True))
