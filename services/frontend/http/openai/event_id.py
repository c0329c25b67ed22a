"""Ids of the events of a stream. The id of an event says which parts of each answer a client has
received with this event and all events before.

    6921f3aa0c5b…e1:12,7f,-          12 tokens of answer 0, all 7 of answer 1, nothing of answer 2
    6921f3aa0c5b…e1:20f,7f,3f;usage  all answers, and the usage

The id of the request comes first, then one mark for each answer: the number of tokens, followed by
`f` if the answer has finished, or `-` if no event has come. The mark is 0 if only the event with
the role has come. To resume a stream, clients send the last id back in the header `Last-Event-ID`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from services.common import errors
from services.frontend.http.transport.event_stream import LAST_EVENT_ID

_MARK = "(?:-|[0-9]{1,10}f?)"
_EVENT_ID = re.compile(f"([0-9a-f]{{32}}):({_MARK}(?:,{_MARK})*)(;usage)?")


@dataclass(frozen=True, slots=True)
class AnswerPosition:
    """The part of one answer that a client has received."""

    has_begun: bool = False
    n_tokens: int = 0
    is_finished: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses the mark of one answer in an event's id, such as `12`, `7f` or `-`. The caller
        must have checked the form of the mark."""
        if text == "-":
            return cls()
        return cls(True, int(text.removesuffix("f")), text.endswith("f"))

    def __str__(self) -> str:
        return _mark(self.n_tokens, self.is_finished) if self.has_begun else "-"


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """The part of a stream that a client has received."""

    request_id: str
    answers: tuple[AnswerPosition, ...]
    has_usage: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses the id of an event.

        Raises:
            InvalidRequest: the text is not the id of an event.
        """
        match = _EVENT_ID.fullmatch(text)
        if match is None:
            raise errors.InvalidRequest(LAST_EVENT_ID, "is not the id of an event")
        request_id, marks, usage = match.groups()
        answers = tuple(map(AnswerPosition.parse, marks.split(",")))
        if usage and not all(answer.is_finished for answer in answers):
            raise errors.InvalidRequest(
                LAST_EVENT_ID, "has the usage of a stream that has not finished"
            )
        return cls(request_id, answers, usage is not None)


class EventIds:
    """Makes the ids of the events of a stream, one after the other."""

    def __init__(self, request_id: str, answers: Iterable[AnswerPosition]) -> None:
        self._start = f"{request_id}:"
        answers = tuple(answers)
        self._n_tokens = [answer.n_tokens for answer in answers]
        self._marks = [str(answer) for answer in answers]
        self._has_begun = [answer.has_begun for answer in answers]

    def has_begun(self, index: int) -> bool:
        """Returns whether the stream already has an event of the answer `index`."""
        return self._has_begun[index]

    def advance(self, index: int, n_tokens: int, *, is_finished: bool) -> None:
        """Counts an event. The event brings `n_tokens` further tokens of the answer `index`;
        `is_finished` says that the answer ends with it."""
        self._has_begun[index] = True
        self._n_tokens[index] += n_tokens
        self._marks[index] = _mark(self._n_tokens[index], is_finished)

    def current(self) -> bytes:
        """Returns the id of the event that was counted last."""
        return (self._start + ",".join(self._marks)).encode()

    def usage(self) -> bytes:
        """Returns the id of the event with the usage."""
        return self.current() + b";usage"


def _mark(n_tokens: int, is_finished: bool) -> str:
    return f"{n_tokens}f" if is_finished else str(n_tokens)
