"""The request pool: all requests in the system. The pool outlives epochs.

The pool limits the number of requests and the number of tokens, of prompts and outputs, that their
sequences may reach; so it also limits memory. Its `Order` decides which request comes first.

Several pipelines may take their requests from one pool. Each pipeline has its own `RequestPool`,
which is the pool as this pipeline sees it: the waiting requests, which all pipelines share
(`shared_requests.py`), and the requests that this pipeline has admitted. `placement.py` decides
which pipeline admits a waiting request.

Requests that can be in the next iteration are kept apart from the others, so that a selection
visits only requests that it can take. So the cost of a selection does not depend on the number of
other requests.

Other reasons that keep a request waiting are decided by other objects, which the pool notifies when
a request arrives, is admitted or leaves: deadlines and admission control (`waiting.py`), caution
after a loss (`suspects.py`), and grammars that must be compiled (`grammar_gate.py`).
"""

import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator, Sequence

from services.common.errors import PoolFull
from services.scheduler.core.admission.admission_control import AdmissionControl
from services.scheduler.core.admission.grammar_gate import DueGrammar, GrammarGate
from services.scheduler.core.admission.no_control import NO_CONTROL, NoControl
from services.scheduler.core.admission.suspects import Suspects
from services.scheduler.core.order.order import BatchLimits, Order
from services.scheduler.core.placement import Room
from services.scheduler.core.pool_tokens import pool_tokens
from services.scheduler.core.request import Request, RequestState
from services.scheduler.core.shared_requests import SharedRequests

RETRY_AFTER_S = 1.0
"""Seconds after which a client is told to try again when the pool was full."""

# Looking up an enum member takes as long as a method call, and would be done for each token.
_INITIATION = RequestState.INITIATION
_RUNNING = RequestState.RUNNING
_INCREMENT = RequestState.INCREMENT


