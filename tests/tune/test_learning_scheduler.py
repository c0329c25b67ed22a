"""A simulated scheduler begins prompts in the groups that suit the costs it is simulated with."""

import pytest

from services.scheduler.core.admission.admission_control import AdmissionControl
from services.scheduler.core.admission.prompt_groups import FIRST_OVERHEAD_TOKENS, PromptGroups
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.observing.pace import Pace
from services.scheduler.settings import SchedulerSettings
from services.tune.learning_scheduler import LearningScheduler
from simulator.costs import LinearCosts
from simulator.engine import Arrival, Simulation
from simulator.virtual_clock import VirtualClock
from tests.scheduler.watching.play import pipeline_of

TOKEN_S = 1e-3


def groups_after(overhead_tokens: float, n_requests: int) -> PromptGroups:
    """Returns the groups of a scheduler that has served requests of many lengths, on a machine
    whose iterations cost so many tokens each, those of decodes too."""
    clock, pipeline = VirtualClock(), pipeline_of(1)
    policy = ChunkedPolicy(max_batch_size=4, max_batch_tokens=256)
    scheduler = Scheduler(
        RequestPool(max_requests=n_requests),
        KVManager(n_blocks=1000, block_size=16),
        policy=policy,
        pipeline_depth=2,
        token_hand_off=True,
    )
    settings = SchedulerSettings(n_stages=1, max_batch_size=4, max_batch_tokens=256)
    pace = Pace(AdmissionControl(goal_s=None, is_fair=False), settings, now=clock.now)
    observer = pace.observe(pipeline, scheduler)
    costs = LinearCosts(((overhead_tokens * TOKEN_S, *[TOKEN_S] * 6, 0.0, 0.0, 0.0),))
    arrivals = [Arrival(float(i), 1 + i * 37 % 120, 1 + i % 5) for i in range(n_requests)]
    Simulation(LearningScheduler(scheduler, observer), costs, arrivals, clock=clock).run()
    return policy.prompt_groups


@pytest.mark.parametrize(("overhead_tokens", "learned"), [(1, {8}), (15, {16}), (300, {256})])
def test_it_learns_the_overhead_that_its_costs_have(
    overhead_tokens: float, learned: set[int]
) -> None:
    assert groups_after(overhead_tokens, 200).overhead_tokens in learned


def test_it_knows_nothing_before_it_has_run_iterations() -> None:
    assert groups_after(300, 3).overhead_tokens == FIRST_OVERHEAD_TOKENS
