"""The order in which requests are admitted, and in which running requests come into a batch.

The pool owns one order object, which holds the waiting requests. A running request keeps its place
among the running ones. A request that waits for the first time can overtake a running request only
if that one is preempted.

An order is a subclass of `Order` in a file of its own; an order that gives each request a number is
a subclass of `OrderByKey` (`by_key.py`). An order of this project has a line in `registry.py`; an
order of an installed package has an entry point in the group `orcinus.orders`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

from services.scheduler.core.request import Request

ORDER_API = 1
"""Version of the contract of orders. The number grows when orders written for the version before
may no longer work."""

Clock = Callable[[], float]
"""A function that returns the time in seconds."""


@dataclass(frozen=True, slots=True)
class OrderOptions:
    """The settings that orders may use."""

    ageing_s: float = 1.0
    """Seconds without an admission from a priority class after which the class rises by one
    class."""
    batch_tokens: int | None = None
    """Limit on the tokens of a batch while requests of several clients run; None where there is no
    limit."""


class BatchLimits(Protocol):
    """The limits that an order sets on the requests of one batch."""

    def riders(self, candidates: Iterable[Request], max_running: int) -> Iterator[Request]:
        """Yields the candidates that may be in the batch, in order. Waiting candidates are yielded
        only as the limits allow. `max_running` limits the number of running requests. The caller
        must take tokens for each candidate before asking for the next one."""

    def take(self, request: Request, n_tokens: int) -> int:
        """Takes at most `n_tokens` tokens for a request, within the limit of its client. Returns
        the number of tokens taken."""


class Order(ABC):
    """Holds the waiting requests, and chooses the next one. A subclass must have a `name`, an `api`
    and the abstract methods."""

    api: ClassVar[int]
    """`ORDER_API` of the contract for which an order of a package is written."""
    name: ClassVar[str]
    """The value of the setting `order`."""
    heeds_clients: ClassVar[bool] = False
    """Whether the order depends on the priorities and clients of requests."""

    @classmethod
    def of(cls, options: OrderOptions, now: Clock) -> Self:
        """Returns an order without requests. `now` returns the time in seconds."""
        return cls()

    @property
    def options(self) -> OrderOptions:
        """The options with which the order was made. Options that the order does not use have
        defaults."""
        return OrderOptions()

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of requests that wait."""

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """Yields the requests that wait, in any order."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """Adds a request that has arrived."""

    @abstractmethod
    def restore(self, requests: Sequence[Request]) -> None:
        """Adds requests that have run and were preempted. The requests keep their places."""

    @abstractmethod
    def admit(self, request: Request) -> None:
        """Removes an admitted request from the waiting ones, and gives the request a place among
        the running ones."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Removes a request that ends, whether the request waits or runs."""

    @abstractmethod
    def line_up(
        self, ready: Sequence[Request], waiting: Sequence[Request] | None = None
    ) -> Iterator[Request]:
        """Yields the requests for a batch. The `ready` requests come first, sorted by place. Then
        come the waiting requests, in the order that results if each is admitted before the caller
        asks for the next. `waiting`, if given, lists the only waiting requests that may be
        admitted. The order is not changed, and must not change while the iterator is used."""

    def batch_limits(
        self, running: Collection[Request], ready: Sequence[Request], *, pipeline: int = 0
    ) -> BatchLimits | None:
        """Returns the limits of the order for the next batch of a pipeline. Returns None if the
        order limits no request. `running` are all requests that run in the pipeline, and `ready`
        the requests that could be in the batch, sorted by place."""
        return None

    def may_begin(self, request: Request, running: Collection[Request]) -> bool:
        """Returns whether the limits of the order let a waiting request begin in a pipeline.
        `running` are the requests that run in this pipeline."""
        return True

    def rank(self, request: Request) -> tuple[int, ...]:
        """Returns the rank of a running request. If not all requests can continue, the request with
        the highest rank is preempted first. The rank changes only when the request is preempted. By
        default the last admitted request is preempted first."""
        return (request.place,)