class RequestPool:
    """Holds every request from its arrival to its end, in exactly one of its states."""

    def __init__(
        self,
        *,
        max_requests: int,
        max_tokens: int = sys.maxsize,
        order: Order | None = None,
        control: AdmissionControl | NoControl = NO_CONTROL,
        shared: SharedRequests | None = None,
    ) -> None:
        """`order` decides which request comes first. The default is first come, first served, as in
        the paper. `control` is notified of each request that begins or ceases to wait. `shared`, if
        given, are the waiting requests of other pipelines, which this pipeline shares."""
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.shared = shared or SharedRequests(order, control)
        """What all pipelines share: the waiting requests, and the accounts of the whole pool."""
        self.order = self.shared.order
        """The requests in the state INITIATION, and the choice of the next one."""
        self.waiting = self.shared.waiting
        """Deadlines and counts of the requests in the state INITIATION."""
        self._suspects = Suspects(self.shared.suspects)
        self.grammars = GrammarGate(self.shared.grammars)
        """The grammars that ranks have compiled, for which requests wait."""
        self._admitted: dict[Request, None] = {}  # RUNNING or INCREMENT
        self._ready: list[Request] = []  # the admitted requests that can run; by their places
        self.wake: Callable[[], None] = _sleep_on
        """Called when this pipeline may have a request to admit that it did not have before."""
        self.number = len(self.shared.pools)
        """Number of the pipeline, from 0."""
        self.shared.pools.append(self)

    def beside(self) -> "RequestPool":
        """Returns the pool as a further pipeline sees it."""
        return RequestPool(
            max_requests=self.max_requests, max_tokens=self.max_tokens, shared=self.shared
        )

    def open(self, room: Room) -> None:
        """Lets the pipeline admit requests from now on."""
        self.shared.placement.open(self, room)

    def close(self) -> None:
        """Lets the pipeline admit no further requests. Its requests must wait again."""
        self.shared.placement.close(self)

    def __len__(self) -> int:
        return len(self.order) + sum([len(pool.running) for pool in self.shared.pools])

    def __iter__(self) -> Iterator[Request]:
        yield from self.order
        for pool in self.shared.pools:
            yield from pool.running

    @property
    def n_tokens(self) -> int:
        """Number of tokens that the requests in the pool count for together."""
        return self.shared.n_tokens

    @property
    def n_waiting(self) -> int:
        """Number of requests that wait to run for the first time, or again."""
        return len(self.order)

    @property
    def n_free(self) -> int:
        """Number of further requests for which the pool has places."""
        return max(0, self.max_requests - len(self))

    @property
    def n_running(self) -> int:
        """Number of requests that this pipeline has admitted. These have run or are running, and
        have not ended."""
        return len(self._admitted)

    @property
    def running(self) -> Collection[Request]:
        """Requests that this pipeline has admitted. These have run or are running, and have not
        ended."""
        return self._admitted.keys()

    @property
    def ready(self) -> Sequence[Request]:
        """Snapshot of the requests that this pipeline has admitted and that can be in its next
        iteration, sorted by rank."""
        return tuple(sorted(self._ready, key=self.order.rank))

    @property
    def ready_by_place(self) -> Sequence[Request]:
        """Snapshot of the requests that this pipeline has admitted and that can be in its next
        iteration, sorted by their places in the order."""
        return tuple(self._ready)

    @property
    def last(self) -> Request:
        """Admitted request that would be preempted first. At least one request must be admitted."""
        return max(self._admitted, key=self.order.rank)

    @property
    def has_suspects(self) -> bool:
        """Whether any request that waits, or that runs in this pipeline, may have ended a
        pipeline."""
        return self._suspects.are_in(self._admitted)

    def fits_ever(self, request: Request) -> bool:
        """Returns whether an empty pool could take the request in."""
        return pool_tokens(request) <= self.max_tokens

    def add(self, request: Request) -> None:
        """Adds a request to the pool.

        Raises:
            PoolFull: the pool has `max_requests` requests, or would exceed `max_tokens`.
        """
        n_tokens = pool_tokens(request)
        if len(self) >= self.max_requests:
            raise PoolFull(
                f"the request pool holds its limit of {self.max_requests} requests",
                retry_after_s=RETRY_AFTER_S,
            )
        if self.shared.n_tokens + n_tokens > self.max_tokens:
            raise PoolFull(
                f"the request pool holds {self.n_tokens} tokens; with the {n_tokens} that this "
                f"request may come to, they exceed its limit of {self.max_tokens}",
                retry_after_s=RETRY_AFTER_S,
            )
        self._count(request, 1)
        request.arrival = self.shared.n_arrived
        request.begin_anew()
        self.shared.n_arrived += 1
        self.grammars.add(request)
        self.order.add(request)
        self.waiting.add(request)
        self._suspects.add(request)
        self.shared.wake_all()

    def expired(self, now: float) -> list[Request]:
        """Returns the requests that have waited too long. The caller must remove them from the
        pool."""
        return self.waiting.expired(now)

    def candidates(self) -> Iterator[Request]:
        """Yields the requests that can be in the next iteration of this pipeline, in order. Leaves
        out waiting requests that another pipeline admits sooner. The pool must not change
        meanwhile."""
        passing = self.grammars.passing(self.selectable())
        return self.shared.placement.passing(self, passing)

    def fits_elsewhere(self, request: Request) -> bool:
        """Returns whether another pipeline could run a request."""
        return self.shared.placement.fits_elsewhere(self, request)

    def may_admit(self, request: Request) -> bool:
        """Returns whether only the order and the memory may keep a waiting request from being
        admitted by this pipeline: its grammar, if it has one, is compiled, and the request is not
        left to another pipeline."""
        return self.grammars.passes(request) and self.shared.placement.is_for(self, request)

    def offer_rest(self) -> None:
        """Wakes the other pipelines if requests wait. To be called when this pipeline has admitted
        requests: a request that was left to it may have found no room."""
        if len(self.order):
            self.shared.wake_others(self)

    def selectable(self) -> Iterator[Request]:
        """Yields the requests of `candidates`, and also requests that wait for the compilation of
        their grammars."""
        if not len(self.order):
            return iter(self._ready)
        return self.order.line_up(self._ready, self._suspects.may_be_admitted(self._admitted))

    def next_grammar(self) -> DueGrammar | None:
        """Returns the grammar that the ranks must compile next. Returns None if there is none, or
        while they compile another one."""
        if not self.grammars.is_needed:
            return None
        may_wait = self._suspects.may_be_admitted(self._admitted)
        return self.grammars.next_due(self.order.line_up((), may_wait))

    def batch_limits(self) -> BatchLimits | None:
        """Returns the limits of the order for the next batch. Returns None where the order limits
        no request."""
        if self.has_suspects:
            return None
        return self.order.batch_limits(self._admitted, self._ready)

    def mark_running(
        self, requests: Sequence[Request], *, can_run: Callable[[Request], bool]
    ) -> None:
        """Moves all requests of a batch from INITIATION or INCREMENT to RUNNING. Requests for which
        `can_run` is true stay candidates for the next iteration."""
        for request in requests:
            if request.state is _INITIATION:
                self.order.admit(request)
                request.moved_from = (
                    None if request.pipeline in (-1, self.number) else request.pipeline
                )
                request.pipeline = self.number
                self.waiting.remove(request)
                self._suspects.admit(request)
                self.grammars.admit(request)
                self._admitted[request] = None
                self._make_ready(request)
            request.state = _RUNNING
        self._ready = [
            request for request in self._ready if request.state is not _RUNNING or can_run(request)
        ]

    def mark_returned(self, request: Request) -> None:
        """Moves a request from RUNNING to INCREMENT."""
        request.state = _INCREMENT
        self._make_ready(request)

    def remove(self, request: Request) -> None:
        """Moves a request from any state to FINISHED, and out of the pool."""
        self.order.remove(request)
        self.grammars.remove(request)
        if request.state is _INITIATION:
            self._suspects.remove(request)
            self.waiting.remove(request)
        else:
            del self._admitted[request]
            self.hold_back(request)
        request.state = RequestState.FINISHED
        self._count(request, -1)
        if not self.shared.n_tokens:
            self.shared.wake_all()  # pipelines that are to end once the pool is empty

    def hold_back(self, request: Request) -> None:
        """Keeps an admitted request from being selected, until `let_run` or `mark_returned` is
        called."""
        index = self._place(request)
        if index is not None:
            del self._ready[index]

    def let_run(self, request: Request) -> None:
        """Lets a request that was held back be selected again."""
        self._make_ready(request)

    def move(self, request: Request, place: int) -> None:
        """Gives an admitted request another place in the order. The place must be free."""
        is_ready = self._place(request) is not None
        self.hold_back(request)
        request.place = place
        if is_ready:
            self._make_ready(request)

    def preempt(self, request: Request) -> None:
        """Makes an admitted request wait again at its place in the order. The request must be in no
        batch."""
        self.hold_back(request)
        del self._admitted[request]
        self.grammars.preempt(request)
        self._restore([request])
        self.shared.wake_others(self)

    def preempt_all(self) -> list[Request]:
        """Makes all admitted requests wait again, since the epoch is over. Returns these
        requests."""
        begun = list(self._admitted)
        self._admitted.clear()
        self._ready.clear()
        self._restore(begun)
        self._suspects.reset(self.order)
        self.grammars.reset(self.order)
        self.shared.wake_others(self)
        return begun

    def _restore(self, begun: Sequence[Request]) -> None:
        for request in begun:
            request.begin_anew()
        self.order.restore(begun)
        for request in begun:
            self.waiting.add(request, has_begun=True)
            self._suspects.add(request)

    def _count(self, request: Request, sign: int) -> None:
        self.shared.n_tokens += sign * pool_tokens(request)
        if request.account is not None:
            request.account.n_tokens += sign * request.max_sequence_len

    def _make_ready(self, request: Request) -> None:
        if not self._ready or self._ready[-1].place < request.place:
            self._ready.append(request)
        elif self._place(request) is None:
            insort(self._ready, request, key=_place_of)

    def _place(self, request: Request) -> int | None:
        index = bisect_left(self._ready, request.place, key=_place_of)
        is_there = index < len(self._ready) and self._ready[index] is request
        return index if is_there else None


def _place_of(request: Request) -> int:
    return request.place


def _sleep_on() -> None:
    """Does nothing: nobody waits for requests of this pool."""
