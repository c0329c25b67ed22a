"""The engine in virtual time does what can be worked out by hand, and what an obvious loop does."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.batch import Batch
from services.scheduler.core.clients.accounts import AccountLimits, AccountUse
from services.scheduler.core.memory.expected_use import ExpectedUse
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.policies import Policy
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.policies.orca import OrcaPolicy
from services.scheduler.core.request import Request
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler
from simulator.costs import IterationWork, LinearCosts
from simulator.engine import A_TOKEN, Arrival, Simulation
from simulator.outcome import LatencyLimits, Outcome, RequestTimes, percentile
from simulator.virtual_clock import VirtualClock

PER_TOKEN = (0.0,) + (1.0,) * 6 + (0.0,) * 3
"""A second for each token."""
PER_ITERATION = (1.0,) + (0.0,) * 9


def scheduler(
    policy: Policy | None = None,
    *,
    n_stages: int = 1,
    depth: int | None = None,
    n_blocks: int = 1000,
    optimistic: bool = False,
    hands_off: bool | None = None,
) -> Scheduler:
    """The core as the leader puts it together."""
    depth = depth or max(2, n_stages)
    return Scheduler(
        RequestPool(max_requests=1000),
        KVManager(
            n_blocks=n_blocks, block_size=4, expected_use=ExpectedUse() if optimistic else None
        ),
        policy=policy
        or ChunkedPolicy(
            max_batch_size=8, max_batch_tokens=16, n_shares=1 if n_stages == 1 else depth
        ),
        pipeline_depth=depth,
        token_hand_off=n_stages == 1 if hands_off is None else hands_off,
    )


def test_one_request_takes_its_iterations_one_after_the_other() -> None:
    costs = LinearCosts((PER_ITERATION,), gap_s=0.5, plan_s=0.25, result_s=0.125, request_s=2.0)
    outcome = Simulation(scheduler(), costs, [Arrival(10.0, n_prompt=5, n_output=4)]).run()
    first_s = 10.0 + 0.25 + 1.5 + 0.125 + 2.0
    # The second is there when the first ends, as tokens stay on the rank; so are all after it.
    assert outcome.requests == (RequestTimes(10.0, first_s, first_s + 3 * 1.5, 4, n_prompt=5),)
    assert outcome.n_iterations in (4, 5)  # one may have been sent before the end was known
    assert outcome.requests[0].ttft_s == pytest.approx(3.875)
    assert outcome.requests[0].tpot_s == pytest.approx(1.5)


def test_without_hand_off_each_token_waits_for_the_one_before() -> None:
    costs = LinearCosts((PER_ITERATION,), plan_s=0.25, result_s=0.5)
    one = Simulation(scheduler(depth=1, hands_off=False), costs, [Arrival(0.0, 3, 4)]).run()
    assert one.duration_s == pytest.approx(4 * 1.75)


def test_stages_work_at_the_same_time_for_different_requests() -> None:
    costs = LinearCosts((PER_ITERATION, PER_ITERATION))
    two = [Arrival(0.0, 1, 10)] * 2
    alone = Simulation(scheduler(n_stages=2), costs, two[:1]).run()
    both = Simulation(scheduler(n_stages=2), costs, two).run()
    assert alone.duration_s == pytest.approx(20.0)
    assert list(alone.busy) == pytest.approx([0.5, 0.5])
    assert both.duration_s < 0.75 * 2 * alone.duration_s


def test_a_late_request_rides_the_next_iteration() -> None:
    costs = LinearCosts((PER_ITERATION,))
    arrivals = [Arrival(0.0, 1, 8), Arrival(2.5, 1, 1)]
    late = Simulation(scheduler(), costs, arrivals).run().requests[0]
    assert late.arrival_s == 2.5
    # The third iteration runs and the fourth is sent; the fifth, which ends at 5, has it.
    assert late.end_s == pytest.approx(5.0)


def test_outputs_end_before_what_they_asked_for() -> None:
    outcome = Simulation(
        scheduler(), LinearCosts((PER_TOKEN,)), [Arrival(0.0, 3, 2, max_new_tokens=50)]
    ).run()
    assert outcome.n_output == 2
    assert outcome.max_reserved_slots == 56  # for all 53, in blocks of four


def test_a_run_may_be_cut_off() -> None:
    simulation = Simulation(scheduler(), LinearCosts((PER_ITERATION,)), [Arrival(0.0, 1, 100)])
    outcome = simulation.run(until_s=10.5)
    assert (outcome.n_output, outcome.requests, outcome.duration_s) == (10, (), 10.5)
    assert simulation.progress[-1] == (10, 10.0)


def test_gaps_are_between_the_tokens_of_one_request() -> None:
    costs = LinearCosts((PER_TOKEN,))
    arrivals = [Arrival(0.0, 1, 4), Arrival(1.5, 3, 1)]
    outcome = Simulation(scheduler(depth=1, hands_off=False), costs, arrivals).run()
    # The first iteration after the arrival has a decode and a prompt of three tokens.
    assert list(outcome.gaps_s) == [1.0, 4.0, 1.0]
    assert (outcome.p99_gap_s, percentile(outcome.gaps_s, 50)) == (4.0, 1.0)


def test_who_asks_to_be_woken_is_asked_again_and_time_spent_waiting_counts() -> None:
    class Late(Scheduler):
        def select(self) -> Batch | None:
            return super().select() if clock.now_s >= 5.0 else None

    clock = VirtualClock()
    clock.wake_at(5.0)
    clock.wake_at(50.0)  # when all is over
    core = Late(
        RequestPool(max_requests=9),
        KVManager(n_blocks=9, block_size=4),
        policy=OrcaPolicy(max_batch_size=2),
        pipeline_depth=1,
    )
    costs = LinearCosts((PER_ITERATION,))
    outcome = Simulation(core, costs, [Arrival(1.0, 1, 2)], clock=clock).run()
    assert outcome.requests == (RequestTimes(1.0, 6.0, 7.0, 2, n_prompt=1),)
    assert outcome.duration_s == 6.0


def test_prompts_that_begin_alike_are_computed_once() -> None:
    arrivals = [
        Arrival(0.0, 9, 1, prompt_token_ids=[*range(8), 20]),
        Arrival(20.0, 9, 1, prompt_token_ids=[*range(8), 30]),
        Arrival(40.0, 9, 1),
    ]
    core = Scheduler(
        RequestPool(max_requests=9),
        KVManager(n_blocks=9, block_size=4, has_prefix_cache=True),
        policy=OrcaPolicy(max_batch_size=2),
        pipeline_depth=1,
    )
    requests = Simulation(core, LinearCosts((PER_TOKEN,)), arrivals).run().requests
    assert [one.ttft_s for one in requests] == [9.0, 1.0, 9.0]


def test_requests_are_their_accounts() -> None:
    mine = AccountUse(AccountLimits(), name="mine")
    arrivals = [Arrival(0.0, 1, 1, account=mine), Arrival(0.0, 1, 1)]
    outcome = Simulation(scheduler(), LinearCosts((PER_TOKEN,)), arrivals).run()
    assert [one.account for one in outcome.requests] == ["mine", None]


def sequential(arrivals: Sequence[Arrival], core: Scheduler, costs: LinearCosts) -> list[float]:
    """The times at which requests end, by the obvious loop: nothing overlaps."""
    waiting = sorted(arrivals, key=lambda arrival: arrival.time_s)
    requests: dict[Request, Arrival] = {}
    now_s, ends_s = 0.0, []
    while waiting or len(core.pool):
        while waiting and waiting[0].time_s <= now_s:
            arrival = waiting.pop(0)
            request = arrival.request(len(requests))
            requests[request] = arrival
            core.submit(request)
        batch = core.select()
        if batch is None:
            now_s = waiting[0].time_s
            continue
        spans = [(span.start_position, span.n_tokens, span.is_sampled) for span in batch.spans]
        now_s += costs.stage_s(0, IterationWork.of(spans))
        tokens = [A_TOKEN for span in batch.spans if span.is_sampled]
        updates = core.apply(batch.iteration, tokens)
        ends_s += [now_s for update in updates if update.finish_reason is not None]
    return ends_s


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        st.floats(0.0, 50.0),
        st.integers(1, 40),
        st.integers(1, 12),
    ),
    min_size=1,
    max_size=12,
)
POLICIES = st.sampled_from(
    [OrcaPolicy(max_batch_size=3), ChunkedPolicy(max_batch_size=3, max_batch_tokens=8)]
)
COSTS = LinearCosts(((0.5, *(0.01,) * 6, 0.02, 0.001, 0.0001),))


@given(ARRIVALS, POLICIES)
def test_a_lone_stage_without_overlap_is_the_obvious_loop(
    arrivals: list[Arrival], policy: Policy
) -> None:
    outcome = Simulation(scheduler(policy, depth=1, hands_off=False), COSTS, arrivals).run()
    expected = sequential(arrivals, scheduler(policy, depth=1, hands_off=False), COSTS)
    assert [request.end_s for request in outcome.requests] == pytest.approx(expected)


@given(ARRIVALS, st.integers(1, 3), st.booleans(), st.integers(14, 60))
def test_every_request_ends_and_time_never_goes_back(
    arrivals: list[Arrival], n_stages: int, optimistic: bool, n_blocks: int
) -> None:
    costs = LinearCosts(COSTS.coefficients * n_stages, 0.01, 0.02, 0.03, 0.04, 0.05)
    core = scheduler(n_stages=n_stages, n_blocks=n_blocks, optimistic=optimistic)
    simulation = Simulation(core, costs, arrivals)
    outcome = simulation.run()
    assert len(outcome.requests) == len(arrivals)
    assert outcome.n_output == sum(arrival.n_output for arrival in arrivals)
    assert sorted(simulation.progress) == simulation.progress
    assert all(one.arrival_s < one.first_token_s <= one.end_s for one in outcome.requests)
    assert all(0 < busy <= 1 + 1e-9 for busy in outcome.busy)
    assert outcome.max_reserved_slots <= 4 * n_blocks
    assert core.kv_manager.n_reserved_blocks == 0
    n_computed = simulation.progress[-1][0]
    least = sum(arrival.n_prompt + arrival.n_output - 1 for arrival in arrivals)
    assert n_computed >= least


def test_goodput_counts_who_keeps_all_limits() -> None:
    outcome = Outcome(
        requests=(RequestTimes(0, 1, 2, 3), RequestTimes(0, 3, 4, 3), RequestTimes(0, 1, 9, 3)),
        n_output=9,
        duration_s=10.0,
    )
    assert outcome.goodput(LatencyLimits(ttft_s=2.0)) == pytest.approx(0.2)
    assert outcome.goodput(LatencyLimits(ttft_s=2.0, tpot_s=1.0)) == pytest.approx(0.1)
    assert outcome.kept(LatencyLimits(tpot_s=0.5)) == pytest.approx(2 / 3)
    assert outcome.tokens_per_s == pytest.approx(0.9)
