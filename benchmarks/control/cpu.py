"""The processor time per token that each process of the control plane uses, without a model.

    python -m benchmarks.control.cpu
    python -m benchmarks.control.cpu --streams 256 1024 --json FILE
    python -m benchmarks.control.cpu --pipelines 16 --streams 1024 --iteration-ms 30 --slowdown 6
    python -m benchmarks.control.cpu --pipelines 16 --streams 1024 --iteration-ms 30 --frontends 1

Runs a whole local system on real sockets whose rank computes nothing. The rank sleeps for the time
of a model, so that iterations have realistic batches, and samples fixed tokens. Clients stream the
paper's mixed trace. On a machine where the model uses all cores, every 100 us of control per token
are lost to the model.

With `--streams`, the given number of streams run side by side, in one batch for each of the
`--pipelines`, and together generate `--tokens-per-s` tokens per second. A stream is a series of
requests, each with an answer of 64 to 192 tokens. With `--endless` each stream is a single long
request, so that the cost of beginning and ending requests does not count.

With `--iteration-ms`, iterations take this time, and the report adds the number of cores that each
process would need. The processes of a large system may need more processors than the machine has.
Then `--slowdown` makes all iterations longer by a factor, and the report multiplies the processor
time per token by the number of tokens per second without this factor. Work that is done every
second, whatever the number of tokens, is then counted too high. So is the work of waking up: a
process that rarely works finds its caches cold.

With `--frontends`, one process takes the place of all frontends and clients (`null_frontends.py`).
It has the given number of connections to the scheduler, and sends the requests of all streams. The
remaining processes may be few enough to run at the full rate.

Processor time hardly depends on other work on the machine. So two versions can be compared by
processor time where throughput would be too noisy.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc.aio
import httpx
import numpy as np
import uvloop

from benchmarks import machine, workload
from benchmarks.control.null_plane import Plane, Processes, Used, null_plane, plane_of_streams
from benchmarks.records import RequestRecord
from benchmarks.serving import load
from benchmarks.serving.grpc_client import GrpcClient
from benchmarks.serving.openai_client import OpenAIClient
from services.common import semconv

VOCAB_SIZE = 1000  # the null rank's
PROMPT_TOKENS = 16  # of each of the concurrent streams
MIN_ITERATION_S = 0.005
TIMEOUT_S = 60.0  # of a sample, on a machine with other work
SAMPLE_S = 1.0  # a sample of the metrics takes the scheduler 5 ms
START_S = 120.0  # until the streams run, on a machine with other work
WARM_UP_S = 3.0  # until the streams no longer go in step
GENERATED = re.compile(f"^{semconv.GENERATION_TOKENS} (\\S+)", re.MULTILINE)
ITERATIONS = re.compile(f"^{semconv.BATCH_SIZE}_count (\\S+)", re.MULTILINE)


@contextlib.asynccontextmanager
async def client_of(plane: Plane, options: argparse.Namespace) -> AsyncIterator[load.Client]:
    """Yields a client of a control plane that uses the protocol chosen by the options: gRPC with
    `--over-grpc`, else HTTP."""
    if options.over_grpc:
        async with grpc.aio.insecure_channel(plane.grpc) as channel:
            yield GrpcClient(channel)
    else:
        shown = {} if options.show_tokens else {"return_token_ids": None}
        yield OpenAIClient(plane.http, model="null", body=shown)


async def measure_trace(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the mixed trace in several rounds, and measures processor time, including the cost of
    beginning and ending requests. Returns the table of the best rounds."""
    requests = workload.from_options(options, rate=options.rate, vocab_size=VOCAB_SIZE)
    n_tokens = sum(request.n_output for request in requests)
    rounds: list[dict[str, Used]] = []
    async with (
        null_plane(
            options,
            compute_ms=options.compute_ms,
            max_batch_size=options.max_batch_size,
            max_batch_tokens=max(512, options.max_batch_size),
        ) as plane,
        client_of(plane, options) as client,
    ):
        await load.run(client, requests[:8])
        elapsed_s: list[float] = []
        for _ in range(options.rounds):
            before, start = plane.used(), time.perf_counter()
            _check(await load.run(client, requests))
            elapsed_s.append(time.perf_counter() - start)
            rounds.append({name: now.since(before[name]) for name, now in plane.used().items()})
    title = f"{len(requests)} requests, {options.compute_ms:g} ms per iteration"
    return report(title, rounds, [n_tokens] * len(rounds), elapsed_s)


