"""Setups: systems and their settings. Each run of a setup gets a new scheduler."""

from dataclasses import dataclass, field
from typing import Literal

from benchmarks.paper.beyond.limits import ShortestFirst
from benchmarks.paper.faster_transformer import FasterTransformer, Kinder
from benchmarks.paper.models import PaperModel
from benchmarks.paper.systems import BLOCK_SIZE, N_REQUESTS
from services.scheduler.core.memory.expected_use import ExpectedUse
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.order.fair import Fair
from services.scheduler.core.order.fcfs import FirstComeFirstServed
from services.scheduler.core.order.order import Order
from services.scheduler.core.policies import Policy, PolicyOptions
from services.scheduler.core.policies.batchmaker import BatchMakerPolicy
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.policies.orca import OrcaPolicy
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.settings import SchedulerSettings
from simulator.site import Scheduling
from simulator.virtual_clock import VirtualClock

AGEING_S: float = SchedulerSettings.model_fields["ageing_s"].default
MAX_BATCH_TOKENS: int = SchedulerSettings.model_fields["max_batch_tokens"].default
"""Largest number of tokens in an iteration: the default of the scheduler's settings."""


@dataclass(frozen=True, slots=True)
class RequestLevel:
    """FasterTransformer with request-level scheduling, or a variant with improvements
    (`Kinder`)."""

    max_batch_size: int
    microbatch_size: int
    kinder: Kinder = field(default_factory=Kinder)
    max_sequence_len: int = 2048

    @property
    def size(self) -> str:
        """The largest batch and the microbatch as in the paper's legends: `8,4`."""
        return f"{self.max_batch_size},{self.microbatch_size}"

    def build(self, model: PaperModel, clock: VirtualClock) -> Scheduling:
        """Returns a new scheduler for a model.

        Raises:
            ValueError: the K/V memory that the model's weights leave free is too small for the
                batches.
        """
        return FasterTransformer(
            n_slots=model.n_slots,
            max_batch_size=self.max_batch_size,
            microbatch_size=self.microbatch_size,
            max_sequence_len=self.max_sequence_len,
            kinder=self.kinder,
            clock=clock,
        )


@dataclass(frozen=True, slots=True)
class IterationLevel:
    """This project's scheduler, by default with the paper's settings."""

    max_batch_size: int = 32
    policy: Literal["cellular", "orca", "chunked"] = "orca"
    n_in_flight: int | None = None
    """Number of batches in flight; None means one for each stage."""
    max_batch_tokens: int = MAX_BATCH_TOKENS
    is_optimistic: bool = False
    has_prefix_cache: bool = False
    order: Literal["fcfs", "fair", "shortest"] = "fcfs"

    @property
    def size(self) -> str:
        """The largest batch as in the paper's legends: `32`."""
        return str(self.max_batch_size)

    def build(self, model: PaperModel, clock: VirtualClock) -> Scheduling:
        """Returns a new scheduler for a model."""
        depth = self.n_in_flight or model.n_stages
        return Scheduler(
            RequestPool(max_requests=N_REQUESTS, order=self._order(clock)),
            KVManager(
                n_blocks=model.n_slots // BLOCK_SIZE,
                block_size=BLOCK_SIZE,
                has_prefix_cache=self.has_prefix_cache,
                expected_use=ExpectedUse() if self.is_optimistic else None,
            ),
            policy=self._policy(depth),
            pipeline_depth=depth,
        )

    def _policy(self, depth: int) -> Policy:
        size = self.max_batch_size
        match self.policy:
            case "cellular":
                return BatchMakerPolicy(PolicyOptions(size))
            case "orca":
                return OrcaPolicy(max_batch_size=size)
        return ChunkedPolicy(
            max_batch_size=size, max_batch_tokens=self.max_batch_tokens, n_shares=depth
        )

    def _order(self, clock: VirtualClock) -> Order:
        match self.order:
            case "fcfs":
                return FirstComeFirstServed()
            case "shortest":
                return ShortestFirst()
        return Fair(ageing_s=AGEING_S, now=clock.now)


Setup = RequestLevel | IterationLevel
