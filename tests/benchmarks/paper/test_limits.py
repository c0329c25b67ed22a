"""No schedule is faster than the bound; an order that knows lengths serves the shortest first."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.paper.beyond.limits import ShortestFirst, shortest_s
from benchmarks.paper.beyond.loads import Load
from benchmarks.paper.beyond.setups import IterationLevel, RequestLevel, Setup
from benchmarks.paper.beyond.trials import Trial
from benchmarks.paper.faster_transformer import Kinder, Prompts
from benchmarks.paper.gpu_costs import Gpu
from benchmarks.paper.models import MODELS, PaperModel
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.policies.orca import OrcaPolicy
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler
from simulator.costs import LinearCosts
from simulator.engine import Arrival, Simulation
from simulator.workload import Lengths

GPU = Gpu(layer_s=1e-4, bandwidth=1e12, products=1e13, request_s=1e-5, pair_s=1e-8, sync_s=1e-3)
BATCH = 4
KINDER = Kinder(Prompts.OWN, is_continuous=True, leaves=True, allocates_own=True, n_batches=2)
SETUPS: tuple[Setup, ...] = (
    IterationLevel(BATCH),
    IterationLevel(BATCH, "cellular"),
    IterationLevel(BATCH, "chunked", max_batch_tokens=BATCH),
    IterationLevel(BATCH, "chunked", max_batch_tokens=64, is_optimistic=True),
    IterationLevel(BATCH, order="shortest"),
    RequestLevel(BATCH, BATCH),
    RequestLevel(BATCH, 2, KINDER),
)
TIGHT = PaperModel("tight", n_layers=114, hidden_size=5120, n_stages=2, tp_size=1)
"""Weights leave memory for about 120 slots."""
MODELS_TRIED = (MODELS["101B"], MODELS["175B"], MODELS["341B"], TIGHT)
LENGTHS = st.lists(
    st.builds(Lengths, st.integers(1, 80), st.integers(1, 12)), min_size=1, max_size=9
)


@given(LENGTHS, st.sampled_from(SETUPS), st.sampled_from(MODELS_TRIED))
def test_nothing_is_faster_than_the_bound(
    lengths: list[Lengths], setup: Setup, model: PaperModel
) -> None:
    if isinstance(setup, RequestLevel) and not setup.kinder.allocates_own:
        model = MODELS["175B"]
    took_s = Trial(setup, GPU, Load(tuple(lengths)), model).outcome(None).duration_s
    assert shortest_s(lengths, model, GPU, max_batch_size=BATCH) <= took_s * (1 + 1e-9)


def test_the_bound_is_reached_where_nothing_is_in_the_way() -> None:
    # Each stage always has one of two equal batches to run, but at the beginning and the end.
    lengths = (Lengths(1, 400),) * (2 * BATCH)
    took_s = Trial(IterationLevel(BATCH), GPU, Load(lengths)).outcome(None).duration_s
    bound_s = shortest_s(lengths, MODELS["175B"], GPU, max_batch_size=BATCH)
    assert bound_s == pytest.approx(took_s, rel=0.01)


def test_memory_bounds_what_large_batches_could_do() -> None:
    assert 100 < TIGHT.n_slots < 130
    lengths = (Lengths(40, 8),) * 60
    trial = Trial(IterationLevel(30), GPU, Load(lengths), TIGHT)
    computing_s, holding_s = (
        shortest_s(lengths, model, GPU, max_batch_size=30)
        for model in (replace(TIGHT, tp_size=8), TIGHT)
    )
    # Two fit at a time, as blocks round up, where slots are enough for nearly three.
    assert 10 * computing_s < holding_s <= trial.outcome(None).duration_s < 2.1 * holding_s


def test_the_shortest_of_those_that_wait_comes_first() -> None:
    scheduler = Scheduler(
        RequestPool(max_requests=10, order=ShortestFirst()),
        KVManager(n_blocks=100, block_size=4),
        policy=OrcaPolicy(max_batch_size=1),
        pipeline_depth=1,
    )
    arrivals = [Arrival(0.0, 1, 5), Arrival(0.5, 1, 4), Arrival(0.6, 1, 2), Arrival(0.7, 1, 3)]
    costs = LinearCosts(((1.0,) + (0.0,) * 9,))
    requests = Simulation(scheduler, costs, arrivals).run().requests
    assert [(one.n_output, one.end_s) for one in requests] == [
        (5, 5.0),
        (2, 7.0),
        (3, 10.0),
        (4, 14.0),
    ]


def test_a_request_that_waits_can_be_forgotten() -> None:
    order = ShortestFirst()
    requests = [Arrival(0.0, 1, n).request(n) for n in (3, 1, 2)]
    for request in requests:
        order.add(request)
    order.remove(requests[1])
    order.remove(requests[1])
    assert list(order) == [requests[2], requests[0]]
    assert order.rank(requests[0]) > order.rank(requests[2])
