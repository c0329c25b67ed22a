"""The simulated machine and the settings that all entrants share, and the construction of an
entrant's scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass

from orcinus.v1 import worker_pb2

from services.arena.entrants import Entrant
from services.scheduler.building import build_order, build_scheduler, default_depth
from services.scheduler.core.admission.admission_control import AdmissionControl
from services.scheduler.core.policies import LengthPredictor, Policy, PolicyOptions
from services.scheduler.core.policies.checked import CheckedPolicy
from services.scheduler.core.policies.registry import policy_of
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.observing.pace import Pace
from services.scheduler.pipeline.membership import Member, Pipeline
from services.scheduler.settings import SchedulerSettings
from services.tune.learning_scheduler import LearningScheduler
from simulator.costs import Costs
from simulator.virtual_clock import VirtualClock

MAX_REQUESTS = 2**20
"""Largest number of requests in a pool. It is so large that no request is refused."""
MAX_TOKENS = 2**62


@dataclass(frozen=True, slots=True)
class Setup:
    """A simulated machine, and the settings of its scheduler."""

    costs: Costs
    n_slots: int
    max_batch_size: int = 32
    max_batch_tokens: int = 512
    block_size: int = 16
    pipeline_depth: int | None = None
    """Largest number of batches in flight; None means the default for the number of stages."""
    n_pipelines: int = 1
    has_prefix_cache: bool = False
    is_optimistic: bool = False
    """Whether a request reserves less K/V memory than it may need. Then some requests are
    preempted."""

    @property
    def depth(self) -> int:
        """Largest number of batches in flight, as set or by default."""
        return self.pipeline_depth or default_depth(self.costs.n_stages)

    def settings(self, entrant: Entrant) -> SchedulerSettings:
        """Returns the settings of the scheduler with the policy and the order of an entrant.

        Raises:
            ValueError: the settings do not fit together.
        """
        return SchedulerSettings(
            stages=",".join(f"stage:{1 + index}" for index in range(self.costs.n_stages)),
            policy=entrant.policy,
            order=entrant.order,
            max_batch_size=self.max_batch_size,
            max_batch_tokens=self.max_batch_tokens,
            pipeline_depth=self.depth,
            prefix_cache=self.has_prefix_cache,
            admission="optimistic" if self.is_optimistic else "reserve",
        )

    def policy(self, entrant: Entrant, predictor: LengthPredictor | None) -> Policy:
        """Returns a new policy object for an entrant. Its selections are not checked.

        Raises:
            ValueError: the policy cannot have the options of this setup.
        """
        n_shares = 1 if self.costs.n_stages == 1 else self.depth
        options = PolicyOptions(self.max_batch_size, self.max_batch_tokens, n_shares, predictor)
        made = policy_of(entrant.policy, options)
        return made.policy if isinstance(made, CheckedPolicy) else made

    def pools(self, entrant: Entrant, clock: VirtualClock) -> list[RequestPool]:
        """Returns a pool for each pipeline. The pools share their waiting requests, which are
        admitted in the order of the entrant."""
        order = build_order(self.settings(entrant), now=clock.now)
        first = RequestPool(max_requests=MAX_REQUESTS, max_tokens=MAX_TOKENS, order=order)
        return [first, *(first.beside() for _ in range(self.n_pipelines - 1))]

    def schedulers(
        self,
        entrant: Entrant,
        pools: Sequence[RequestPool],
        policies: Sequence[Policy],
        clock: VirtualClock,
        make: type[Scheduler],
    ) -> list[tuple[Scheduler, LearningScheduler]]:
        """Returns two objects for each pipeline. The first is its scheduler, of the class `make`
        and with one of `policies`. The second is a `LearningScheduler` around the same scheduler,
        which learns the cost of iterations as a real scheduler process does."""
        settings = self.settings(entrant)
        stage = worker_pb2.DescribeResponse(
            block_size=self.block_size, n_kv_blocks=max(1, self.n_slots // self.block_size)
        )
        stages = (Member("", stage),) * self.costs.n_stages
        pace = Pace(AdmissionControl(goal_s=None, is_fair=False), settings, now=clock.now)
        made = []
        for pool, policy in zip(pools, policies, strict=True):
            pipeline = Pipeline("arena", 1, stages)
            scheduler = build_scheduler(settings, pipeline, pool, make=make, policy=policy)
            scheduler.adopt()
            observer = pace.observe(pipeline, scheduler)
            observer.opened()
            made.append((scheduler, LearningScheduler(scheduler, observer)))
        return made
