"""The simulation makes the batches that the serving loop makes of the same arrivals.

Both have a scheduler of their own and the same virtual pipeline. The loop runs as it does in the
service, with an engine whose results come when the pipeline says; only the clock is virtual.
"""

import asyncio
from heapq import heappop, heappush
from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st
from orcinus.v1 import worker_pb2

from services.scheduler.core.batch import Batch
from services.scheduler.core.memory.expected_use import ExpectedUse
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.order.fair import Fair
from services.scheduler.core.order.fcfs import FirstComeFirstServed
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.policies.orca import OrcaPolicy
from services.scheduler.core.request import Request
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.observing.iteration_observer import IterationObservers
from services.scheduler.observing.request_observer import RequestObservers
from services.scheduler.serving_loop import ServingLoop
from simulator.costs import LinearCosts
from simulator.engine import A_TOKEN, STOP_TOKEN, Arrival, Simulation
from simulator.virtual_pipeline import VirtualPipeline
from tests.limits import HANG_S

TURNS = 20
"""Turns of the event loop after which everything that can be done at a time has been done."""

Spans = list[tuple[str, int, int]]
"""A batch: the name of each request, where its span begins, and its tokens."""


def spans_of(batch: Batch) -> Spans:
    return [(span.request.request_id, span.start_position, span.n_tokens) for span in batch.spans]


class VirtualEngine:
    """An engine of known costs."""

    def __init__(self, costs: LinearCosts) -> None:
        self.now_s = 0.0
        self.coming: list[tuple[float, int, Batch]] = []
        self.sent: list[Spans] = []
        self.n_outputs: dict[Request, int] = {}
        self._pipeline = VirtualPipeline(costs)
        self._results: list[worker_pb2.IterationResult] = []

    async def run(self, batch: Batch) -> None:
        self.sent.append(spans_of(batch))
        heappush(self.coming, (self._pipeline.send(batch, self.now_s), len(self.sent), batch))

    def take_results(self) -> list[worker_pb2.IterationResult]:
        results, self._results = self._results, []
        return results

    def next_returns(self) -> None:
        self.now_s, _, batch = heappop(self.coming)
        tokens = [self._token_of(span.request) for span in batch.spans if span.is_sampled]
        self._results.append(
            worker_pb2.IterationResult(iteration=batch.iteration, token_ids=tokens)
        )

    def _token_of(self, request: Request) -> int:
        is_last = len(request.generated_token_ids) + 1 >= self.n_outputs[request]
        return STOP_TOKEN if is_last else A_TOKEN


async def served(arrivals: list[Arrival], core: Scheduler, costs: LinearCosts) -> list[Spans]:
    """Returns the batches of the serving loop."""
    engine, has_news = VirtualEngine(costs), asyncio.Event()
    loop = ServingLoop(
        core,
        engine,
        deliver=lambda updates: None,
        iterations=IterationObservers(),
        requests=RequestObservers(),
        has_news=has_news,
        now=lambda: engine.now_s,
    )
    serving = asyncio.create_task(loop.run())
    ordered = sorted(arrivals, key=lambda arrival: arrival.time_s)
    groups = [(time_s, list(group)) for time_s, group in groupby(ordered, lambda one: one.time_s)]
    while groups or engine.coming:
        if groups and (not engine.coming or groups[0][0] <= engine.coming[0][0]):
            engine.now_s, group = groups.pop(0)
            for arrival in group:
                request = arrival.request(len(engine.n_outputs))
                engine.n_outputs[request] = arrival.n_output
                loop.submit(request)
        else:
            engine.next_returns()
            has_news.set()
        for _ in range(TURNS):
            await asyncio.sleep(0)
    loop.drain()
    async with asyncio.timeout(HANG_S):
        await serving
    return engine.sent


class Recorded(Scheduler):
    """A scheduler that keeps its batches."""

    batches: list[Spans]

    def select(self) -> Batch | None:
        batch = super().select()
        if batch is not None:
            self.batches.append(spans_of(batch))
        return batch


def simulated(arrivals: list[Arrival], core: Recorded, costs: LinearCosts) -> list[Spans]:
    """Returns the batches of the simulation."""
    core.batches = []
    Simulation(core, costs, arrivals).run()
    return core.batches


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        st.integers(0, 40).map(lambda tick: tick / 4),  # some come at once
        st.integers(1, 40),
        st.integers(1, 12),
        max_new_tokens=st.just(16),
    ),
    min_size=1,
    max_size=12,
)
STAGE = (0.5, *(0.01,) * 6, 0.02, 0.001, 0.0001)
ALL_ALIKE = (0.5, *(0.0,) * 9)
"""Results come at the times of arrivals."""


@given(
    arrivals=ARRIVALS,
    n_stages=st.integers(1, 3),
    policy=st.sampled_from(["orca", "chunked"]),
    is_fair=st.booleans(),
    is_optimistic=st.booleans(),
    stage=st.sampled_from([STAGE, ALL_ALIKE]),
    way_s=st.sampled_from([0.0, 0.125]),
)
def test_the_simulation_makes_the_batches_of_the_serving_loop(
    arrivals: list[Arrival],
    n_stages: int,
    policy: str,
    is_fair: bool,
    is_optimistic: bool,
    stage: tuple[float, ...],
    way_s: float,
) -> None:
    depth = max(2, n_stages)
    costs = LinearCosts((stage,) * n_stages, plan_s=way_s, hop_s=way_s, result_s=way_s)

    def core() -> Recorded:
        return Recorded(
            RequestPool(
                max_requests=100,
                order=Fair(ageing_s=60.0, now=lambda: 0.0) if is_fair else FirstComeFirstServed(),
            ),
            KVManager(
                n_blocks=30, block_size=4, expected_use=ExpectedUse() if is_optimistic else None
            ),
            policy=OrcaPolicy(max_batch_size=3)
            if policy == "orca"
            else ChunkedPolicy(
                max_batch_size=3, max_batch_tokens=8, n_shares=1 if n_stages == 1 else depth
            ),
            pipeline_depth=depth,
            token_hand_off=n_stages == 1,
        )

    loops = core()
    loops.batches = []
    assert asyncio.run(served(arrivals, loops, costs)) == simulated(arrivals, core(), costs)
