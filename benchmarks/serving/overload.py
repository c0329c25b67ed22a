"""Ten times the load that the system can serve: refusals, their latency, and complete answers.

    python -m benchmarks.serving.overload             both protocols, 60 s each, without a goal
    python -m benchmarks.serving.overload --goals 2   the same with a goal for first tokens
    python -m benchmarks.serving.overload --protocols http --goals 0 2 --times 1 1.5 2 3 5 10 \\
        --figure docs/images/overload.png               goodput over the load, without and with it

Clients that send one request after the other measure the capacity in complete answers per second,
before and after the overload; the mean is used. During the overload, requests arrive as a Poisson
process at a multiple of the capacity, whether or not earlier requests have ended. Goodput is the
complete answers per second, from the time at which the queue is full until requests stop arriving.
`on time` counts the answers whose first tokens came within the largest of the goals. All answers of
a batch have one length and end at the same time, so each answer counts by the share of its tokens
that came within this period. A refusal is HTTP 429 or RESOURCE_EXHAUSTED; its latency counts from
the sending of the request. The pool accepts only a quarter of the connections of a frontend, so
that without a goal the pool is the limit that is reached.

The engine has a processor of its own, as its pod has. All other processes share the other
processors with the client, which only records the times of answers during the run and parses them
afterwards. The client's use of processors is printed.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import psutil
import uvloop
from matplotlib.figure import Figure

from benchmarks import local_system, machine
from benchmarks.local_system import System
from benchmarks.pinning import ranks_apart
from benchmarks.records import RequestRecord, Spread
from benchmarks.serving import load
from benchmarks.serving.grpc_client import GrpcClient
from benchmarks.serving.openai_client import OpenAIClient
from benchmarks.workload import PlannedRequest

N_PROMPT, N_OUTPUT = 64, 512
"""Lengths of the prompt and of the output of each request, in tokens. All requests are equal, so
that answers per second are a measure.

