"""The cost of control, and the gain of sending control messages ahead of the data.

    python -m benchmarks.control.plane

Uses real processes and sockets on loopback, and ranks that compute nothing. The first table is the
control round trip of one iteration, engine master → controllers → ranks → engine master, with one
batch in flight, so that nothing overlaps. Budget: a p50 of at most 1.0 ms with one stage, and 0.25
ms for each further stage.

The second table shows how much of the round trip remains when each stage computes for
`--compute-ms`: the time from one iteration to the next, and the part of it in which the slowest
stage did not compute. With more batches in flight than stages, a stage finds its next batch ready
when it finishes one. With one stage, all batches hold the same requests, and the rank keeps their
tokens for the next batch.

The third table compares two ways of control, in turn within one run. Ahead of the data, plans are
sent over gRPC from controller to controller, as in Orca. In band, plans are sent over the data
plane from rank to rank before the activations, as in FasterTransformer. The table shows the time
per iteration with one batch in flight, and with one batch in flight for each stage, where each
stage computes for `--compute-ms`.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import uvloop
from orcinus.v1.sampling_pb2 import SamplingParams
from tqdm import tqdm

from benchmarks.control.null_model import COMPUTE_MS
from benchmarks.control.null_rank import ACTIVATIONS, IN_BAND
from services.local.child import Child
from services.scheduler.cluster.stages import StaticStages
from services.scheduler.cluster.term import Unopposed
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.policies.orca import OrcaPolicy
from services.scheduler.core.request import Request, RequestId
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.pipeline.engine_master import EngineMaster
from services.scheduler.pipeline.membership import Pipeline
from tests.gathering import gather

NULL_RANK = "benchmarks.control.null_rank"
GREEDY = SamplingParams(temperature=0).SerializeToString()
FIRST_STAGE_MS = 1.0
FURTHER_STAGE_MS = 0.25
SILENCE_LIMIT_S = 600.0


@dataclass(frozen=True)
class Case:
    """A configuration of a pipeline and its control: sizes, batches in flight (`depth`), and
    whether plans are sent in band."""

    n_stages: int
    tp_size: int = 1
    depth: int = 1
    compute_ms: float = 0
    sends_activations: bool = True
    is_in_band: bool = False

    @property
    def n_batches(self) -> int:
        """Number of batches in flight that have different requests. With one stage, all batches
        have the same requests."""
        return 1 if self.n_stages == 1 else self.depth

    @property
    def environment(self) -> dict[str, str]:
        return {
            ACTIVATIONS: str(int(self.sends_activations)),
            COMPUTE_MS: str(self.compute_ms),
            IN_BAND: str(int(self.is_in_band)),
        }


@contextlib.asynccontextmanager
async def null_stages(case: Case) -> AsyncIterator[Pipeline]:
    """Starts a process with a controller and null ranks for each stage, and yields the pipeline."""
    children: list[Child] = []
    os.environ.update(case.environment)  # the children inherit it
    try:
        for index in range(case.n_stages):
            arguments = ["--model=.", "--address=127.0.0.1:0", f"--stage-index={index}"]
            arguments += [f"--n-stages={case.n_stages}", f"--tp-size={case.tp_size}"]
            arguments += ["--n-threads=1", "--log-level=ERROR"]
            children.append(await Child.start(f"stage {index}", NULL_RANK, arguments))
        addresses = [await child.wait_for("address") for child in children]
        yield await gather(
            StaticStages(addresses), term=Unopposed(), pipeline_id="bench", timeout_s=120
        )
    finally:
        await asyncio.gather(*(child.stop() for child in children))


def scheduler_for(case: Case, batch_size: int) -> Scheduler:
    """Returns a scheduler whose batches decode until the benchmark ends."""
    scheduler = Scheduler(
        RequestPool(max_requests=batch_size * case.n_batches),
        KVManager(n_blocks=10_000, block_size=16),
        policy=OrcaPolicy(max_batch_size=batch_size),
        pipeline_depth=case.depth,
        token_hand_off=case.n_stages == 1,
    )
    for index in range(batch_size * case.n_batches):
        scheduler.submit(Request(RequestId(str(index)), [1] * 8, 2_000, sampling=GREEDY))
    return scheduler


@dataclass(frozen=True)
class Times:
    """Measured times of iterations, in milliseconds, after the first iterations."""

    periods: list[float]
    """Time from the return of each iteration to the return of the next."""
    computes: dict[int, list[float]]
    """Compute times of the iterations on each stage, by the index of the stage."""

    @property
    def period(self) -> float:
        return statistics.mean(self.periods)

    @property
    def slowest_stage(self) -> float:
        return max(statistics.mean(times) for times in self.computes.values())


async def returns(case: Case, n_iterations: int, batch_size: int) -> Times:
    """Runs `n_iterations` iterations on a new pipeline and returns their times."""
    computes: dict[int, list[float]] = {index: [] for index in range(case.n_stages)}
    async with null_stages(case) as pipeline:
        news = asyncio.Event()
        engine = EngineMaster(
            pipeline,
            wake=news.set,
            on_timing=lambda stage, timing: computes[stage].append(timing.compute_ns / 1e6),
            silence_limit_s=SILENCE_LIMIT_S,
            iteration_limit_s=SILENCE_LIMIT_S,
            hang_limit_s=SILENCE_LIMIT_S,
        )
        await engine.start()
        scheduler = scheduler_for(case, batch_size)
        times: list[float] = []
        last = time.perf_counter()
        while len(times) < n_iterations:
            while (batch := scheduler.select()) is not None:
                await engine.run(batch)
            await news.wait()
            news.clear()
            for result in engine.take_results():
                now = time.perf_counter()
                times.append(1e3 * (now - last))
                last = now
                scheduler.apply(result.iteration, result.token_ids)
        await engine.close()
    return Times(times[n_iterations // 10 :], computes)


async def budget_table(arguments: argparse.Namespace) -> None:
    """Prints the control round trip in milliseconds and its budget, for each number of stages."""
    print(f"control round trip, batch {arguments.batch_size}, {arguments.iterations} iterations")
    print(f"{'stages':>7} {'p50 ms':>8} {'p90 ms':>8} {'p99 ms':>8} {'budget ms':>10}")
    for n_stages in arguments.stages:
        case = Case(n_stages, sends_activations=False)
        times = (await returns(case, arguments.iterations, arguments.batch_size)).periods
        p50, percentiles = statistics.median(times), statistics.quantiles(times, n=100)
        budget = FIRST_STAGE_MS + FURTHER_STAGE_MS * (n_stages - 1)
        verdict = "kept" if p50 <= budget else "BROKEN"
        print(
            f"{n_stages:>7} {p50:>8.3f} {percentiles[89]:>8.3f} {percentiles[98]:>8.3f} "
            f"{budget:>10.2f}  {verdict}"
        )


async def overlap_table(arguments: argparse.Namespace) -> None:
    """Prints how much time control adds to each iteration when the stages compute."""
    print(
        f"\nms per iteration, mean, batch {arguments.batch_size}; "
        f"compute {arguments.compute_ms} ms per stage"
    )
    print(f"{'stages':>7} {'in flight':>10} {'period':>8} {'compute':>8} {'rest':>7} {'share':>7}")
    for n_stages in arguments.stages:
        for depth in (n_stages, n_stages + 1):
            case = Case(n_stages, depth=depth, compute_ms=arguments.compute_ms)
            times = await returns(case, arguments.iterations // 3, arguments.batch_size)
            rest = times.period - times.slowest_stage
            print(
                f"{n_stages:>7} {depth:>10} {times.period:>8.2f} {times.slowest_stage:>8.2f} "
                f"{rest:>7.2f} {rest / times.period:>7.1%}"
            )


async def comparison_table(arguments: argparse.Namespace) -> None:
    """Prints the times per iteration with control ahead of the data and with control in band, side
    by side."""
    print(
        f"\nms per iteration, median of {arguments.rounds} rounds in turn; "
        f"compute {arguments.compute_ms} ms per stage"
    )
    header = f"{'stages':>7} {'tp':>3} {'in flight':>10} {'ahead':>8} {'in band':>8} {'ratio':>7}"
    print(header)
    for n_stages in arguments.stages:
        for tp_size in arguments.tp:
            for depth in sorted({1, n_stages}):
                await compare(arguments, n_stages=n_stages, tp_size=tp_size, depth=depth)


async def compare(
    arguments: argparse.Namespace, *, n_stages: int, tp_size: int, depth: int
) -> None:
    """Prints one row of the comparison: the time per iteration with control ahead of the data and
    with control in band. The two run in turn for a number of rounds."""
    means: dict[bool, list[float]] = {False: [], True: []}
    rounds = [is_in_band for _ in range(arguments.rounds) for is_in_band in (False, True)]
    for is_in_band in tqdm(rounds, desc=f"{n_stages} stages, tp {tp_size}", leave=False):
        case = Case(
            n_stages,
            tp_size=tp_size,
            depth=depth,
            compute_ms=arguments.compute_ms,
            is_in_band=is_in_band,
        )
        times = await returns(case, arguments.iterations // 3, arguments.batch_size)
        means[is_in_band].append(times.period)
    ahead, in_band = statistics.median(means[False]), statistics.median(means[True])
    print(
        f"{n_stages:>7} {tp_size:>3} {depth:>10} {ahead:>8.2f} {in_band:>8.2f} "
        f"{in_band / ahead:>7.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--compute-ms", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(budget_table(arguments))
        runner.run(overlap_table(arguments))
        runner.run(comparison_table(arguments))


if __name__ == "__main__":
    main()
