"""Counts the answers of a call that are in flight: answers that the scheduler has not ended."""

from collections.abc import Callable
from typing import Self


class AnswersInFlight:
    """Counts the answers of a call that are in flight. Answers may be reported as ended one by one
    or several together. At most as many ends are counted as there are answers."""

    def __init__(self, n_answers: int, release: Callable[[int], None]) -> None:
        """`release` is called whenever answers end, with the number of answers that have ended."""
        self._n_answers = n_answers
        self._release = release

    def end(self, n_answers: int) -> None:
        """Notes that `n_answers` further answers have ended."""
        n_ended = min(n_answers, self._n_answers)
        if n_ended:
            self._n_answers -= n_ended
            self._release(n_ended)

    def close(self) -> None:
        """Notes that all remaining answers have ended. A second call has no effect."""
        self.end(self._n_answers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
