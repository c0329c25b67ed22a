"""The batch in the fair order: a client that has few requests keeps its pace beside one with many.

An iteration takes longer the more tokens it has, so a client that fills batches slows every client
that rides in them. Places alone do not help against that: a client that asks for little has its
place at once, and then each of its tokens takes as long as a full batch.

So while several clients run, a batch has tokens for `max_tokens` requests, shared out by weight: as
many to each client as it has requests, as far as they go (max-min fairness). The client that has
fewest requests by its weight is not limited, nor are its prompts, and no other client gets less
than it by weight. Clients that have equally many requests, or a single client, fill batches as they
like.

The requests of a limited client take turns, a token each. Its prompts get the tokens that it has
left, so that long prompts take long, and further requests of it begin only while tokens are left.
Requests of other clients pass them by: as many run as could ride without a limit, and of a client
with less than its share of these as many as its share. After a loss no client is limited, until the
request that caused it is known.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import ceil, inf
from operator import attrgetter

from services.scheduler.core.clients.client import ServedClient
from services.scheduler.core.request import Request

_CLIENT, _PLACE = attrgetter("client"), attrgetter("place")

ROUNDING = 1e-9
"""Relative error of a count that is divided by a weight."""


class Allowances:
    """The tokens that requests may have in one batch where their clients are limited."""

    def __init__(
        self,
        turns: Mapping[ServedClient | None, Sequence[Request]],
        spare: dict[ServedClient | None, int],
        n_running: Counter[ServedClient | None],
        called: Request | None,
    ) -> None:
        """`turns` are the requests of limited clients that have a token each, in turn; `spare` has
        the tokens that each client has besides. `called` gets the place of one that runs."""
        self._called = called
        self._n_running = n_running
        self._max_running = 0
        self._turns = turns
        self._spare = spare
        self._riding = {request for requests in turns.values() for request in requests}
        self._left = set(self._riding)

    def may_begin(self, client: ServedClient | None) -> bool:
        """Returns whether a request of a client could begin: the client has tokens, and fewer
        requests run than may, or fewer of the client's than its share of them."""
        if not self._has_tokens(client):
            return False
        n_running, weight = self._n_running, _weight(client)
        if n_running.total() < self._max_running:
            return True
        all_weights = sum(map(_weight, n_running)) + (weight if client not in n_running else 0.0)
        return n_running[client] < self._max_running * weight / all_weights

    def riders(self, candidates: Iterable[Request], max_running: int) -> Iterator[Request]:
        """Yields the candidates that have tokens. Of the waiting ones, these are the called one, or
        as many as make `max_running` requests run. The caller takes tokens for each candidate
        before it asks for the next one."""
        self._max_running = max_running
        for request in candidates:
            if request.reservation is not None:
                if request in self._riding or request.client not in self._spare:
                    yield request
            elif self.may_begin(request.client) or (
                request is self._called and self._has_tokens(request.client)
            ):
                self._n_running[request.client] += 1
                yield request

    def take(self, request: Request, n_tokens: int) -> int:
        """Takes up to `n_tokens` tokens for a request, as many as its client may have; returns how
        many."""
        if request.client not in self._spare:
            return n_tokens
        n_own = int(request in self._riding)
        self._left.discard(request)
        n_tokens = min(n_tokens, n_own + self._spare[request.client])
        self._spare[request.client] -= n_tokens - n_own
        return n_tokens

    def _has_tokens(self, client: ServedClient | None) -> bool:
        return self._spare.get(client, 1) > 0

    def next_place(self, client: ServedClient | None) -> int:
        """Returns the place of the request of a client whose turn comes first in the next batch."""
        turns = self._turns.get(client)
        if not turns:
            return 0
        return next((one.place for one in turns if one in self._left), turns[-1].place + 1)


class FairBatch:
    """Limits the tokens of clients in one batch after the other."""

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens` are so few that an iteration with them takes hardly longer than with one."""
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
        self.max_tokens = max_tokens
        self._last: Allowances | None = None

    def allowances(
        self, running: Iterable[Request], ready: Sequence[Request], called: Request | None
    ) -> Allowances | None:
        """Returns the tokens that clients may have in the next batch; None if no client is limited.
        `running` are all requests that run, `ready` the ones that could ride in the batch, by their
        places, and `called` is the waiting request that gets the place of one of them."""
        n_running = Counter(map(_CLIENT, running))
        limits = self._limits(n_running)
        last, self._last = self._last, None
        if not limits:
            return None
        by_client = defaultdict(list)
        for request in ready:
            if request.client in limits:
                by_client[request.client].append(request)
        turns = {}
        for client, requests in by_client.items():
            begin = bisect_left(requests, last.next_place(client) if last else 0, key=_PLACE)
            turns[client] = [*requests[begin:], *requests[:begin]][: limits[client]]
            limits[client] -= len(turns[client])
        self._last = Allowances(turns, limits, n_running, called)
        return self._last

    def room(self, running: Iterable[Request]) -> "Room":
        """Returns which clients may have another request beside the requests that run."""
        n_running = Counter(map(_CLIENT, running))
        return Room(n_running, self._limits(n_running))

    def _limits(
        self, n_running: Mapping[ServedClient | None, int]
    ) -> dict[ServedClient | None, int]:
        return shared_out(self.max_tokens, n_running) if len(n_running) > 1 else {}


class Room:
    """The clients that may have another request."""

    def __init__(
        self,
        n_running: Mapping[ServedClient | None, int],
        limits: Mapping[ServedClient | None, int],
    ) -> None:
        self._n_running = n_running
        self._limits = limits

    def may_begin(self, client: ServedClient | None) -> bool:
        """Returns whether a request of a client could begin."""
        return self._n_running.get(client, 0) < self._limits.get(client, inf)


def shared_out(
    n_tokens: int, n_running: Mapping[ServedClient | None, int]
) -> dict[ServedClient | None, int]:
    """Returns the tokens of each client that has more requests by weight than another one, rounded
    up. All clients together have `n_tokens`, or as many that no client gets less by weight than the
    client with fewest requests."""
    by_weight = {one: n / _weight(one) for one, n in n_running.items()}
    fewest = min(by_weight.values())
    more = [one for one, n in by_weight.items() if n > fewest * (1 + ROUNDING)]
    limited = sorted(more, key=by_weight.__getitem__)
    n_free = sum(n_running.values()) - sum(n_running[one] for one in limited)
    weight = sum(map(_weight, limited))
    left = max(float(n_tokens - n_free), fewest * weight)
    for client in limited[:-1]:
        if by_weight[client] * weight >= left:
            break
        left -= n_running[client]
        weight -= _weight(client)
    return {one: ceil(left * _weight(one) / weight * (1 - ROUNDING)) for one in limited}


def _weight(client: ServedClient | None) -> float:
    return 1.0 if client is None else client.weight
