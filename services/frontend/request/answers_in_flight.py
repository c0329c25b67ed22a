"""The answers of one call that count as in flight: those that are not over for the scheduler."""

from collections.abc import Callable
from typing import Self


class AnswersInFlight:
    """So many answers, which end one by one or together; none ends twice."""

    def __init__(self, n_answers: int, release: Callable[[int], None]) -> None:
        """`release` is told how many have ended, each time."""
        self._n_answers = n_answers
        self._release = release

    def end(self, n_answers: int) -> None:
        """Notes that so many of them have ended."""
        n_ended = min(n_answers, self._n_answers)
        if n_ended:
            self._n_answers -= n_ended
            self._release(n_ended)

    def close(self) -> None:
        """Notes that all have ended; closing it twice does no harm."""
        self.end(self._n_answers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
