"""Compares the tuner's choice with all settings of a grid, each of which is run.

    python -m benchmarks.serving.tuner            about an hour and a half on two cores
    python -m benchmarks.serving.tuner --shapes llama-125m --sizes 32 128 --tokens 512 2048
                                                  ten minutes
    python -m benchmarks.serving.tuner --quick    a test run; its numbers mean little
    python -m benchmarks.serving.tuner --shapes llama-125m --rate 4 --ttft-p99-s 1 \\
        --tpot-p99-s 0.08 --out … --figure …      with a rate of arrivals and latency limits
    python -m benchmarks.serving.tuner --machines processor accelerator "large model" \\
        --out … --figure …                        ranks that sleep, with the costs of known machines

For each shape of a model, `python -m services.tune` finds settings on its own workload. Then every
combination of layout, batch size and batch tokens serves requests over HTTP whose lengths and
tokens the tuner has not seen. Either all requests arrive at once and output tokens per second are
measured, or requests arrive at a rate and the requests per second within the latency limits are
measured.

The best settings of the grid, the tuner's choice, the defaults and the settings by hand are then
run again in turns, in alternating order. A machine that is slower for some minutes slows down a
whole turn, so ratios are computed within each turn and their median counts. Running the best
settings again also prevents that one lucky run of the grid counts as the best. Ranks that sleep
(`services/arena/sleeping`) have exact times, whatever else runs on the machine.
"""

import argparse
import asyncio
import json
import math
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import uvloop

from benchmarks import local_system, machine, make_model, workload
from benchmarks.machine import ROOT
from benchmarks.plots import Ranking, draw_rankings
from benchmarks.records import RequestRecord, RunRecord
from benchmarks.serving.openai_client import OpenAIClient
from benchmarks.serving.serve import measure, warm_up
from services.arena.sleeping.machine_here import VARIABLE
from services.common.cpus import usable_cpus
from services.tune.layout import Layout, layouts
from simulator.machines import MACHINES
from simulator.outcome import LatencyLimits, RequestTimes

RESULTS = ROOT / "benchmarks" / "results" / "tuner.json"
FIGURE = ROOT / "docs" / "images" / "tuner.png"
SHAPES = ("llama-125m", "llama-350m", "mixtral-8x20m")
DEFAULTS, BY_HAND = (32, 512), (64, 512)
"""(Batch size, batch tokens) of the default settings, and of the settings by hand, which other
benchmarks use."""
TUNER_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Point:
    """Settings with which a system is run: the layout, and the limits of a batch in requests and
    tokens."""

    layout: Layout
    max_batch_size: int
    max_batch_tokens: int

    def __str__(self) -> str:
        return f"{self.layout}, {self.max_batch_size} requests, {self.max_batch_tokens} tokens"

    def arguments(self) -> list[str]:
        """Returns these settings as options of `services.local`."""
        return [
            f"--stages={self.layout.stages}",
            f"--tp={self.layout.tp}",
            f"--threads={self.layout.threads}",
            f"--max-batch-size={self.max_batch_size}",
            f"--max-batch-tokens={self.max_batch_tokens}",
        ]


