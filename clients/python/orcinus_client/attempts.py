"""The attempts of one call, without a connection: which frontend is asked next, and when."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from orcinus_client.errors import MAY_BE_TRIED_AGAIN, ApiError, ClientError, GatewayTimedOut


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """The limits of retries. Pauses are in seconds."""

    max_failures: int = 12
    """Number of attempts in a row without a result after which the last error is raised."""

    first_pause_s: float = 0.1
    """Pause after all frontends have failed once. It doubles with each further failure."""

    max_pause_s: float = 5.0

    max_retry_after_s: float = 60.0
    """Longest `Retry-After` that the client waits for; after a longer one, the error is raised."""


Frontend = TypeVar("Frontend")
"""What a frontend is called by: its base URL, or a stub of gRPC."""


class Attempts(Generic[Frontend]):
    """The attempts of one call."""

    def __init__(
        self,
        frontends: Sequence[Frontend],
        retry: Retry,
        *,
        is_computed: bool = False,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """`is_computed` says whether each attempt computes the whole answer, so that a lost answer
        is wasted work."""
        self._frontends = frontends
        self._retry = retry
        self._is_computed = is_computed
        self._clock = clock
        self._draw = draw
        self._index = 0
        self._n_failures = 0
        self._not_before = [0.0] * len(frontends)  # times from `Retry-After`, by frontend

    @property
    def frontend(self) -> Frontend:
        """Frontend of this attempt."""
        return self._frontends[self._index]

    def note_success(self) -> None:
        """Notes that a part of the answer was received, and sets the number of failures to 0."""
        self._n_failures = 0

    def fail(self, error: ClientError) -> float:
        """Moves on to the next frontend; returns the seconds to wait before the next attempt.

        Raises:
            ClientError: `error`, if it must not be retried or there were too many attempts.
        """
        if not isinstance(error, MAY_BE_TRIED_AGAIN):
            raise error
        if self._is_computed and isinstance(error, GatewayTimedOut):
            raise error
        self._n_failures += 1
        now = self._clock()
        if isinstance(error, ApiError) and error.retry_after_s is not None:
            self._not_before[self._index] = now + error.retry_after_s
        self._index = (self._index + 1) % len(self._frontends)
        asked_to_wait_s = max(0.0, self._not_before[self._index] - now)
        if self._n_failures >= self._retry.max_failures:
            error.add_note(f"gave up after {self._n_failures} attempts")
            raise error
        if asked_to_wait_s > self._retry.max_retry_after_s:
            raise error
        return max(asked_to_wait_s, self._backoff_s())

    def _backoff_s(self) -> float:
        n_rounds_failed = self._n_failures - len(self._frontends)
        if n_rounds_failed < 0:  # a frontend has not been tried yet
            return 0.0
        retry = self._retry
        pause_s = min(retry.max_pause_s, retry.first_pause_s * 2.0**n_rounds_failed)
        return self._draw(0.5, 1.0) * pause_s