async def measure_streams(options: argparse.Namespace, n_streams: int) -> dict[str, Any]:
    """Runs `n_streams` streams in several rounds, and measures processor time while all streams are
    running. Returns the table of the best rounds."""
    compute_s = iteration_s(options, n_streams)
    batch_size = -(-n_streams // options.pipelines)
    n_tokens = round(n_streams * options.window_s / compute_s)
    streams = [requests_of(options, index, n_tokens // n_streams) for index in range(n_streams)]
    rounds: list[tuple[Sample, Sample]] = []
    async with (
        null_plane(
            options,
            compute_ms=1e3 * compute_s,
            n_pipelines=options.pipelines,
            max_batch_size=batch_size,
            max_batch_tokens=max(512, PROMPT_TOKENS * batch_size),
        ) as plane,
        client_of(plane, options) as client,
    ):
        for _ in range(options.rounds):
            async with Samples.of(plane) as samples:
                await asyncio.gather(*(send_in_turn(client, stream) for stream in streams))
            rounds.append(samples.between(2 * n_streams, n_tokens - 2 * n_streams))
    return report_streams(options, n_streams, rounds)


async def measure_scheduler(options: argparse.Namespace, n_streams: int) -> dict[str, Any]:
    """Runs `n_streams` streams from one process in place of frontends and clients, and measures
    processor time in several rounds. Returns the table of the best rounds."""
    batch_size = -(-n_streams // options.pipelines)
    async with (
        plane_of_streams(
            n_streams,
            options.answer_tokens,
            n_frontends=options.frontends,
            compute_ms=1e3 * iteration_s(options, n_streams),
            n_pipelines=options.pipelines,
            max_batch_size=batch_size,
            max_batch_tokens=max(512, PROMPT_TOKENS * batch_size),
        ) as plane,
        Samples.of(plane) as samples,
    ):
        await samples.has_begun(2 * n_streams)
        await asyncio.sleep(WARM_UP_S)
        ends = [samples.newest]
        for _ in range(options.rounds):
            await asyncio.sleep(options.window_s)
            ends.append(samples.newest)
    return report_streams(options, n_streams, list(itertools.pairwise(ends)))


def iteration_s(options: argparse.Namespace, n_streams: int) -> float:
    """Returns the seconds of an iteration in which `n_streams` streams get a token each."""
    if options.iteration_ms is not None:
        return float(options.slowdown * options.iteration_ms / 1e3)
    return max(MIN_ITERATION_S, n_streams / float(options.tokens_per_s))


def report_streams(
    options: argparse.Namespace, n_streams: int, rounds: list[tuple["Sample", "Sample"]]
) -> dict[str, Any]:
    """Prints and returns the table of `n_streams` streams. A round is the time between two
    samples."""
    title = f"{n_streams} streams"
    if options.pipelines > 1:
        title += f" on {options.pipelines} pipelines"
    if options.frontends:
        title += f", frontends without clients: {options.frontends}"
    n_iterations = sum(last.n_iterations - first.n_iterations for first, last in rounds)
    n_tokens = [last.n_tokens - first.n_tokens for first, last in rounds]
    title += f", {sum(n_tokens) / n_iterations:.1f} tokens per iteration"
    full_rate = None
    if options.iteration_ms is not None:
        full_rate = 1e3 * n_streams / options.iteration_ms
    return report(
        title,
        [
            {name: now.since(first.used[name]) for name, now in last.used.items()}
            for first, last in rounds
        ],
        n_tokens,
        [last.time_s - first.time_s for first, last in rounds],
        full_rate=full_rate,
    )


def requests_of(
    options: argparse.Namespace, index: int, n_tokens: int
) -> list[workload.PlannedRequest]:
    """Returns the requests of the stream number `index`, in order. Their answers have `n_tokens`
    tokens in all."""
    generator = np.random.default_rng([options.seed, index])
    low, high = options.answer_tokens
    requests = []
    while n_tokens > 0:
        n_output = n_tokens
        if not options.endless:
            n_output = min(n_tokens, int(generator.integers(low, high, endpoint=True)))
        prompt = generator.integers(0, VOCAB_SIZE, PROMPT_TOKENS).tolist()
        requests.append(workload.PlannedRequest(0.0, tuple(prompt), n_output))
        n_tokens -= n_output
    return requests


async def send_in_turn(client: load.Client, requests: list[workload.PlannedRequest]) -> None:
    """Sends the requests one after the other, each when the previous answer is complete. Raises
    RuntimeError if a request fails or an answer has a wrong number of tokens."""
    calls = [client.prepare(request) for request in requests]
    for call in calls:
        await call.send()
    for call, request in zip(calls, requests, strict=True):
        reply = call.read()
        if reply.error is not None or reply.n_output != request.n_output:
            raise RuntimeError(f"{reply.n_output} of {request.n_output} tokens: {reply.error}")


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of a control plane at one point in time: the tokens generated and the iterations
    selected so far, and the processor time used so far by each kind of process."""

    time_s: float
    n_tokens: int
    n_iterations: int
    used: dict[str, Used]


class Samples:
    """Measurements of a control plane, taken every `SAMPLE_S` seconds while a load runs."""

    def __init__(self, plane: Processes) -> None:
        self._plane = plane
        self._taken: list[Sample] = []
        self._has_news = asyncio.Condition()

    @property
    def newest(self) -> Sample:
        """The last sample. At least one must have been taken."""
        return self._taken[-1]

    async def has_begun(self, n_tokens: int) -> None:
        """Waits for a sample that was taken after more than `n_tokens` tokens. Raises TimeoutError
        if there is none after `START_S` seconds."""
        async with asyncio.timeout(START_S), self._has_news:
            await self._has_news.wait_for(
                lambda: bool(self._taken) and self.newest.n_tokens > n_tokens
            )

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, plane: Processes) -> AsyncIterator[Self]:
        """Yields the samples of a plane, and takes samples until the context ends."""
        samples = cls(plane)
        taking = asyncio.create_task(samples._take())
        try:
            yield samples
        finally:
            taking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await taking

    def between(self, n_first: int, n_last: int) -> tuple[Sample, Sample]:
        """Returns the first sample after more than `n_first` tokens, and the last sample before
        `n_last` tokens. Tokens are counted from the first sample of all. Raises RuntimeError if
        there are fewer than two such samples."""
        n_before = self._taken[0].n_tokens
        inside = [each for each in self._taken if n_first < each.n_tokens - n_before < n_last]
        if len(inside) < 2:
            raise RuntimeError("the streams were too short to take samples of them")
        return inside[0], inside[-1]

    async def _take(self) -> None:
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            while True:
                metrics = await client.get(self._plane.metrics)
                n_tokens, n_iterations = (
                    0 if (found := pattern.search(metrics.text)) is None else int(float(found[1]))
                    for pattern in (GENERATED, ITERATIONS)
                )
                now = time.perf_counter()
                async with self._has_news:
                    self._taken.append(Sample(now, n_tokens, n_iterations, self._plane.used()))
                    self._has_news.notify_all()
                await asyncio.sleep(SAMPLE_S)


def _check(done: list[RequestRecord]) -> None:
    if failed := [record.error for record in done if record.error is not None]:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")


def report(
    title: str,
    rounds: list[dict[str, Used]],
    n_tokens: list[int],
    elapsed_s: list[float],
    *,
    full_rate: float | None = None,
) -> dict[str, Any]:
    """Prints and returns a table with the best round of each kind of process. If `full_rate` is
    given, in tokens per second, the table also has the number of cores that each process needs at
    this rate."""
    rate = max(n / seconds for n, seconds in zip(n_tokens, elapsed_s, strict=True))
    print(f"{title}, {n_tokens[0]} tokens, {rate:.0f} tokens/s")
    cores = "" if full_rate is None else f" {f'cores at {full_rate:.0f}/s':>18}"
    print(
        f"{'process':>12} {'us per token':>13} {'in the kernel':>14} {'sleeps':>7}{cores}   "
        f"best of {len(rounds)} rounds"
    )
    table: dict[str, Any] = {"title": title, "tokens_per_s": round(rate)}
    for name in rounds[0]:
        costs = [
            (1e6 * used[name].cpu_s / n, 1e6 * used[name].kernel_s / n, used[name].n_sleeps / n)
            for used, n in zip(rounds, n_tokens, strict=True)
        ]
        us, kernel_us, sleeps = min(costs)
        table[name] = {"us": round(us, 1), "kernel_us": round(kernel_us, 1)}
        cores = ""
        if full_rate is not None:
            table[name]["cores"] = round(us * full_rate / 1e6, 3)
            cores = f" {table[name]['cores']:>18.2f}"
        print(f"{name:>12} {us:>13.1f} {kernel_us:>14.1f} {sleeps:>7.2f}{cores}")
    return table


async def measure(options: argparse.Namespace) -> None:
    """Runs the measurements of the options, and writes a record if `--json` is given."""
    if options.streams and options.frontends:
        tables = [await measure_scheduler(options, n_streams) for n_streams in options.streams]
    elif options.streams:
        tables = [await measure_streams(options, n_streams) for n_streams in options.streams]
    else:
        tables = [await measure_trace(options)]
    if options.json is not None:
        options.json.write_text(json.dumps({**machine.describe(), "tables": tables}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="models/demo", help="whose tokenizer is used")
    parser.add_argument("--compute-ms", type=float, default=25.0, help="of each iteration")
    parser.add_argument("--max-batch-size", type=int, default=64)
    parser.add_argument("--rate", type=float, help="requests a second (default: all at once)")
    parser.add_argument("--over-grpc", action="store_true", help="clients speak gRPC")
    parser.add_argument("--show-tokens", action="store_true", help="HTTP clients want token ids")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record")
    group = parser.add_argument_group("streams side by side, instead of a workload")
    group.add_argument("--streams", type=int, nargs="+", metavar="N")
    group.add_argument("--pipelines", type=int, default=1, metavar="N")
    group.add_argument("--tokens-per-s", type=float, default=10_000.0)
    group.add_argument("--iteration-ms", type=float, help="instead of a number of tokens")
    group.add_argument("--slowdown", type=float, default=1.0, help="factor of iterations' times")
    group.add_argument("--answer-tokens", type=int, nargs=2, default=(64, 192), metavar=("A", "B"))
    group.add_argument("--endless", action="store_true", help="one answer in each stream")
    group.add_argument("--frontends", type=int, metavar="N", help="without clients, in one process")
    group.add_argument("--window-s", type=float, default=8.0, help="seconds of each round")
    workload.add_options(parser)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
