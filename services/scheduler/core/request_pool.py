"""All requests that are in the system; it outlives the epochs.

It is limited in requests and in the tokens, of prompts and outputs, that they may come to, and so
in memory. It also counts the tokens of each account. Who comes first is said by its `Order`.

Requests that can ride the next iteration are kept apart from those that cannot, so that a
selection walks only over requests it can take: its cost does not depend on how many others there
are.

After a loss, the requests that were on board are suspects: each may be the one that ended it. They
are admitted before all others and one at a time, the most suspicious first, each when everybody who
runs has tokens and the last one has proved itself. So a loss is put down to the one suspect that
was on board, and one that is put down to it again runs alone the next time.
"""

import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator, Sequence
from heapq import heapify, heappop, heappush

from services.common.errors import PoolFull
from services.scheduler.core.admission.admission_control import AdmissionControl
from services.scheduler.core.admission.grammar_turns import GrammarTurns
from services.scheduler.core.order.fair_batch import Allowances
from services.scheduler.core.order.fcfs import FirstComeFirstServed
from services.scheduler.core.order.order import Order
from services.scheduler.core.request import Request, RequestState

SMALL_OPTIONS_BYTES = 4096
"""Bytes of a request's options that count for nothing: the memory of each request has room for
them."""

OPTION_BYTES = 4
"""Bytes of options that count as a token."""

PRIORITY_KINDS = ("raised", "normal", "lowered")
"""Kinds of priorities: those below 0, 0, and those above."""

RETRY_AFTER_S = 1.0
"""Seconds after which a request may be sent again to a pool that was full."""

# To look a member of an enum up takes as long as to call a method; here it is done for each token.
_INITIATION = RequestState.INITIATION
_RUNNING = RequestState.RUNNING
_INCREMENT = RequestState.INCREMENT


def _place_of(request: Request) -> int:
    return request.place


def _suspicion(request: Request) -> tuple[int, int]:
    return (request.n_losses, -request.arrival)


