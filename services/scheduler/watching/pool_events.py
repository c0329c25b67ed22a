"""Makes the events of the pool: the order of the waiting requests, the running requests of all
pipelines, and the accounts.

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
"""Minimum number of seconds from one event about the pool to the next."""

MAX_LISTED = 256
"""Maximum number of waiting requests in an event."""


class PoolTeller:
    """Sends the state of the pool to all watchers."""

    def __init__(self, audience: Audience, told: ToldRequests) -> None:
        self._pools: dict[int, RequestPool] = {}  # by the number of the pipeline
        self._audience = audience
        self._told = told
        self._timer: asyncio.TimerHandle | None = None
        self._told_at = float("-inf")

    def add(self, pipeline: int, pool: RequestPool) -> None:
        """Adds the `RequestPool` of the pipeline with the number `pipeline` to the pools that
        events describe. All of these pools must share the same waiting requests."""
        self._pools[pipeline] = pool

    def requests(self) -> list[Request]:
        """Returns all requests in the pool. There are none before the first epoch."""
        return list(next(iter(self._pools.values()), ()))

    def pipeline_of(self, request: Request) -> int:
        """Returns the number of the pipeline that runs a request, or 0 if no pipeline does."""
        running_in = (number for number, pool in self._pools.items() if request in pool.running)
        return next(running_in, 0)

    def note_change(self) -> None:
        """Notes that the pool has changed. An event about the pool is sent within `PERIOD_S`
        seconds if there is a watcher."""
        if self._timer is None and self._pools and self._audience.is_there:
            loop = asyncio.get_running_loop()
            at = max(loop.time(), self._told_at + PERIOD_S)
            self._timer = loop.call_at(at, self._tell)

    def _tell(self) -> None:
        self._timer = None
        if self._audience.is_there:
            self._told_at = asyncio.get_running_loop().time()
            self._audience.tell(watch_pb2.WatchEvent(pool=self.event()))

    def event(self) -> watch_pb2.PoolEvent:
        """Returns the event that describes the pool. Must be called only after `add`."""
        number, pool = self._told.number, next(iter(self._pools.values()))
        running = [
            (pipeline, one) for pipeline, view in self._pools.items() for one in view.running
        ]
        event = watch_pb2.PoolEvent(
            waiting=[number(one) for one in islice(pool.order.line_up(()), MAX_LISTED)],
            n_waiting=pool.n_waiting,
            running=[number(one) for _, one in running],
            n_generated_tokens=[len(one.generated_token_ids) for _, one in running],
            pipelines=[pipeline for pipeline, _ in running],
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
