"""FasterTransformer and BatchMaker schedule as the paper says that they do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.paper.faster_transformer import FasterTransformer
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.policies import PolicyOptions
from services.scheduler.core.policies.batchmaker import BatchMakerPolicy
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler
from simulator.costs import LinearCosts
from simulator.engine import Arrival, Simulation
from simulator.outcome import RequestTimes

PER_ITERATION = (1.0,) + (0.0,) * 9
PER_TOKEN = (0.0,) + (1.0,) * 6 + (0.0,) * 3


def faster_transformer(
    max_batch_size: int, microbatch_size: int | None = None
) -> FasterTransformer:
    return FasterTransformer(
        n_slots=100_000,
        max_batch_size=max_batch_size,
        microbatch_size=microbatch_size or max_batch_size,
    )


def cellular(max_batch_size: int = 8, *, n_blocks: int = 1000) -> Scheduler:
    return Scheduler(
        RequestPool(max_requests=100),
        KVManager(n_blocks=n_blocks, block_size=4),
        policy=BatchMakerPolicy(PolicyOptions(max_batch_size)),
        pipeline_depth=1,
    )


def test_all_end_with_the_last_one_of_their_batch() -> None:
    arrivals = [Arrival(0.0, n_prompt=3, n_output=2), Arrival(0.0, n_prompt=5, n_output=4)]
    outcome = Simulation(faster_transformer(8), LinearCosts((PER_ITERATION,)), arrivals).run()
    # An iteration for three tokens of both prompts, then one each until the ninth of the longer.
    assert outcome.n_iterations == (5 + 4) - 3
    assert outcome.requests == (
        RequestTimes(0.0, 6.0, 6.0, 2, n_prompt=3),
        RequestTimes(0.0, 6.0, 6.0, 4, n_prompt=5),
    )


def test_those_that_have_ended_are_computed_with_the_others() -> None:
    arrivals = [Arrival(0.0, n_prompt=1, n_output=1), Arrival(0.0, n_prompt=1, n_output=10)]
    outcome = Simulation(faster_transformer(8), LinearCosts((PER_TOKEN,)), arrivals).run()
    assert outcome.duration_s == pytest.approx(2 * 10)


def test_late_ones_wait_for_the_next_batch() -> None:
    arrivals = [Arrival(0.0, 1, 5), Arrival(0.5, 1, 1), Arrival(1.5, 1, 2)]
    outcome = Simulation(faster_transformer(8), LinearCosts((PER_ITERATION,)), arrivals).run()
    assert [request.end_s for request in outcome.requests] == pytest.approx([5.0, 7.0, 7.0])


def test_a_batch_is_no_larger_than_it_may_be() -> None:
    arrivals = [Arrival(0.0, 1, 3)] * 3
    outcome = Simulation(faster_transformer(2), LinearCosts((PER_ITERATION,)), arrivals).run()
    assert [request.end_s for request in outcome.requests] == pytest.approx([3.0, 3.0, 6.0])


def test_microbatches_fill_a_pipeline() -> None:
    costs = LinearCosts((PER_ITERATION, PER_ITERATION))
    arrivals = [Arrival(0.0, 1, 10)] * 2
    whole = Simulation(faster_transformer(2), costs, arrivals).run()
    halves = Simulation(faster_transformer(2, 1), costs, arrivals).run()
    assert whole.duration_s == pytest.approx(20.0)
    assert halves.duration_s == pytest.approx(21.0)  # one behind the other, in both stages
    assert halves.n_iterations == 2 * whole.n_iterations


def test_a_batch_that_has_no_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="8 requests of 2048 slots do not fit into 10000"):
        FasterTransformer(n_slots=10_000, max_batch_size=8, microbatch_size=8)


@given(
    st.lists(
        st.builds(Arrival, st.floats(0.0, 30.0), st.integers(1, 9), st.integers(1, 9)),
        min_size=1,
        max_size=9,
    ),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_every_request_gets_its_whole_output(
    arrivals: list[Arrival], max_batch_size: int, microbatch_size: int
) -> None:
    costs = LinearCosts((PER_ITERATION, PER_ITERATION))
    system = faster_transformer(max_batch_size, microbatch_size)
    outcome = Simulation(system, costs, arrivals).run()
    assert sorted((one.arrival_s, one.n_output) for one in outcome.requests) == sorted(
        (one.time_s, one.n_output) for one in arrivals
    )
    assert outcome.n_output == sum(one.n_output for one in arrivals)
    assert system.n_reserved_slots == 0


def test_only_equal_positions_share_an_iteration() -> None:
    costs = LinearCosts((PER_ITERATION,))
    alike = Simulation(cellular(), costs, [Arrival(0.0, 4, 3)] * 2).run()
    assert alike.n_iterations == 3
    others = Simulation(cellular(), costs, [Arrival(0.0, 4, 3), Arrival(0.0, 5, 3)]).run()
    # The first goes ahead by one token, and the other is at its position ever after.
    assert others.n_iterations == 2 * 3


def test_a_request_without_memory_waits() -> None:
    costs = LinearCosts((PER_ITERATION,))
    outcome = Simulation(cellular(n_blocks=2), costs, [Arrival(0.0, 4, 3)] * 2).run()
    assert [request.end_s for request in outcome.requests] == pytest.approx([3.0, 6.0])