With shorter answers, ten times the capacity would be more requests per second. The client and the
refusals would then leave less of two cores for the engine. With 256 tokens, ten times the capacity
would be some 290 calls per second. One core cannot begin so many calls over gRPC while it also runs
the client and the streams.
"""
N_CLIENTS = 64
"""Number of clients that measure the capacity. They fill two batches, so that the engine never
waits."""
SMALL_POOL = ("--max-requests=512",)
N_CONNECTIONS = 16
"""Number of gRPC connections of the client. If a connection has 256 calls, further calls on it
would wait in the client."""
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
WARM_UP_S = 5.0
RETRY_S = 0.2
"""Seconds after which a client that measures the capacity repeats a refused request."""
MIN_GOODPUT = 0.95
MAX_REFUSAL_S = 0.05
MAX_GROWTH = 0.1
"""Largest allowed growth of a process's memory after the queue is full, as a share of the memory at
that time."""
REFUSED = ("HTTP 429", "ConnectionError: RESOURCE_EXHAUSTED")
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Overloaded:
    """The results of one load over one protocol."""

    protocol: str
    goal_s: float
    """Goal for the time to the first token, in seconds, that the scheduler is given; 0 means no
    goal."""
    capacity_per_s: float
    offered_per_s: float
    goodput_per_s: float
    on_time_per_s: float
    """Goodput of answers that are on time, in answers per second: their first token came within the
    largest of the goals."""
    refusal_s: Spread | None
    first_token_s: Spread | None
    late_s: Spread | None
    """Seconds by which the first tokens of late answers exceeded the largest of the goals."""
    n_complete: int
    n_late: int
    n_refused: int
    others: Counter[str]
    """Number of requests that were neither complete nor refused, by the text of their error."""
    growth: float
    """Largest growth of any process's memory after the queue was full, as a share of the memory at
    that time."""
    client_cpus: float

    @property
    def goodput_part(self) -> float:
        """Goodput of all complete answers, divided by the capacity."""
        return self.goodput_per_s / self.capacity_per_s

    @property
    def on_time_part(self) -> float:
        """Goodput of the answers whose first token came within the largest goal, divided by the
        capacity."""
        return self.on_time_per_s / self.capacity_per_s

    @property
    def is_held(self) -> bool:
        """Whether the system meets all conditions under overload: enough goodput, fast refusals,
        little growth of memory, and no other errors."""
        return (
            (self.on_time_part if self.goal_s else self.goodput_part) >= MIN_GOODPUT
            and self.refusal_s is not None
            and self.refusal_s.p99 < MAX_REFUSAL_S
            and self.growth < MAX_GROWTH
            and not self.others
        )

    @property
    def name(self) -> str:
        """The goal as text: `goal of 2 s` or `no goal`."""
        return f"goal of {self.goal_s:g} s" if self.goal_s else "no goal"

    def lines(self) -> list[str]:
        """Returns the results as lines of text to print."""
        return [
            f"{self.protocol}, {self.name}: capacity {self.capacity_per_s:.1f}/s, offered "
            f"{self.offered_per_s:.1f}/s, goodput {self.goodput_per_s:.1f}/s "
            f"({self.goodput_part:.0%}), on time {self.on_time_per_s:.1f}/s "
            f"({self.on_time_part:.0%})",
            f"  {self.n_complete} complete, first token after {_milliseconds(self.first_token_s)}; "
            f"{self.n_late} late by {_milliseconds(self.late_s)}",
            f"  {self.n_refused} refused after {_milliseconds(self.refusal_s)}",
            f"  otherwise: {dict(self.others)}; memory grew by {self.growth:.1%} at most; "
            f"the client took {self.client_cpus:.2f} cores",
        ]

    def row(self) -> dict[str, Any]:
        """Returns the results as a dictionary for the record."""
        return {
            "protocol": self.protocol,
            "goal_s": self.goal_s,
            "capacity_per_s": round(self.capacity_per_s, 2),
            "offered_per_s": round(self.offered_per_s, 2),
            "goodput_per_s": round(self.goodput_per_s, 2),
            "goodput_part": round(self.goodput_part, 3),
            "on_time_per_s": round(self.on_time_per_s, 2),
            "on_time_part": round(self.on_time_part, 3),
            "first_token_s": _rounded(self.first_token_s),
            "refusal_s": _rounded(self.refusal_s),
            "late_s": _rounded(self.late_s),
            "n_complete": self.n_complete,
            "n_late": self.n_late,
            "n_refused": self.n_refused,
            "others": dict(self.others),
            "growth": round(self.growth, 4),
            "client_cpus": round(self.client_cpus, 2),
        }


async def capacity(client: load.Client, request: PlannedRequest, *, for_s: float) -> float:
    """Returns the capacity in answers per second. After a warm-up, clients send one request after
    the other for `for_s` seconds. The capacity is the number of received tokens, divided by the
    length of an answer and by the time."""
    loop = asyncio.get_running_loop()
    start_s = loop.time() + WARM_UP_S
    n_tokens = 0

    async def ask_all_the_time() -> None:
        nonlocal n_tokens
        while loop.time() < start_s + for_s:
            call = client.prepare(request)
            try:
                await call.send()
                reply = call.read()
            except ConnectionError:
                reply = None
            if reply is None or reply.error is not None:
                await asyncio.sleep(RETRY_S)
                continue
            n_tokens += sum(
                answer.n_tokens
                for answer in reply.answers
                if start_s <= answer.time_s < start_s + for_s
            )

    await asyncio.gather(*(ask_all_the_time() for _ in range(N_CLIENTS)))
    return n_tokens / request.n_output / for_s


def arrivals(rate: float, for_s: float, *, seed: int) -> list[PlannedRequest]:
    """Returns requests that arrive as a Poisson process of `rate` requests per second for `for_s`
    seconds."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, int(rate * for_s))
    return [request_at(float(arrival_s)) for arrival_s in np.cumsum(gaps)]


