"""The order in which requests are admitted, and in which those that run come into a batch.

The pool has one such object and asks it; what is in it are the requests that wait. A request that
has run keeps its place among those that run, and is overtaken by one that waits for the first time
only if it gives way to it (`giving_way.py`).
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

from services.scheduler.core.order.fair_batch import Allowances
from services.scheduler.core.request import Request


class Order(Protocol):
    """The requests that wait, and who of them comes next."""

    def __len__(self) -> int:
        """Returns the number of requests that wait."""
        ...

    def __iter__(self) -> Iterator[Request]:
        """Yields those that wait, in any order."""
        ...

    def add(self, request: Request) -> None:
        """Takes in a request that has arrived."""
        ...

    def restore(self, requests: Sequence[Request]) -> None:
        """Takes in requests that have run and were put down; they keep their places."""
        ...

    def admit(self, request: Request) -> None:
        """Lets go of a request that is admitted, and gives it its place among those that run."""
        ...

    def remove(self, request: Request) -> None:
        """Forgets a request that ends, whether it waits or not."""
        ...

    def prefer(self, n_cached: Callable[[Request], int]) -> None:
        """Lets one come next, among those whose turn is as near, of which most is cached;
        `n_cached` returns how much."""
        ...

    def line_up(
        self, ready: Sequence[Request], waiting: Sequence[Request] | None = None
    ) -> Iterator[Request]:
        """Yields the requests for a batch, `ready` ones by their places and those that wait as if
        each were admitted as the next is asked for. `waiting` are the only ones that may be
        admitted, if it is given. Nothing changes, and nothing must change meanwhile."""
        ...

    def allowances(
        self, running: Collection[Request], ready: Sequence[Request]
    ) -> Allowances | None:
        """Returns the tokens that clients may have in the next batch, beside those that run and of
        those that are ready for it, by their places; None where nobody is limited."""
        ...

    def rank(self, request: Request) -> tuple[int, ...]:
        """Returns the rank of a request that runs, which changes only if it gives way: if not all
        can go on, the one with the highest is put down first."""
        ...
