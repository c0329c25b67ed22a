"""Limits of batches in the fair order: a client with few requests keeps its speed beside a client
with many.

An iteration takes longer the more tokens it has, so a client that fills batches slows down every
client whose requests are in these batches. Limiting the number of requests of a client does not
prevent this: a client that sends little gets into the batch at once, but then each of its tokens
takes as long as a full batch.

So while requests of several clients run, the `max_tokens` tokens of a batch are shared among
clients by weight. Each client gets a token for each of its requests if there are enough tokens;
otherwise the tokens are divided by max-min fairness. The client with the fewest requests relative
to its weight is not limited, nor are its prompts, and no other client gets less than this client,
relative to weight. If all clients have equally many requests, or there is only one client, no
client is limited.

The requests of a limited client take turns, one token each. Its prompts get the tokens that remain
to the client, so long prompts take many iterations, and further requests of the client begin only
while tokens remain. Requests of other clients may begin before these. The number of running
requests is limited to the number that could be in batches without limits on clients; a client with
less than its share of that number may exceed this limit up to its share. After a loss no client is
limited until the request that caused the loss is known.
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
"""Relative tolerance for rounding errors when a count is divided by a weight."""


class Allowances:
    """Decides how many tokens requests may have in one batch while clients are limited."""

    def __init__(
        self,
        turns: Mapping[ServedClient | None, Sequence[Request]],
        spare: dict[ServedClient | None, int],
        n_running: Counter[ServedClient | None],
        called: Request | None,
    ) -> None:
        """`turns` lists requests of each limited client in the order of their turns. Each of these
        requests may have one token. `spare` is the number of tokens that each client may have in
        addition. `called` is the waiting request that will take the place of a running one. It is
        None if there is no such request."""
        self._called = called
        self._n_running = n_running
        self._max_running = 0
        self._turns = turns
        self._spare = spare
        self._riding = {request for requests in turns.values() for request in requests}
        self._left = set(self._riding)

    def may_begin(self, client: ServedClient | None) -> bool:
        """Returns whether a request of a client could begin. The client must have tokens left. In
        addition, there must be fewer running requests than allowed, or the client must have fewer
        running requests than its share of the allowed number."""
        if not self._has_tokens(client):
            return False
        n_running, weight = self._n_running, _weight(client)
        if n_running.total() < self._max_running:
            return True
        all_weights = sum(map(_weight, n_running)) + (weight if client not in n_running else 0.0)
        return n_running[client] < self._max_running * weight / all_weights

    def riders(self, candidates: Iterable[Request], max_running: int) -> Iterator[Request]:
        """Yields the candidates that have tokens. A waiting candidate is yielded if the number of
        running requests is below `max_running`, if its client has fewer running requests than its
        share, or if it is the called request. The caller must take tokens for each candidate before
        asking for the next one."""
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
        """Takes at most `n_tokens` tokens for a request, within the limit of its client. Returns
        the number of tokens taken. A request that runs whole takes all `n_tokens`, even beyond the
        limit. Then no further request of its client comes into the batch."""
        if request.client not in self._spare:
            return n_tokens
        n_own = int(request in self._riding)
        self._left.discard(request)
        if not request.runs_whole:
            n_tokens = min(n_tokens, n_own + self._spare[request.client])
        self._spare[request.client] -= n_tokens - n_own
        return n_tokens

    def _has_tokens(self, client: ServedClient | None) -> bool:
        return self._spare.get(client, 1) > 0

    def next_place(self, client: ServedClient | None) -> int:
        """Returns the place at which the client's turns begin in the next batch: the place of its
        first request in `turns` that took no token in this batch. If all of them took tokens, this
        is the place after the last one. Returns 0 for a client without turns."""
        turns = self._turns.get(client)
        if not turns:
            return 0
        return next((one.place for one in turns if one in self._left), turns[-1].place + 1)


class FairBatch:
    """Computes the limits on the tokens of clients for each batch."""

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens` is the limit on the tokens of a batch while clients are limited. It should
        be so small that an iteration takes hardly longer than with one token."""
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
        self.max_tokens = max_tokens
        self._last: dict[int, Allowances] = {}  # of the last batch, by pipeline

    def allowances(
        self,
        running: Iterable[Request],
        ready: Sequence[Request],
        called: Request | None,
        *,
        pipeline: int = 0,
    ) -> Allowances | None:
        """Returns, for each client, the number of tokens that it may have in the next batch of a
        pipeline. Returns None if no client is limited.

        `running` are all requests that run in the pipeline. `ready` are the requests that could be
        in the batch, sorted by place. `called` is the waiting request that takes the place of a
        running one.
        """
        n_running = Counter(map(_CLIENT, running))
        limits = self.limits(n_running, called)
        last = self._last.pop(pipeline, None)
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
        self._last[pipeline] = allowances = Allowances(turns, limits, n_running, called)
        return allowances

    def room(self, running: Iterable[Request]) -> "Room":
        """Returns an object that decides which clients may have more running requests."""
        n_running = Counter(map(_CLIENT, running))
        return Room(n_running, self.limits(n_running, None))

    def limits(
        self, n_running: Counter[ServedClient | None], called: Request | None
    ) -> dict[ServedClient | None, int]:
        """Returns the limits of clients in the next batch, in tokens. `n_running` counts the
        running requests of each client. The called request counts too, so that the batch in which
        it is to begin has room for it."""
        if called is not None:
            n_running = n_running + Counter([called.client])
        return shared_out(self.max_tokens, n_running) if len(n_running) > 1 else {}


class Room:
    """Decides which clients may have another running request."""

    def __init__(
        self,
        n_running: Mapping[ServedClient | None, int],
        limits: Mapping[ServedClient | None, int],
    ) -> None:
        self._n_running = n_running
        self._limits = limits

    def may_begin(self, client: ServedClient | None) -> bool:
        """Returns whether a client has fewer running requests than its limit."""
        return self._n_running.get(client, 0) < self._limits.get(client, inf)


def shared_out(
    n_tokens: int, n_running: Mapping[ServedClient | None, int]
) -> dict[ServedClient | None, int]:
    """Returns the limits of clients, in tokens of a batch, rounded up. A client has a limit if it
    has more requests, relative to its weight, than some other client.

    All clients together, also clients without a limit, get `n_tokens` tokens. The sum is larger if
    otherwise a client would get fewer tokens, relative to weight, than the client with the fewest
    requests.
    """
    by_weight = {one: n / _weight(one) for one, n in n_running.items()}
    fewest = min(by_weight.values())
    more = [one for one, n in by_weight.items() if n > fewest * (1 + ROUNDING)]
    limited = sorted(more, key=by_weight.__getitem__)
    n_free = sum(n_running.values()) - sum(n_running[one] for one in limited)
    weight = sum(map(_weight, limited))
    left = max(float(n_tokens - n_free), fewest * weight)
    most = max(by_weight.values()) * (1 - ROUNDING)
    for client in limited:
        if by_weight[client] >= most or by_weight[client] * weight >= left:
            break
        left -= n_running[client]
        weight -= _weight(client)
    return {one: ceil(left * _weight(one) / weight * (1 - ROUNDING)) for one in limited}


def _weight(client: ServedClient | None) -> float:
    return 1.0 if client is None else client.weight
