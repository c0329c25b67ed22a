"""The control round trip of one iteration: engine master → controllers → ranks → engine master.

    python -m benchmarks.control_plane

Real processes and sockets on loopback, ranks that compute nothing. One batch is in flight at a
time, so a round trip is the whole path and nothing overlaps. Budget: p50 of at most 1.0 ms with
one stage and 0.25 ms for each further one. The second table adds what the first leaves out, a
transfer of activations over the data plane between stages.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import AsyncIterator

import uvloop
from orcinus.v1.sampling_pb2 import SamplingParams
from tqdm import tqdm

from benchmarks.null_rank import SENDS_ACTIVATIONS
from services.local.child import Child
from services.scheduler.engine_master import EngineMaster
from services.scheduler.kv_manager import KVManager
from services.scheduler.membership import Pipeline, gather
from services.scheduler.policies.orca import OrcaPolicy
from services.scheduler.request import Request, RequestId
from services.scheduler.request_pool import RequestPool
from services.scheduler.scheduler import Scheduler

GREEDY = SamplingParams(top_p=1.0).SerializeToString()
FIRST_STAGE_MS = 1.0
FURTHER_STAGE_MS = 0.25


@contextlib.asynccontextmanager
async def null_stages(n_stages: int) -> AsyncIterator[Pipeline]:
    """Controllers and null ranks in processes of their own."""
    children: list[Child] = []
    try:
        for index in range(n_stages):
            arguments = ["--model=.", "--address=127.0.0.1:0", f"--stage-index={index}"]
            arguments += [f"--n-stages={n_stages}", "--n-threads=1", "--log-level=WARNING"]
            children.append(await Child.start(f"stage {index}", "benchmarks.null_rank", arguments))
        addresses = [await child.wait_for("address") for child in children]
        yield await gather(addresses, pipeline_id="bench", timeout_s=60)
    finally:
        for child in reversed(children):
            await child.stop()


def scheduler_for(batch_size: int) -> Scheduler:
    """A scheduler whose batch decodes for ever."""
    scheduler = Scheduler(
        RequestPool(max_requests=batch_size),
        KVManager(n_blocks=10_000, block_size=16),
        policy=OrcaPolicy(max_batch_size=batch_size),
        pipeline_depth=1,
    )
    for index in range(batch_size):
        scheduler.submit(Request(RequestId(str(index)), [1] * 8, 2_000, sampling=GREEDY))
    return scheduler


async def round_trips(n_stages: int, n_iterations: int, batch_size: int) -> list[float]:
    """Milliseconds of each iteration."""
    async with null_stages(n_stages) as pipeline:
        news = asyncio.Event()
        engine = EngineMaster(
            pipeline, wake=news.set, on_timing=lambda *_: None, silence_limit_s=60
        )
        await engine.start()
        scheduler = scheduler_for(batch_size)
        times = []
        for _ in tqdm(range(n_iterations), desc=f"{n_stages} stages", leave=False):
            batch = scheduler.select()
            if batch is None:
                raise RuntimeError("nothing to run")
            start = time.perf_counter()
            await engine.run(batch)
            await news.wait()
            news.clear()
            [result] = engine.take_results()
            times.append(1e3 * (time.perf_counter() - start))
            scheduler.apply(result.iteration, result.token_ids)
        await engine.close()
    return times[n_iterations // 10 :]


async def table(arguments: argparse.Namespace) -> None:
    """Measures and prints one line for each number of stages."""
    print(f"{'stages':>7} {'p50 ms':>8} {'p90 ms':>8} {'p99 ms':>8} {'budget ms':>10}")
    for n_stages in arguments.stages:
        times = await round_trips(n_stages, arguments.iterations, arguments.batch_size)
        p50 = statistics.median(times)
        deciles = statistics.quantiles(times, n=100)
        budget = FIRST_STAGE_MS + FURTHER_STAGE_MS * (n_stages - 1)
        verdict = "kept" if p50 <= budget else "BROKEN"
        print(
            f"{n_stages:>7} {p50:>8.3f} {deciles[89]:>8.3f} {deciles[98]:>8.3f} "
            f"{budget:>10.2f}  {verdict}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4])
    arguments = parser.parse_args()
    for activations in ("0", "1"):
        os.environ[SENDS_ACTIVATIONS] = activations
        what = "control and activations" if activations == "1" else "control only"
        print(f"\n{what}: batch {arguments.batch_size}, {arguments.iterations} iterations")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(table(arguments))


if __name__ == "__main__":
    main()
