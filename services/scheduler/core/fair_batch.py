"""The batch in the fair order: a client that has few requests keeps its pace beside one with many.

An iteration takes longer the more tokens it has, so whoever fills batches slows all who ride in
them. Places alone do not help against that: a client that asks for little has its place at once,
and then each of its tokens takes as long as a full batch.

So a batch has at most `max_tokens` tokens while several clients run. They are shared out by weight,
as many to each as it has requests, as far as they go (max-min fairness). The client that has fewest
by its weight is not limited, and no other one gets less than it by its weight. Clients that have
equally many, or one alone, so fill batches as they like. Of the others the prompts are cut, and the
requests that came last wait with their memory for the next batch.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter

from services.scheduler.core.client import Client
from services.scheduler.core.request import Request
from services.scheduler.core.request_pool import RequestPool

_CLIENT = attrgetter("client")


class Allowances:
    """The tokens that clients may have in one batch; those that are not named may have all."""

    def __init__(self, n_tokens: dict[Client | None, int]) -> None:
        self._n_tokens = n_tokens

    def riders(self, candidates: Iterable[Request]) -> Iterator[Request]:
        """Yields those whose clients have tokens left; ends where one that waits has none, since
        nobody comes before it."""
        for request in candidates:
            if self._n_tokens.get(request.client, 1):
                yield request
            elif request.reservation is None:
                return

    def take(self, request: Request, n_tokens: int) -> int:
        """Takes as many tokens for a request as it may have of those that it wants; returns how
        many."""
        client = request.client
        if client not in self._n_tokens:
            return n_tokens
        n_tokens = min(n_tokens, self._n_tokens[client])
        self._n_tokens[client] -= n_tokens
        return n_tokens


class FairBatch:
    """Says how many tokens each client may have in a batch."""

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens` are so few that an iteration with them takes hardly longer than with one."""
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
        self.max_tokens = max_tokens

    def allowances(self, pool: RequestPool) -> Allowances | None:
        """Returns what those who run may have in the next batch; None if nobody is limited."""
        running = Counter(map(_CLIENT, pool.running))
        if len(running) < 2:
            return None
        limited = shared_out(self.max_tokens, running)
        return Allowances(limited) if limited else None


def shared_out(n_tokens: int, n_running: Mapping[Client | None, int]) -> dict[Client | None, int]:
    """Returns the tokens of those who have more requests by weight than others, at least 1
    each. There are `n_tokens`, or as many that nobody gets less by weight than who has fewest."""
    by_weight = {one: n / _weight(one) for one, n in n_running.items()}
    fewest = min(by_weight.values())
    limited = sorted((one for one, n in by_weight.items() if n > fewest), key=by_weight.__getitem__)
    n_free = sum(n for one, n in n_running.items() if by_weight[one] == fewest)
    weight = sum(map(_weight, limited))
    left = max(float(n_tokens - n_free), fewest * weight)
    for client in limited[:-1]:
        if by_weight[client] * weight >= left:
            break
        left -= n_running[client]
        weight -= _weight(client)
    return {one: max(1, int(left * _weight(one) / weight)) for one in limited}


def _weight(client: Client | None) -> float:
    return 1.0 if client is None else client.weight