@dataclass(frozen=True, slots=True)
class Subject:
    """A checkpoint, or a simulated machine whose ranks sleep, for which the tuner finds
    settings."""

    name: str
    model: Path
    tuner_module: str = "services.tune"
    local_module: str = "services.local"

    @classmethod
    def sleeping(cls, machine_name: str) -> Self:
        """Returns a subject for a machine of `simulator.machines`. Sets the machine in the
        environment, so that all processes that are started later use this machine."""
        os.environ[VARIABLE] = machine_name
        return cls(
            machine_name,
            ROOT / "models" / "demo",
            tuner_module="benchmarks.serving.sleeping.tuner",
            local_module="benchmarks.serving.sleeping.local",
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """The tuner's choice: the settings, the K/V memory in bytes, and the seconds that the search
    took."""

    point: Point
    kv_memory: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Goal:
    """The quantity that settings should maximise: requests per second within the latency limits if
    there are limits, otherwise output tokens per second. If `rate` is None, all requests arrive at
    once."""

    rate: float | None
    limits: LatencyLimits

    @classmethod
    def of(cls, options: argparse.Namespace) -> Self:
        """Returns the goal that the command line describes."""
        return cls(options.rate, LatencyLimits(options.ttft_p99_s, options.tpot_p99_s))

    @property
    def unit(self) -> str:
        """Unit of the quantity to maximise, as text."""
        return "requests/s in the limits" if self.limits.are_set else "output tokens/s"

    def arguments(self) -> list[str]:
        """Returns this goal as options of `services.tune`."""
        values = {
            "rate": self.rate,
            "ttft-p99-s": self.limits.ttft_s,
            "tpot-p99-s": self.limits.tpot_s,
        }
        return [f"--{name}={value}" for name, value in values.items() if value is not None]

    def arrivals(self, n_requests: int, *, seed: int) -> Sequence[float]:
        """Returns the arrival times of requests, in seconds."""
        if self.rate is None:
            return workload.all_at_once(n_requests)
        return workload.poisson_arrivals(n_requests, rate=self.rate, seed=seed)

    def value_of(self, run: RunRecord) -> float:
        """Returns the value that a run reached. With latency limits, the number of requests within
        the limits is divided by the time of the last arrival, so that the duration of the last
        request does not count. If all requests arrived at once, it is divided by the duration of
        the run."""
        if not self.limits.are_set:
            return run.summary().output_tokens_per_s
        kept = sum(self.limits.keeps(_times_of(request)) for request in run.requests)
        last_s = max(request.arrival_s for request in run.requests)
        return kept / last_s if last_s else kept / run.summary().duration_s


def _times_of(request: RequestRecord) -> RequestTimes:
    first_s = request.time_to_first_token_s or request.latency_s
    return RequestTimes(
        arrival_s=0.0, first_token_s=first_s, end_s=request.latency_s, n_output=request.n_output
    )


async def tune(subject: Subject, options: argparse.Namespace) -> Choice:
    """Runs the tuner for a subject and returns its choice.

    Raises:
        RuntimeError: the tuner failed; standard error has the reason.
    """
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            subject.tuner_module,
            f"--model={subject.model}",
            f"--requests={options.requests}",
            f"--seed={options.seed}",
            f"--budget-s={options.budget_s}",
            f"--out={out}",
            *Goal.of(options).arguments(),
            cwd=ROOT,
        )
        try:
            async with asyncio.timeout(TUNER_TIMEOUT_S):
                status = await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
        if status:
            raise RuntimeError(f"the tuner ended with status {status}")
        text = (Path(out) / "local.env").read_text()
    seconds = time.monotonic() - began_s
    lines = [shlex.split(line)[0] for line in text.splitlines() if not line.startswith("#")]
    found = dict(line.removeprefix("ORCINUS_").split("=", 1) for line in lines)
    return Choice(
        Point(
            Layout(int(found["STAGES"]), int(found["TP"]), int(found["THREADS"])),
            int(found["MAX_BATCH_SIZE"]),
            int(found["MAX_BATCH_TOKENS"]),
        ),
        int(found["KV_MEMORY"]),
        seconds,
    )


async def serve(
    subject: Subject, point: Point, options: argparse.Namespace, *, kv_memory: int, seed: int
) -> float:
    """Starts a system with the settings `point`, sends it requests, and returns the value of the
    goal that the system reaches.

    Raises:
        RuntimeError: a request failed, or the system does not start.
    """
    vocab_size = int(json.loads((subject.model / "config.json").read_text())["vocab_size"])
    goal = Goal.of(options)
    requests = workload.plan(
        workload.mixed_lengths(options.requests, seed=seed),
        goal.arrivals(options.requests, seed=seed),
        vocab_size=vocab_size,
        seed=seed,
    )
    arguments = [f"--model={subject.model}", f"--kv-memory={kv_memory}", *point.arguments()]
    async with local_system.running(arguments, module=subject.local_module) as system:
        client = OpenAIClient(system.http, model=system.model)
        await warm_up(client, workload.rehearsal(requests, n_requests=8, n_output=4))
        run = await measure(client, requests, meta={}, engine=system.pid, title=str(point))
    summary = run.summary()
    if summary.n_failed:
        raise RuntimeError(f"{point}: {summary.n_failed} requests failed")
    return goal.value_of(run)


