"""Makes the events of the pool: the order of the waiting requests, the running requests, and the
accounts.

An event is sent shortly after a change of the pool, and at most four times per second.
"""

import asyncio
from itertools import islice

from orcinus.v1 import watch_pb2

from services.scheduler.core.order.fair import Fair
from services.scheduler.core.request import Request
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.watching.audience import Audience
from services.scheduler.watching.told_requests import ToldRequests

PERIOD_S = 0.25
"""Minimum seconds from one event to the next."""

MAX_LISTED = 256
"""Maximum number of waiting requests in an event."""


class PoolTeller:
    """Tells the state of the pool to the audience."""

    def __init__(self, audience: Audience, told: ToldRequests) -> None:
        self.pool: RequestPool | None = None
        """The pool; None before the first epoch."""
        self._audience = audience
        self._told = told
        self._timer: asyncio.TimerHandle | None = None
        self._told_at = float("-inf")

    def note_change(self) -> None:
        """Notes that the pool has changed. An event about the pool is sent within `PERIOD_S`."""
        if self._timer is None and self.pool is not None and self._audience.is_there:
            loop = asyncio.get_running_loop()
            at = max(loop.time(), self._told_at + PERIOD_S)
            self._timer = loop.call_at(at, self._tell, self.pool)

    def _tell(self, pool: RequestPool) -> None:
        self._timer = None
        if self._audience.is_there:
            self._told_at = asyncio.get_running_loop().time()
            self._audience.tell(watch_pb2.WatchEvent(pool=self.event_of(pool)))

    def event_of(self, pool: RequestPool) -> watch_pb2.PoolEvent:
        """Returns the event that describes a pool."""
        number, running = self._told.number, pool.running
        event = watch_pb2.PoolEvent(
            waiting=[number(one) for one in islice(pool.order.line_up(()), MAX_LISTED)],
            n_waiting=pool.n_waiting,
            running=[number(one) for one in running],
            n_generated_tokens=[len(one.generated_token_ids) for one in running],
        )
        if isinstance(pool.order, Fair):
            event.accounts.extend(_accounts(pool))
        return event


def _accounts(pool: RequestPool) -> list[watch_pb2.AccountEvent]:
    names = {request.client: _name(request) for request in pool}
    return [
        watch_pb2.AccountEvent(
            account=name,
            weight=client.weight,
            counter=client.served,
            n_waiting=client.n_requests - client.n_running,
            n_running=client.n_running,
        )
        for client, name in sorted(names.items(), key=lambda item: item[1])
        if client is not None
    ]


def _name(request: Request) -> str:
    return "" if request.account is None else request.account.name
