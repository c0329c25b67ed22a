"""The state that the pipelines of one scheduler share: the requests that wait, and the accounts of
the pool.

A waiting request belongs to no pipeline, so any pipeline may admit it. A request that is preempted,
or whose pipeline is lost, waits again at its old place in the order.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable
from typing import Protocol

from services.common.errors import PoolFull
from services.scheduler.core.admission.adapter_gate import AdapterGate, SharedAdapters
from services.scheduler.core.admission.admission_control import AdmissionControl
from services.scheduler.core.admission.grammar_gate import GrammarGate
from services.scheduler.core.admission.no_control import NoControl
from services.scheduler.core.admission.pool_tokens import pool_tokens
from services.scheduler.core.admission.waiting import Waiting
from services.scheduler.core.memory.blocks import Blocks
from services.scheduler.core.memory.cache_room import CacheRoom
from services.scheduler.core.order.fcfs import FirstComeFirstServed
from services.scheduler.core.order.order import Order
from services.scheduler.core.placement import Placement
from services.scheduler.core.request import Request
from services.scheduler.core.room import Room

RETRY_AFTER_S = 1.0
"""Seconds after which a client is asked to try again if the pool is full."""


class PoolView(Protocol):
    """The parts of a pipeline's `RequestPool` that the shared state needs."""

    @property
    def running(self) -> Collection[Request]:
        """The requests that the pipeline has admitted and that have not ended."""
        ...

    @property
    def n_running_vectors(self) -> int:
        """Number of the running requests that want vectors."""
        ...

    @property
    def grammars(self) -> GrammarGate:
        """The grammars that the ranks of the pipeline have compiled."""
        ...

    @property
    def adapters(self) -> AdapterGate:
        """The adapters that the ranks of the pipeline hold."""
        ...

    @property
    def wake(self) -> Callable[[], None]:
        """A function that makes the pipeline select again."""
        ...


class SharedRequests:
    """Holds the waiting requests of all pipelines, and the counts of the whole pool."""

    def __init__(self, order: Order | None, control: AdmissionControl | NoControl) -> None:
        self.order = FirstComeFirstServed() if order is None else order
        """Holds the waiting requests, and chooses the next one."""
        self.waiting = Waiting(self.order, control)
        """Deadlines and counts of the waiting requests."""
        self.suspects: dict[Request, None] = {}
        """The waiting requests that need a trial (`suspects.py`)."""
        self.grammars: Counter[bytes] = Counter()
        """Number of the waiting requests that use a grammar, by the digest of the grammar."""
        self.adapters = SharedAdapters()
        """The adapters that requests may use, and the adapters that clients ask to load."""
        self.placement = Placement()
        """Chooses the pipeline that admits a waiting request."""
        self._cache_room = CacheRoom()
        self.pools: list[PoolView] = []
        """The pools of all pipelines, by the pipelines' numbers."""
        self.n_requests = 0
        """Number of requests in the pool."""
        self.n_vectors = 0
        """Number of requests in the pool that want vectors."""
        self.n_tokens = 0
        """Sum of the lengths, in tokens, with which the requests in the pool count against the
        limit of the pool (`pool_tokens`)."""
        self.n_arrived = 0
        """Number of requests that have ever come into the pool."""

    @property
    def n_waiting_vectors(self) -> int:
        """Number of the waiting requests that want vectors."""
        return self.n_vectors - sum([pool.n_running_vectors for pool in self.pools])

    def open(self, pool: Hashable, room: Room, blocks: Blocks) -> None:
        """Lets the pipeline of `pool` admit requests from now on. `room` describes the load of the
        pipeline and its room for requests, and `blocks` its K/V blocks."""
        self.placement.open(pool, room)
        self._cache_room.open(pool, blocks)

    def close(self, pool: Hashable) -> None:
        """Lets the pipeline of `pool` admit no further requests."""
        self.placement.close(pool)
        self._cache_room.close(pool)

    def stranded_by(self, digest: bytes) -> list[Request]:
        """Returns the waiting requests whose grammar has the digest `digest`, unless the ranks of a
        pipeline have compiled this grammar."""
        if any(pool.grammars.has_compiled(digest) for pool in self.pools):
            return []
        return [request for request in self.order if request.grammar_digest == digest]

    def stranded_without(self, adapter: str) -> list[Request]:
        """Returns the waiting requests that use the adapter with the digest `adapter`, unless the
        ranks of a pipeline hold or load this adapter."""
        if any(
            pool.adapters.holds(adapter) or pool.adapters.is_loading(adapter) for pool in self.pools
        ):
            return []
        return [request for request in self.order if request.adapter == adapter]

    def wake_all(self) -> None:
        """Makes all pipelines select again."""
        for pool in self.pools:
            pool.wake()

    def wake_others(self, pool: PoolView) -> None:
        """Makes all pipelines except the one of `pool` select again, because requests wait
        again."""
        for other in self.pools:
            if other is not pool:
                other.wake()

    def offer_rest(self, pool: PoolView) -> None:
        """Called when the pipeline of `pool` has admitted requests. Wakes the other pipelines if
        requests still wait: a request that they left to this pipeline may have found no room
        there."""
        if len(self.order):
            self.wake_others(pool)

    def check_room(self, request: Request, max_requests: int, max_tokens: int) -> None:
        """Checks that the pool has room for a request.

        Raises:
            PoolFull: the pool has `max_requests` requests, or would exceed `max_tokens`.
        """
        if self.n_requests >= max_requests:
            raise PoolFull(
                f"the request pool holds its limit of {max_requests} requests",
                retry_after_s=RETRY_AFTER_S,
            )
        n_tokens = pool_tokens(request)
        if self.n_tokens + n_tokens > max_tokens:
            raise PoolFull(
                f"the request pool holds {self.n_tokens} tokens; with the {n_tokens} that this "
                f"request may come to, they exceed its limit of {max_tokens}",
                retry_after_s=RETRY_AFTER_S,
            )

    def count(self, request: Request, sign: int) -> None:
        """Adds a request and its tokens to the counts of the pool and of its account, or subtracts
        them with the sign -1."""
        self.n_requests += sign
        self.n_vectors += sign * request.wants_vector
        self.n_tokens += sign * pool_tokens(request)
        if request.account is not None:
            request.account.n_tokens += sign * request.max_sequence_len