def request_at(arrival_s: float) -> PlannedRequest:
    """Returns the request of this workload with the given arrival time. All requests are equal but
    for that time."""
    return PlannedRequest(arrival_s, tuple(range(7, 7 + N_PROMPT)), N_OUTPUT)


async def overload(
    protocol: str,
    client: load.Client,
    system: System,
    options: argparse.Namespace,
    *,
    goal_s: float,
    times: float,
) -> Overloaded:
    """Measures the capacity over a protocol, before and after a load of `times` the capacity.
    Returns the results of the load."""
    before_per_s = await capacity(client, request_at(0.0), for_s=options.capacity_s)
    requests = arrivals(times * before_per_s, options.seconds, seed=options.seed)
    full_s = options.seconds / 4
    root = psutil.Process(system.pid)
    watching = asyncio.create_task(growth_of(root, full_s, options.seconds))
    start_s, cpu_s = time.monotonic(), time.process_time()
    records = await load.run(client, requests, timeout_s=options.timeout_s)
    cpus = (time.process_time() - cpu_s) / (time.monotonic() - start_s)
    after_per_s = await capacity(client, request_at(0.0), for_s=options.capacity_s)
    return figures(
        protocol,
        records,
        goal_s=goal_s,
        on_time_s=max(options.goals) or float("inf"),
        capacity_per_s=(before_per_s + after_per_s) / 2,
        window_s=(full_s, options.seconds),
        growth=await watching,
        client_cpus=cpus,
    )


def figures(
    protocol: str,
    records: Sequence[RequestRecord],
    *,
    goal_s: float = 0.0,
    on_time_s: float = float("inf"),
    capacity_per_s: float,
    window_s: tuple[float, float],
    growth: float,
    client_cpus: float,
) -> Overloaded:
    """Returns the results of a run. Goodput counts answers within the window (begin, end), in
    seconds. An answer counts as on time if its first token came within `on_time_s` seconds."""
    done = [record for record in records if record.is_complete]
    refused = [r for r in records if r.error is not None and r.error.startswith(REFUSED)]
    others = (r.error[:60] for r in records if r.error and not r.error.startswith(REFUSED))
    begin_s, end_s = window_s
    on_time = [record for record in done if _began_within(record, on_time_s)]
    waits_s = [r.time_to_first_token_s for r in done if r.time_to_first_token_s is not None]
    late_s = [wait_s - on_time_s for wait_s in waits_s if wait_s > on_time_s]
    return Overloaded(
        protocol=protocol,
        goal_s=goal_s,
        capacity_per_s=capacity_per_s,
        offered_per_s=len(records) / end_s,
        goodput_per_s=sum(part_within(record, window_s) for record in done) / (end_s - begin_s),
        on_time_per_s=sum(part_within(record, window_s) for record in on_time) / (end_s - begin_s),
        refusal_s=Spread.of(record.end_s - record.start_s for record in refused),
        first_token_s=Spread.of(waits_s),
        late_s=Spread.of(late_s),
        n_complete=len(done),
        n_late=len(late_s),
        n_refused=len(refused),
        others=Counter(others),
        growth=growth,
        client_cpus=client_cpus,
    )


def _began_within(record: RequestRecord, limit_s: float) -> bool:
    first_s = record.time_to_first_token_s
    return first_s is not None and first_s <= limit_s


def part_within(record: RequestRecord, window_s: tuple[float, float]) -> float:
    """Returns the share of an answer's tokens that came between two times."""
    begin_s, end_s = window_s
    times_s = record.token_times_s or (record.end_s,)
    return sum(begin_s <= time_s < end_s for time_s in times_s) / len(times_s)


async def growth_of(root: psutil.Process, from_s: float, to_s: float) -> float:
    """Returns the largest growth of the memory of any process of the system, as a share of its
    memory at `from_s`. The memory is compared at two times, in seconds from now."""
    await asyncio.sleep(from_s)
    before = memory_of(root)
    await asyncio.sleep(to_s - from_s)
    after = memory_of(root)
    return max(after[process] / before[process] - 1 for process in before.keys() & after.keys())


