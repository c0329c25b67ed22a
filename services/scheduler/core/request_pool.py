"""All requests that are in the system, in the order in which they arrived; it outlives the epochs.

It is limited in requests and in the tokens, of prompts and outputs, that they may come to, and so
in memory. It also counts the tokens of each account.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from itertools import chain

from services.common.errors import PoolFull
from services.scheduler.core.grammar_turns import GrammarTurns
from services.scheduler.core.request import Request, RequestState

SMALL_OPTIONS_BYTES = 4096
"""Bytes of a request's options that count for nothing: the memory of each request has room for
them."""

OPTION_BYTES = 4
"""Bytes of options that count as a token."""

RETRY_AFTER_S = 1.0
"""Seconds after which a request may be sent again to a pool that was full."""


def _arrival(request: Request) -> int:
    return request.arrival


def _suspicion(request: Request) -> tuple[int, int]:
    return (request.n_losses, -request.arrival)


class RequestPool:
    """Holds every request from its arrival to its end, in exactly one of its states."""

    def __init__(self, *, max_requests: int, max_tokens: int = sys.maxsize) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.n_tokens = 0
        """Tokens that the requests may come to."""
        self._n_arrived = 0
        self._waiting: dict[Request, None] = {}  # INITIATION, in arrival order
        self._admitted: dict[Request, None] = {}  # RUNNING or INCREMENT
        self._ready: list[Request] = []  # of these, those that can run; in arrival order
        self._suspects: dict[Request, None] = {}  # those that wait
        self._on_probation: Request | None = None  # the last suspect that was admitted
        self._n_with_grammar = 0
        self.grammar_turns = GrammarTurns()
        """The turns of those whose grammars are not compiled."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._admitted)

    def __iter__(self) -> Iterator[Request]:
        yield from self._waiting
        yield from self._admitted

    @property
    def n_waiting(self) -> int:
        """Number of requests that are to run for the first time, or anew."""
        return len(self._waiting)

    @property
    def n_free(self) -> int:
        """Number of requests that there are places for."""
        return max(0, self.max_requests - len(self))

    @property
    def n_running(self) -> int:
        """Number of requests that have run, or are running, and have not ended."""
        return len(self._admitted)

    @property
    def running(self) -> Iterable[Request]:
        """The requests that have run, or are running, and have not ended."""
        return self._admitted

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
        self._waiting[request] = None
        if request.is_suspect:
            self._suspects[request] = None

    def selectable(self) -> Iterator[Request]:
        """Yields the requests that can ride the next iteration, in arrival order; the pool must not
        change meanwhile."""
        ready, first_waiting = self._ready, next(iter(self._waiting), None)
        if first_waiting is None or self._is_probation:
            return iter(ready)
        if self._suspects:
            if any(request.n_new_tokens == 0 for request in self._admitted):
                return iter(ready)
            return merge(ready, (max(self._suspects, key=_suspicion),), key=_arrival)
        if not ready or ready[-1].arrival < first_waiting.arrival:
            return chain(ready, self._waiting)
        return merge(ready, self._waiting, key=_arrival)

    def candidates(self) -> Iterator[Request]:
        """Yields the requests of `selectable` that need not wait for the grammars of others."""
        requests = self.selectable()
        return self.grammar_turns.turns(requests) if self._n_with_grammar else requests

    def mark_running(
        self, requests: Sequence[Request], *, can_run: Callable[[Request], bool]
    ) -> None:
        """Moves all requests of a batch from INITIATION or INCREMENT to RUNNING. Those for which
        `can_run` is true stay selectable for the next iteration."""
        for request in requests:
            if request.state is RequestState.INITIATION:
                del self._waiting[request]
                self._admitted[request] = None
                self._make_ready(request)
                if request.is_suspect:
                    del self._suspects[request]
                    self._on_probation = request
            request.state = RequestState.RUNNING
        self._ready = [
            request
            for request in self._ready
            if request.state is not RequestState.RUNNING or can_run(request)
        ]

    def mark_returned(self, request: Request) -> None:
        """Moves a request from RUNNING to INCREMENT."""
        request.state = RequestState.INCREMENT
        self._make_ready(request)

    def hold_back(self, request: Request) -> None:
        """Keeps a RUNNING request from being selected again."""
        index = self._place(request)
        if index is not None:
            del self._ready[index]

    def remove(self, request: Request) -> None:
        """Moves a request from any state to FINISHED, and out of the pool."""
        if request.state is RequestState.INITIATION:
            del self._waiting[request]
            self._suspects.pop(request, None)
        else:
            del self._admitted[request]
            self.hold_back(request)
        request.state = RequestState.FINISHED
        self._count(request, -1)

    def put_back(self) -> list[Request]:
        """Puts down all requests that have run, so that they wait again at their place in the order
        of arrival; returns them."""
        begun = list(self._admitted)
        for request in begun:
            request.put_down()
        self._waiting = dict.fromkeys(sorted(self, key=_arrival))
        self._admitted.clear()
        self._ready.clear()
        self._suspects = {request: None for request in self._waiting if request.is_suspect}
        return begun

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
        if not self._ready or self._ready[-1].arrival < request.arrival:
            self._ready.append(request)
        elif self._place(request) is None:
            insort(self._ready, request, key=_arrival)

    def _place(self, request: Request) -> int | None:
        index = bisect_left(self._ready, request.arrival, key=_arrival)
        is_there = index < len(self._ready) and self._ready[index] is request
        return index if is_there else None


def _n_tokens(request: Request) -> int:
    """Returns the tokens that a request counts for in the pool: those of its sequence, and as many
    as take the memory of its options, where these are a grammar of many characters."""
    n_bytes = max(0, len(request.sampling) - SMALL_OPTIONS_BYTES)
    return request.max_sequence_len + n_bytes // OPTION_BYTES
