"""Reads reasoning between `<think>` and `</think>`, before the message itself.

Some templates open the tag themselves, so that the answer begins inside it. If the reasoning is
never closed, the message has no content and no calls.
"""

from services.frontend.text.arriving_text import NEWLINES, SPACES, ArrivingText, Steps
from services.frontend.text.message_reader import MessageDelta, MessageReader, Words

BEGIN, END = "<think>", "</think>"


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
