"""The answers of one call that are in flight: those that the scheduler has not ended."""

from collections.abc import Callable
from typing import Self


class AnswersInFlight:
    """Counts answers in flight, which end one by one or together. None ends twice."""

    def __init__(self, n_answers: int, release: Callable[[int], None]) -> None:
        """`release` is called with the number of answers that have ended, each time that some
        have."""
        self._n_answers = n_answers
        self._release = release

    def end(self, n_answers: int) -> None:
        """Notes that `n_answers` of them have ended."""
        n_ended = min(n_answers, self._n_answers)
        if n_ended:
            self._n_answers -= n_ended
            self._release(n_ended)

    def close(self) -> None:
        """Notes that all have ended. A second call has no effect."""
        self.end(self._n_answers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
