"""The batch in the fair order: a client that has few requests keeps its pace beside one with many.

An iteration takes longer the more tokens it has, so whoever fills batches slows all who ride in
them. Places alone do not help against that: a client that asks for little has its place at once,
and then each of its tokens takes as long as a full batch.

So while several clients run, a batch has tokens for `max_tokens` requests, shared out by weight: as
many to each client as it has requests, as far as they go (max-min fairness). The client that has
fewest by its weight is not limited, nor are its prompts, and no other one gets less than it by its
weight. Clients that have equally many, or one alone, so fill batches as they like.

The requests of a client that is limited take turns, a token each. Its prompts get what tokens it
has left, and others of it begin only while there are some; those of other clients pass them by.
After a loss nobody is limited, until it is known whose request it was.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import ceil
from operator import attrgetter

from services.scheduler.core.client import Client
from services.scheduler.core.request import Request

MAX_PASSED = 32
"""Requests that wait and have no tokens, after which nobody looks at those behind."""

_CLIENT, _PLACE = attrgetter("client"), attrgetter("place")


class Allowances:
    """The tokens that requests may have in one batch where their clients are limited."""

    def __init__(self, riding: Collection[Request], spare: dict[Client | None, int]) -> None:
        """`riding` are those of limited clients that have a token each; `spare` has the clients,
        and the tokens that each has besides."""
        self._riding = riding
        self._spare = spare

    def riders(self, candidates: Iterable[Request]) -> Iterator[Request]:
        """Yields those that have tokens; asks for the next one when the last has taken its own."""
        n_passed = 0
        for request in candidates:
            is_waiting = request.reservation is None
            n_spare = self._spare.get(request.client)
            if n_spare is None or request in self._riding or (is_waiting and n_spare):
                yield request
            elif is_waiting:
                n_passed += 1
                if n_passed == MAX_PASSED:
                    return

    def take(self, request: Request, n_tokens: int) -> int:
        """Takes as many tokens for a request as it may have of those that it wants; returns how
        many."""
        if request.client not in self._spare:
            return n_tokens
        n_own = int(request in self._riding)
        n_tokens = min(n_tokens, n_own + self._spare[request.client])
        self._spare[request.client] -= n_tokens - n_own
        return n_tokens


class FairBatch:
    """Says who rides in one batch after the other, and with how many tokens."""

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens` are so few that an iteration with them takes hardly longer than with one."""
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
        self.max_tokens = max_tokens
        self._last: dict[Client | None, int] = {}  # places of those whose turn was last

    def allowances(self, running: Iterable[Request], ready: Sequence[Request]) -> Allowances | None:
        """Returns what those who run may have in the next batch, of whom those that are ready could
        ride in it, by their places; None if nobody is limited."""
        limits = self._limits(Counter(map(_CLIENT, running)))
        self._last = {one: self._last.get(one, -1) for one in limits}
        if not limits:
            return None
        by_client = defaultdict(list)
        for request in ready:
            if request.client in limits:
                by_client[request.client].append(request)
        riding = set[Request]()
        for client, requests in by_client.items():
            begin = bisect_right(requests, self._last[client], key=_PLACE)
            chosen = [*requests[begin:], *requests[:begin]][: limits[client]]
            riding.update(chosen)
            self._last[client] = chosen[-1].place
            limits[client] -= len(chosen)
        return Allowances(riding, limits)

    def first_with_room(
        self, waiting: Iterator[Request], running: Iterable[Request]
    ) -> Request | None:
        """Returns the first of those that wait whose client may have another request beside those
        that run."""
        n_running = Counter(map(_CLIENT, running))
        limits = self._limits(n_running)
        for request in islice(waiting, MAX_PASSED):
            limit = limits.get(request.client)
            if limit is None or n_running[request.client] < limit:
                return request
        return None

    def _limits(self, n_running: Mapping[Client | None, int]) -> dict[Client | None, int]:
        return shared_out(self.max_tokens, n_running) if len(n_running) > 1 else {}


def shared_out(n_tokens: int, n_running: Mapping[Client | None, int]) -> dict[Client | None, int]:
    """Returns the tokens of those who have more requests by weight than others, rounded up. There
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
    return {one: ceil(left * _weight(one) / weight) for one in limited}


def _weight(client: Client | None) -> float:
    return 1.0 if client is None else client.weight
