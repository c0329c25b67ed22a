"""Hours of load with clients that disconnect: checks whether the memory of any process grows.

    python -m benchmarks.serving.soak --minutes 30

Clients of both protocols send one request after the other, with many different lengths. A third of
the requests may be abandoned before the answer is complete, and some requests are too long and are
refused. The resident memory of every process is sampled. The growth of a process's memory is the
median of the last tenth of the samples, divided by the median of the first tenth after the warm-up,
minus 1. At the end no state of any request may be left.
"""

import argparse
import asyncio
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Sequence
from random import Random

import grpc.aio
import httpx
import numpy as np
import psutil
import uvloop

from benchmarks import local_system
from benchmarks.local_system import System
from benchmarks.serving import load
from benchmarks.serving.grpc_client import GrpcClient
from benchmarks.serving.openai_client import OpenAIClient
from benchmarks.serving.overload import MIB, memory_of
from benchmarks.workload import PlannedRequest
from tests.exposition import Samples
from tests.hostile.rest import leftovers

N_CLIENTS = 24
SAMPLE_S = 2.0
REST_LIMIT_S = 20
WARM_UP = 0.2
"""Share of the run whose memory samples are ignored. In this time, caches and the allocator fill
up."""
MAX_GROWTH = 0.02
AWAY = 0.33
"""Share of requests that their clients may abandon."""
TOO_LONG = 0.05
"""Share of requests that set a larger number of tokens than the model's context allows."""

Memory = dict[psutil.Process, list[tuple[float, int]]]
"""Memory samples of each process: time in seconds, and resident memory in bytes."""


class Crowd:
    """Clients that send requests until a given time."""

    def __init__(self, clients: Sequence[load.Client], random: Random) -> None:
        self.ends: Counter[str] = Counter()
        """Number of requests by their end: `complete`, `refused`, `went away` or `unanswered`."""
        self._clients = clients
        self._random = random

    async def ask_all_the_time(self, end_s: float) -> None:
        """Sends one request after the other until the event loop's time is `end_s`."""
        while asyncio.get_running_loop().time() < end_s:
            self.ends[await self._ask()] += 1

    async def _ask(self) -> str:
        random = self._random
        n_prompt, n_output = random.randint(1, 400), random.randint(1, 96)
        if random.random() < TOO_LONG:
            n_output = 5000
        prompt = tuple(random.randrange(4, 4000) for _ in range(n_prompt))
        call = random.choice(self._clients).prepare(PlannedRequest(0.0, prompt, n_output))
        limit_s = random.expovariate(2.0) if random.random() < AWAY else 120.0
        try:
            async with asyncio.timeout(limit_s):
                await call.send()
        except TimeoutError:
            return "went away" if limit_s < 120.0 else "unanswered"
        except OSError:
            return "refused"
        return "refused" if call.read().error else "complete"


async def sample(root: psutil.Process, samples: Memory) -> None:
    """Appends the memory of every process of the system to `samples` every `SAMPLE_S` seconds,
    until cancelled."""
    while True:
        for process, n_bytes in memory_of(root).items():
            samples.setdefault(process, []).append((time.monotonic(), n_bytes))
        await asyncio.sleep(SAMPLE_S)


def growth(samples: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Returns the growth of a process's memory after the warm-up, as a share, and the slope of its
    memory in bytes per hour."""
    settled = samples[int(WARM_UP * len(samples)) :]
    times_s, n_bytes = np.array(settled, dtype=np.float64).T
    tenth = max(1, len(settled) // 10)
    part = float(np.median(n_bytes[-tenth:]) / np.median(n_bytes[:tenth]) - 1)
    return part, float(np.polyfit(times_s - times_s[0], n_bytes, 1)[0] * 3600)


def report(samples: Memory) -> bool:
    """Prints the memory of each process. Returns whether the growth of every process is below
    `MAX_GROWTH`."""
    print(f"{'process':<40} {'MiB':>8} {'growth':>8} {'MiB/h':>8}")
    is_flat = True
    for process, series in samples.items():
        part, per_hour = growth(series)
        is_flat &= part < MAX_GROWTH
        print(
            f"{name_of(process):<40} {series[-1][1] / MIB:>8.1f} {part:>8.2%} "
            f"{per_hour / MIB:>8.2f}"
        )
    return is_flat


def name_of(process: psutil.Process) -> str:
    """Returns the name of the service's module that a process runs, or `process` and its id if
    there is none."""
    with contextlib.suppress(psutil.Error):
        for argument in process.cmdline():
            if argument.startswith("services."):
                return argument
    return f"process {process.pid}"


async def run(options: argparse.Namespace) -> int:
    """Keeps a system under load. The exit status is 1 if memory grew, a request was not answered,
    or a request left state behind."""
    arguments = ["--model=models/demo", "--threads=1", "--metrics", *options.system.split()]
    samples: Memory = {}
    async with (
        local_system.running(arguments) as system,
        grpc.aio.insecure_channel(system.grpc) as channel,
    ):
        clients = (OpenAIClient(system.http, model=system.model), GrpcClient(channel))
        crowd = Crowd(clients, Random(options.seed))
        sampling = asyncio.create_task(sample(psutil.Process(system.pid), samples))
        end_s = asyncio.get_running_loop().time() + 60 * options.minutes
        await asyncio.gather(*(crowd.ask_all_the_time(end_s) for _ in range(N_CLIENTS)))
        sampling.cancel()
        is_flat = report(samples)
        left = await settled_leftovers(system)
    print(f"requests: {dict(crowd.ends)}; left of them: {left or 'nothing'}")
    return int(not is_flat or bool(left) or bool(crowd.ends["unanswered"]))


async def settled_leftovers(system: System) -> dict[str, float]:
    """Returns the state that requests have left in the services. Waits up to `REST_LIMIT_S` seconds
    until there is none."""
    async with httpx.AsyncClient() as client:
        for _ in range(REST_LIMIT_S):
            frontend, scheduler = [
                Samples((await client.get(system.metrics[service])).text)
                for service in ("frontend", "scheduler")
            ]
            if not (found := leftovers(frontend, scheduler)):
                break
            await asyncio.sleep(1)
    return found


def main() -> int:
    """Parses the command line and runs the benchmark. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--system", default="", help="more options of services.local")
    parser.add_argument("--seed", type=int, default=0)
    return uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
