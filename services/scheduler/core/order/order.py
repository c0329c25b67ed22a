"""The order in which requests are admitted, and in which those that run come into a batch.

The pool has one such object and asks it; in it are the requests that wait. A request that has run
keeps its place among the requests that run, and is overtaken by one that waits for the first time
only if it is preempted.

An order is a class in a file of its own, and a line in `registry.py` by which the setting `order`
finds it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.scheduler.core.request import Request

Clock = Callable[[], float]
"""A function that returns the time in seconds."""


@dataclass(frozen=True, slots=True)
class OrderOptions:
    """The settings that orders may heed."""

    ageing_s: float = 1.0
    """Seconds without an admission after which requests of a priority come one class earlier."""
    batch_tokens: int | None = None
    """Tokens of a batch while requests of several clients run; None where that is not limited."""


class BatchLimits(Protocol):
    """What an order allows of the candidates in one batch."""

    def riders(self, candidates: Iterable[Request], max_running: int) -> Iterator[Request]:
        """Yields the candidates that may be in the batch, in order; at most `max_running` requests
        run then. The caller takes tokens for each before it asks for the next one."""

    def take(self, request: Request, n_tokens: int) -> int:
        """Takes up to `n_tokens` tokens for a request, as many as it may have; returns how many."""


class Order(Protocol):
    """The requests that wait, and which of them comes next."""

    def __len__(self) -> int:
        """Returns the number of requests that wait."""
        ...

    def __iter__(self) -> Iterator[Request]:
        """Yields the requests that wait, in any order."""
        ...

    def add(self, request: Request) -> None:
        """Takes in a request that has arrived."""
        ...

    def restore(self, requests: Sequence[Request]) -> None:
        """Takes in requests that have run and were preempted; they keep their places."""
        ...

    def admit(self, request: Request) -> None:
        """Lets go of a request that is admitted, and gives it its place among the requests that
        run."""
        ...

    def remove(self, request: Request) -> None:
        """Forgets a request that ends, whether it waits or not."""
        ...

    def line_up(
        self, ready: Sequence[Request], waiting: Sequence[Request] | None = None
    ) -> Iterator[Request]:
        """Yields the requests for a batch: the `ready` ones by their places, and the ones that wait
        as if each were admitted as the next is asked for. `waiting` are the only ones that may be
        admitted, if it is given. Nothing changes, and nothing must change meanwhile."""
        ...

    def batch_limits(
        self, running: Collection[Request], ready: Sequence[Request]
    ) -> BatchLimits | None:
        """Returns what the order allows in the next batch, beside the requests that run and of the
        requests that are ready for it, by their places; None where it limits none."""
        ...

    def rank(self, request: Request) -> tuple[int, ...]:
        """Returns the rank of a request that runs, which changes only if it is preempted: if not
        all can go on, the one with the highest rank is preempted first."""
        ...