class RequestPool:
    """Holds every request from its arrival to its end, in exactly one of its states."""

    def __init__(
        self,
        *,
        max_requests: int,
        max_tokens: int = sys.maxsize,
        order: Order | None = None,
        control: AdmissionControl | None = None,
    ) -> None:
        """`order` is the paper's unless it is given: first come, first served. `control` is told of
        those that wait."""
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.n_tokens = 0
        """Tokens that the requests may come to."""
        self.order = FirstComeFirstServed() if order is None else order
        """The requests in INITIATION, and who of them comes next."""
        self._n_arrived = 0
        self._n_waiting = [0] * len(PRIORITY_KINDS)
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap; also of some that ended
        self._admitted: dict[Request, None] = {}  # RUNNING or INCREMENT
        self._ready: list[Request] = []  # of these, those that can run; by their places
        self._suspects: dict[Request, None] = {}  # those that wait
        self._on_probation: Request | None = None  # the last suspect that was admitted
        self._n_with_grammar = 0
        self.grammar_turns = GrammarTurns()
        """The turns of those whose grammars are not compiled."""
        self._control = control

    def __len__(self) -> int:
        return len(self.order) + len(self._admitted)

    def __iter__(self) -> Iterator[Request]:
        yield from self.order
        yield from self._admitted

    @property
    def n_waiting(self) -> int:
        """Number of requests that are to run for the first time, or anew."""
        return len(self.order)

    def n_waiting_of(self, kind: str) -> int:
        """Returns the number of these whose priority is of a kind."""
        return self._n_waiting[PRIORITY_KINDS.index(kind)]

    @property
    def n_free(self) -> int:
        """Number of requests that there are places for."""
        return max(0, self.max_requests - len(self))

    @property
    def n_running(self) -> int:
        """Number of requests that have run, or are running, and have not ended."""
        return len(self._admitted)

    @property
    def running(self) -> Collection[Request]:
        """The requests that have run, or are running, and have not ended."""
        return self._admitted.keys()

    def fits_ever(self, request: Request) -> bool:
        """Whether an empty pool could take the request in."""
        return _n_tokens(request) <= self.max_tokens

    @property
    def ready(self) -> Sequence[Request]:
        """The requests that have run and can ride the next iteration, as they are now; by rank."""
        return tuple(sorted(self._ready, key=self.order.rank))

    @property
    def ready_by_place(self) -> Sequence[Request]:
        """The requests that have run and can ride the next iteration, as they are now; by place."""
        return tuple(self._ready)

    @property
    def has_suspects(self) -> bool:
        """Whether suspects are admitted before all others."""
        return bool(self._suspects) or self._is_probation

    @property
    def last(self) -> Request:
        """The one that is put down first of those that have run; there must be one."""
        return max(self._admitted, key=self.order.rank)

    def add(self, request: Request) -> None:
        """Takes a request in.

        Raises:
            PoolFull: there are `max_requests` already, or with it more than `max_tokens`.
        """
        n_tokens = _n_tokens(request)
        if len(self) >= self.max_requests:
            raise PoolFull(
                f"the request pool holds its limit of {self.max_requests} requests",
                retry_after_s=RETRY_AFTER_S,
            )
        if self.n_tokens + n_tokens > self.max_tokens:
            raise PoolFull(
                f"the request pool holds {self.n_tokens} tokens; with the {n_tokens} that this "
                f"request may come to, they exceed its limit of {self.max_tokens}",
                retry_after_s=RETRY_AFTER_S,
            )
        self._count(request, 1)
        request.arrival = self._n_arrived
        request.put_down()
        self._n_arrived += 1
        self.order.add(request)
        self._note_waiting(request, 1)
        if request.is_suspect:
            self._suspects[request] = None
        self._note_deadline(request)

    def expired(self, now: float) -> list[Request]:
        """Returns the requests that wait though their time is up, or will be before they begin;
        they are still to be removed."""
        result: dict[Request, None] = {}  # who was put down is in the heap more than once
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heappop(self._deadlines)[2]
            if request.state is _INITIATION:
                result[request] = None
        if self._deadlines and self._control is not None:
            hopeless = self._control.hopeless(now, self._deadlines[0][0], self.order)
            result.update(dict.fromkeys(hopeless))
        return list(result)

    def selectable(self) -> Iterator[Request]:
        """Yields the requests that can ride the next iteration, in order; the pool must not change
        meanwhile."""
        if not len(self.order) or self._is_probation:
            return iter(self._ready)
        if not self._suspects:
            return self.order.line_up(self._ready)
        if any(request.n_new_tokens == 0 for request in self._admitted):
            return iter(self._ready)
        return self.order.line_up(self._ready, (max(self._suspects, key=_suspicion),))

    def candidates(self) -> Iterator[Request]:
        """Yields the requests of `selectable` that need not wait for the grammars of others."""
        requests = self.selectable()
        return self.grammar_turns.turns(requests) if self._n_with_grammar else requests

    def allowances(self) -> Allowances | None:
        """Returns the tokens that clients may have in the next batch; None where nobody is
        limited."""
        return None if self.has_suspects else self.order.allowances(self._admitted, self._ready)

    def mark_running(
        self, requests: Sequence[Request], *, can_run: Callable[[Request], bool]
    ) -> None:
        """Moves all requests of a batch from INITIATION or INCREMENT to RUNNING. Those for which
        `can_run` is true stay selectable for the next iteration."""
        for request in requests:
            if request.state is _INITIATION:
                self.order.admit(request)
                self._note_waiting(request, -1)
                self._admitted[request] = None
                self._make_ready(request)
                if request.is_suspect:
                    del self._suspects[request]
                    self._on_probation = request
            request.state = _RUNNING
        self._ready = [
            request for request in self._ready if request.state is not _RUNNING or can_run(request)
        ]

    def mark_returned(self, request: Request) -> None:
        """Moves a request from RUNNING to INCREMENT."""
        request.state = _INCREMENT
        self._make_ready(request)

    def hold_back(self, request: Request) -> None:
        """Keeps a RUNNING request from being selected again."""
        index = self._place(request)
        if index is not None:
            del self._ready[index]

    def let_run(self, request: Request) -> None:
        """Lets a request be selected again that was held back."""
        self._make_ready(request)

    def move(self, request: Request, place: int) -> None:
        """Gives a request that has run another place, which nobody has."""
        is_ready = self._place(request) is not None
        self.hold_back(request)
        request.place = place
        if is_ready:
            self._make_ready(request)

    def put_down(self, request: Request) -> None:
        """Puts down one request that has run and is in no batch, so that it waits again at its
        place."""
        self.hold_back(request)
        del self._admitted[request]
        self._restore([request])

    def remove(self, request: Request) -> None:
        """Moves a request from any state to FINISHED, and out of the pool."""
        self.order.remove(request)
        if request.state is _INITIATION:
            self._suspects.pop(request, None)
            self._note_waiting(request, -1)
        else:
            del self._admitted[request]
            self.hold_back(request)
        request.state = RequestState.FINISHED
        self._count(request, -1)

    def put_back(self) -> list[Request]:
        """Puts down all requests that have run, so that they wait again at their places; returns
        them."""
        begun = list(self._admitted)
        self._admitted.clear()
        self._ready.clear()
        self._restore(begun)
        self._suspects = {request: None for request in self.order if request.is_suspect}
        return begun

    def _restore(self, begun: Sequence[Request]) -> None:
        for request in begun:
            request.put_down()
        self.order.restore(begun)
        for request in begun:
            self._note_deadline(request)
            self._note_waiting(request, 1, has_begun=True)
            if request.is_suspect:
                self._suspects[request] = None

    def _note_waiting(self, request: Request, sign: int, *, has_begun: bool = False) -> None:
        priority = request.priority
        if self._control is not None and sign > 0:
            self._control.backlog.add(request, has_begun=has_begun)
        elif self._control is not None:
            self._control.backlog.remove(request)
        self._n_waiting[1 + (priority > 0) - (priority < 0)] += sign

    def _note_deadline(self, request: Request) -> None:
        if request.deadline is None:
            return
        heappush(self._deadlines, (request.deadline, request.arrival, request))
        if len(self._deadlines) > 2 * len(self) + 64:  # most are of requests that have ended
            self._deadlines = [
                (one.deadline, one.arrival, one) for one in self.order if one.deadline is not None
            ]
            heapify(self._deadlines)

    def _count(self, request: Request, sign: int) -> None:
        self.n_tokens += sign * _n_tokens(request)
        self._n_with_grammar += sign * (request.grammar_digest is not None)
        if request.account is not None:
            request.account.n_tokens += sign * request.max_sequence_len

    @property
    def _is_probation(self) -> bool:
        suspect = self._on_probation
        return suspect is not None and suspect.is_suspect and suspect in self._admitted

    def _make_ready(self, request: Request) -> None:
        if not self._ready or self._ready[-1].place < request.place:
            self._ready.append(request)
        elif self._place(request) is None:
            insort(self._ready, request, key=_place_of)

    def _place(self, request: Request) -> int | None:
        index = bisect_left(self._ready, request.place, key=_place_of)
        is_there = index < len(self._ready) and self._ready[index] is request
        return index if is_there else None


def _n_tokens(request: Request) -> int:
    """Returns the tokens that a request counts for in the pool: those of its sequence, and as many
    as take the memory of its options, where these are a grammar of many characters."""
    n_bytes = max(0, len(request.sampling) - SMALL_OPTIONS_BYTES)
    return request.max_sequence_len + n_bytes // OPTION_BYTES
