"""The waiting work, counted so that the work before a new request is known at once.

In the order of arrival, all waiting work comes before a new request. In the fair order, first comes
all work of more important priority classes. In the request's own class comes the waiting work of
its client, and in addition at most the work that other clients receive meanwhile by their weights.
The order decides which request comes when, not this module; ageing and the counters of clients are
not considered.

Where requests for vectors (embeddings, scores) have a limited share of each batch
(`vector_gate.py`), their work is not counted before a request that generates tokens, and the work
of all waiting requests that generate tokens is counted before a request for a vector. The time that
vectors add to an iteration is already in the measured times of iterations.
"""

from dataclasses import dataclass
from typing import NamedTuple

from services.scheduler.core.admission.expected_output import ExpectedOutput
from services.scheduler.core.clients.client import OUTPUT_CHARGE, PROMPT_CHARGE
from services.scheduler.core.request import Request

FIRST_OF_ALL = -(2**31)
"""Priority class of preempted requests: lower than any other, so that these requests come first."""


@dataclass(frozen=True, slots=True)
class WaitingWork:
    """A number of requests, with the prompt and output tokens that they are expected to have."""

    n_requests: float = 0.0
    n_prompt_tokens: float = 0.0
    n_output_tokens: float = 0.0

    @property
    def charge(self) -> float:
        """Amount of service that the fair order would charge a client for the work."""
        return PROMPT_CHARGE * self.n_prompt_tokens + OUTPUT_CHARGE * self.n_output_tokens

    def plus(self, other: "WaitingWork", part: float = 1.0) -> "WaitingWork":
        """Returns the sum of this work and of `other` multiplied by `part`."""
        return WaitingWork(
            self.n_requests + part * other.n_requests,
            self.n_prompt_tokens + part * other.n_prompt_tokens,
            self.n_output_tokens + part * other.n_output_tokens,
        )


NOTHING = WaitingWork()


class Backlog:
    """Counts the waiting work of a pool by kind of request (for tokens or for vectors), by priority
    and by client."""

    def __init__(
        self, expected: ExpectedOutput, *, is_fair: bool, vectors_yield: bool = False
    ) -> None:
        """`is_fair` says whether the waiting requests are ordered by priorities and clients, and
        `vectors_yield` whether requests that generate tokens come before requests for vectors."""
        self._expected = expected
        self._is_fair = is_fair
        self._vectors_yield = vectors_yield
        self._entries: dict[Request, tuple[_Rank, WaitingWork]] = {}
        self._classes: dict[_Rank, _Class] = {}

    def __len__(self) -> int:
        """Returns the number of waiting requests."""
        return len(self._entries)

    @property
    def work(self) -> WaitingWork:
        """All waiting work. The thread that answers Prometheus may read this property while
        priority classes are added and removed."""
        result = NOTHING
        for a_class in tuple(self._classes.values()):
            result = result.plus(a_class.work)
        return result

    def add(self, request: Request, *, has_begun: bool = False) -> None:
        """Adds a waiting request. `has_begun` says that the request has run before. It then comes
        before all requests of its kind (for tokens or for vectors) that have not run."""
        rank = self._rank_of(request)
        if has_begun:
            rank = _Rank(rank.yields, FIRST_OF_ALL)
        work = self.work_of(request)
        self._entries[request] = rank, work
        if rank not in self._classes:
            self._classes[rank] = _Class()
        self._classes[rank].add(self._client_of(request), work, self._weight_of(request))

    def remove(self, request: Request) -> None:
        """Notes that a request does not wait any more."""
        rank, work = self._entries.pop(request)
        a_class = self._classes[rank]
        a_class.remove(self._client_of(request), work)
        if not a_class.lines:
            del self._classes[rank]

    def work_of(self, request: Request) -> WaitingWork:
        """Returns the work that a waiting request is expected to need. The work consists of all
        known tokens and of the output tokens that are still to come."""
        n_generated = len(request.generated_token_ids)
        n_left = max(1.0, self._expected.n_tokens(request.max_new_tokens) - n_generated)
        return WaitingWork(1.0, request.n_tokens, min(n_left, request.max_new_tokens - n_generated))

    def before(self, request: Request) -> WaitingWork:
        """Returns the waiting work that would come before a new request."""
        rank = self._rank_of(request)
        result = NOTHING
        for other, a_class in self._classes.items():
            if other < rank:
                result = result.plus(a_class.work)
        own = self._classes.get(rank)
        if own is None:
            return result
        return result.plus(own.work, self._part_before(request, own))

    def _part_before(self, request: Request, own: "_Class") -> float:
        """Returns the fraction of the work of class `own` that comes before a request.

        The fraction covers the waiting work of the request's client, and the work that other
        clients receive meanwhile. Half of the work of the request itself is counted too, because
        other clients whose turn is at about the same time may receive that much before it.
        """
        weight = self._weight_of(request)
        line = own.lines.get(self._client_of(request))
        weights = own.weight if line is not None else own.weight + weight
        before = 0.0 if line is None else line.work.charge
        before += self.work_of(request).charge / 2
        return min(1.0, before * weights / weight / own.work.charge)

    def _rank_of(self, request: Request) -> "_Rank":
        yields = self._vectors_yield and request.wants_vector
        return _Rank(yields, request.priority if self._is_fair else 0)

    def _client_of(self, request: Request) -> str | None:
        return request.account.name if self._is_fair and request.account is not None else None

    def _weight_of(self, request: Request) -> float:
        return request.account.limits.weight if self._is_fair and request.account else 1.0


class _Rank(NamedTuple):
    """The key of a class of waiting work: classes with smaller keys come first."""

    yields: bool
    """Whether the requests are for vectors, and requests that generate tokens come before them."""
    priority: int


@dataclass(slots=True)
class _Line:
    """The waiting work of one client in one priority class."""

    weight: float
    n_requests: int = 0
    work: WaitingWork = NOTHING


class _Class:
    """The waiting work of one rank: of one kind of requests and one priority."""

    def __init__(self) -> None:
        self.work = NOTHING
        self.weight = 0.0
        self.lines: dict[str | None, _Line] = {}

    def add(self, client: str | None, work: WaitingWork, weight: float) -> None:
        line = self.lines.get(client)
        if line is None:
            line = self.lines[client] = _Line(weight)
            self.weight += weight
        line.n_requests += 1
        line.work = line.work.plus(work)
        self.work = self.work.plus(work)

    def remove(self, client: str | None, work: WaitingWork) -> None:
        line = self.lines[client]
        line.n_requests -= 1
        line.work = line.work.plus(work, -1.0)
        self.work = self.work.plus(work, -1.0)
        if not line.n_requests:
            del self.lines[client]
            self.weight -= line.weight