async def compare(subject: Subject, options: argparse.Namespace) -> dict[str, Any]:
    """Compares the tuner's choice with the grid for one subject. Prints the values of all settings
    and returns the record."""
    name = subject.name
    unit = Goal.of(options).unit
    choice = await tune(subject, options)
    print(f"{name}: the tuner chose {choice.point} in {choice.seconds:.0f} s", flush=True)
    config = json.loads((subject.model / "config.json").read_text())
    found = layouts(
        usable_cpus(),
        max_ranks=options.max_ranks,
        n_layers=config["num_hidden_layers"],
        n_kv_heads=config["num_key_value_heads"],
    )
    grid: dict[Point, float] = {}
    for layout in found[: options.layouts]:
        for size in options.sizes:
            for tokens in options.tokens:
                if size > tokens:
                    continue
                point = Point(layout, size, tokens)
                grid[point] = await serve(
                    subject, point, options, kv_memory=options.kv_memory, seed=options.seed + 1
                )
                print(f"{name}: {grid[point]:>8.2f} {unit}  {point}", flush=True)
    best = max(grid, key=lambda point: grid[point])
    whole = found[0]
    named = {
        "best of the grid": best,
        "tuner": choice.point,
        "defaults": Point(whole, *DEFAULTS),
        "by hand": Point(whole, *BY_HAND),
    }
    again: dict[str, list[float]] = {of: [] for of in named}
    for turn in range(options.repeats):
        for of, point in list(named.items())[:: -1 if turn % 2 else 1]:
            kv_memory = choice.kv_memory if of == "tuner" else options.kv_memory
            value = await serve(
                subject, point, options, kv_memory=kv_memory, seed=options.seed + 2 + turn
            )
            again[of].append(value)
            print(f"{name}: {value:>8.2f} {unit}  {of}: {point}", flush=True)
    for of in named:
        if of != "tuner":
            ratio = ratio_of(again["tuner"], again[of])
            print(f"{name}: the tuner's choice is {ratio:.3f} x {of}", flush=True)
    return {
        "shape": name,
        "tuner_s": round(choice.seconds, 1),
        "grid": {str(point): round(value, 2) for point, value in grid.items()},
        "points": {of: str(point) for of, point in named.items()},
        "again": {of: [round(value, 2) for value in values] for of, values in again.items()},
    }


def ratio_of(values: Sequence[float], others: Sequence[float]) -> float:
    """Returns the median, over all turns, of the value in `values` divided by the value in `others`
    of the same turn. A ratio to 0 counts as infinite, or as 1 if both values are 0."""
    return statistics.median(
        mine / other if other else (math.inf if mine else 1.0)
        for mine, other in zip(values, others, strict=True)
    )


def ranking_of(record: dict[str, Any]) -> Ranking:
    """Returns the values in the record of one subject, for the plot."""
    return Ranking(
        sorted(record["grid"].values()),
        {of: statistics.median(values) for of, values in record["again"].items()},
    )


async def run(options: argparse.Namespace) -> None:
    """Runs the comparison for all shapes or machines, and writes the record and the figure."""
    shapes = []
    for name in options.machines or options.shapes:
        with tempfile.TemporaryDirectory() as directory:
            if options.machines:
                subject = Subject.sleeping(name)
            else:
                subject = Subject(name, Path(directory) / name)
                make_model.write_model(subject.model, make_model.SHAPES[name])
            shapes.append(await compare(subject, options))
        meta = {
            **machine.describe(),
            "requests": options.requests,
            "seed": options.seed,
            "rate": options.rate,
            "ttft_p99_s": options.ttft_p99_s,
            "tpot_p99_s": options.tpot_p99_s,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"meta": meta, "shapes": shapes}, indent=1) + "\n")
    draw_rankings(
        options.figure,
        {record["shape"]: ranking_of(record) for record in shapes},
        title=f"every setting of the grid, {Goal.of(options).unit}",
    )
    print(f"wrote {options.out} and {options.figure}")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.tuner",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shapes", nargs="+", choices=make_model.SHAPES, default=list(SHAPES))
    parser.add_argument(
        "--machines", nargs="+", choices=MACHINES, help="whose ranks sleep, instead of shapes"
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 32, 128], metavar="N")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 2048], metavar="N")
    parser.add_argument("--layouts", type=int, default=8, help="the first so many of the tuner's")
    parser.add_argument("--max-ranks", type=int, default=8)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rate", type=float, help="requests a second; all come at once without")
    parser.add_argument("--ttft-p99-s", type=float, help="limit for first tokens")
    parser.add_argument("--tpot-p99-s", type=float, help="limit for each token after them")
    parser.add_argument("--repeats", type=int, default=3, help="of what is compared in the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget-s", type=float, default=170.0, help="of the tuner")
    parser.add_argument(
        "--kv-memory", type=int, default=2**31, help="bytes for each rank, of the grid"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--figure", type=Path, default=FIGURE)
    parser.add_argument("--quick", action="store_true", help="a tiny model, and a grid of two")
    options = parser.parse_args(arguments)
    has_limits = options.ttft_p99_s is not None or options.tpot_p99_s is not None
    if (options.rate is not None) != has_limits:
        parser.error("--rate and limits of latency belong together")
    if options.quick:
        options.shapes, options.sizes, options.tokens = ["llama-tiny"], [8, 32], [512]
        options.layouts, options.repeats, options.requests = 1, 1, 16
        options.budget_s = 40.0
    return options


def main() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(parse(sys.argv[1:])))


if __name__ == "__main__":
    main()