def memory_of(root: psutil.Process) -> dict[psutil.Process, int]:
    """Returns the resident memory of each descendant of a process, in bytes."""
    memory = {}
    for process in root.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            memory[process] = int(process.memory_info().rss)
    return memory


@contextlib.asynccontextmanager
async def client_of(protocol: str, system: System) -> AsyncIterator[load.Client]:
    """Yields a client of a system for `protocol`: `http`, or gRPC for any other name."""
    if protocol == "http":
        yield OpenAIClient(system.http, model=system.model)
    else:
        async with contextlib.AsyncExitStack() as stack:
            channels = [
                grpc.aio.insecure_channel(system.grpc, options=OWN_CONNECTION)
                for _ in range(N_CONNECTIONS)
            ]
            for channel in channels:
                await stack.enter_async_context(channel)
            yield GrpcClient(*channels)


def _milliseconds(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return f"{1e3 * spread.median:.1f} ms, p99 {1e3 * spread.p99:.1f} ms"


def _rounded(spread: Spread | None) -> dict[str, float] | None:
    if spread is None:
        return None
    return {"median": round(spread.median, 4), "p99": round(spread.p99, 4)}


async def run(options: argparse.Namespace) -> int:
    """Runs all loads over each protocol and with each goal. The exit status is 1 if a condition was
    not met."""
    about = machine.describe()
    results = []
    for protocol, goal_s in itertools.product(options.protocols, options.goals):
        arguments = ["--model=models/demo", "--threads=1", *SMALL_POOL, *options.system.split()]
        if goal_s:
            arguments.append(f"--scheduler=first_token_goal_s={goal_s}")
        async with (
            local_system.running(arguments) as system,
            client_of(protocol, system) as client,
        ):
            with ranks_apart():
                for times in options.times:
                    result = await overload(
                        protocol, client, system, options, goal_s=goal_s, times=times
                    )
                    print("\n".join(result.lines()), flush=True)
                    results.append(result)
    if options.out is not None:
        record = {**about, "runs": [result.row() for result in results]}
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    if options.figure is not None:
        draw(options.figure, results, on_time_s=max(options.goals))
    return int(not all(result.is_held for result in results))


def draw(path: Path, results: Sequence[Overloaded], *, on_time_s: float) -> None:
    """Draws the answers per second that begin within `on_time_s` seconds, over the offered load.
    Both are multiples of the capacity. There is a line for each protocol and goal."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys((result.protocol, result.name) for result in results):
        own = [result for result in results if (result.protocol, result.name) == name]
        axes.plot(
            [result.offered_per_s / result.capacity_per_s for result in own],
            [result.on_time_per_s / result.capacity_per_s for result in own],
            marker="o",
            label=", ".join(name),
        )
    axes.set_ylim(bottom=0)
    axes.set_xlabel("offered requests, in multiples of the capacity")
    axes.set_ylabel(f"answers that begin within {on_time_s:g} s, in parts of it")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> int:
    """Parses the command line and runs the benchmark. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--protocols", nargs="+", default=["http", "grpc"])
    parser.add_argument("--seconds", type=float, default=60.0, help="of the overload")
    parser.add_argument("--capacity-s", type=float, default=20.0, help="to find the capacity in")
    parser.add_argument("--times", type=float, nargs="+", default=[10.0], help="the capacity")
    parser.add_argument(
        "--goals", type=float, nargs="+", default=[0.0], help="for first tokens, in s; 0 is none"
    )
    parser.add_argument("--out", type=Path, help="file for a record, JSON")
    parser.add_argument("--figure", type=Path, help="file for the plot")
    parser.add_argument("--timeout-s", type=float, default=180.0, help="that a client waits")
    parser.add_argument("--system", default="", help="more options of services.local")
    parser.add_argument("--seed", type=int, default=0)
    return uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
