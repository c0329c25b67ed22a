"""A fleet in virtual time: groups of pipelines, each group with one pool, and a router that chooses
the group of each request."""

from collections.abc import Sequence
from functools import partial

from benchmarks.placement.hardware import SETTINGS, new_scheduler
from benchmarks.placement.routers import Router
from services.scheduler.building import build_order
from services.scheduler.core.request import Request
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler
from simulator.virtual_clock import VirtualClock

MAX_REQUESTS = 2**20
"""Largest number of requests in a pool, so large that no request is refused."""


class Group:
    """Pipelines that share one pool, and the load that a router sees."""

    def __init__(self, pool: RequestPool, schedulers: Sequence[Scheduler]) -> None:
        self.pool = pool
        self.schedulers = schedulers

    @property
    def n_requests(self) -> int:
        """Number of requests that are waiting or running."""
        return len(self.pool)

    @property
    def n_waiting(self) -> int:
        """Number of requests that are waiting."""
        return self.pool.n_waiting

    @property
    def kv_use(self) -> float:
        """Share of the K/V blocks of all pipelines that running requests have reserved."""
        managers = [one.kv_manager for one in self.schedulers]
        return sum(one.n_reserved_blocks for one in managers) / sum(
            one.n_blocks for one in managers
        )

    @property
    def n_kv_blocks(self) -> int:
        """Number of K/V blocks of all pipelines."""
        return sum(one.kv_manager.n_blocks for one in self.schedulers)


class Fleet:
    """A site of `n_groups` groups with `n_each` pipelines each."""

    def __init__(
        self, n_groups: int, n_each: int, router: Router, *, clock: VirtualClock, block_size: int
    ) -> None:
        self.schedulers: list[Scheduler] = []
        self.woken: dict[int, None] = {}
        self._router = router
        self._clock = clock
        self._block_size = block_size
        self.groups = [self._new_group(n_each) for _ in range(n_groups)]

    def submit(self, request: Request) -> None:
        """Puts a request into the pool of the group that the router chooses."""
        group = self.groups[self._router.choose(request, self.groups, self._clock.now_s)]
        group.schedulers[0].submit(request)

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens of admitted requests that were found in prefix caches."""
        caches = [one.kv_manager.prefix_cache for one in self.schedulers]
        n_queried = sum(cache.n_queried_tokens for cache in caches)
        return sum(cache.n_cached_tokens for cache in caches) / max(1, n_queried)

    def _new_group(self, n_pipelines: int) -> Group:
        first = RequestPool(
            max_requests=MAX_REQUESTS,
            max_tokens=2**62,
            order=build_order(SETTINGS, now=self._clock.now),
        )
        pools = [first, *(first.beside() for _ in range(n_pipelines - 1))]
        members = []
        for pool in pools:
            pool.wake = partial(self.woken.setdefault, len(self.schedulers))
            members.append(new_scheduler(pool, block_size=self._block_size))
            self.schedulers.append(members[-1])
        return Group(first, members)
