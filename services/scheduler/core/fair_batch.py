"""The batch in the fair order: a client that has few requests keeps its pace beside one with many.

An iteration takes longer the more tokens it has, so whoever fills batches slows all who ride in
them. Places alone do not help against that: a client that asks for little has its place at once,
and then each of its tokens takes as long as a full batch.

So a batch has at most `max_tokens` tokens while several clients run. They are shared out by weight,
and nobody gets more than it has running (max-min fairness); the client that has least by its weight
is not limited, and no other one gets less than it by its weight. Clients that have equally many, or
one alone, so fill batches as they like. The requests of the others that come last wait with their
memory for the next batch.
"""

from collections import Counter
from collections.abc import Mapping
from operator import attrgetter

from services.scheduler.core.client import Client
from services.scheduler.core.request_pool import RequestPool

_CLIENT = attrgetter("client")

Allowances = dict[Client | None, int]
"""Tokens that clients may have in a batch; those that are not there may have all."""


class FairBatch:
    """Says how many tokens each client may have in a batch."""

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens` are so few that an iteration with them takes hardly longer than with one."""
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
        self.max_tokens = max_tokens

    def allowances(self, pool: RequestPool) -> Allowances:
        """Returns the tokens that those who run may have in the next batch."""
        running = Counter(map(_CLIENT, pool.running))
        if len(running) < 2:
            return {}
        return shared_out(self.max_tokens, running)


def shared_out(n_tokens: int, n_running: Mapping[Client | None, int]) -> Allowances:
    """Returns what those get who have more requests by weight than others, at least 1 each. There
    are `n_tokens`, or as many that nobody gets less by weight than who has fewest."""
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
