"""Figure 10 of the paper with a small model: the effect of each idea of Orca, on equal traces.

    python -m benchmarks.paper.iteration_level           about ten minutes on two cores
    python -m benchmarks.paper.iteration_level --quick   a test run; its numbers mean little

The program starts a complete local system for each variant in turn. It runs the same Poisson traces
of the paper's mixed requests on each, slow traces first, until the median normalised latency
(end-to-end latency per output token) is far too high. Then it prints the number of requests per
second that each variant serves at equal latency, interpolated on its curve, and the gain of each
step of the ladder:

    request level    a batch runs until its longest answer is complete      (baseline)
    padded           iteration level, all requests padded to the longest    (Orca, section 3.1)
    selective        iteration level, selective batching: Algorithm 1               (3.2, 4.2)
    overlapped       the next batch is sent before the previous batch has returned
    chunked          an iteration has a limited number of tokens; long prompts are divided

A further variant, `microbatch`, is the baseline that divides its batch for the pipeline, as
FasterTransformer does. Both baselines are faster than FasterTransformer's request-level scheduling,
because requests that have ended are no longer computed.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import local_system, machine, make_model, records, workload
from benchmarks.machine import ROOT
from benchmarks.plots import Point, draw_latency
from benchmarks.records import RunRecord
from benchmarks.serving.openai_client import OpenAIClient
from benchmarks.serving.serve import COLUMNS, measure, point, row, warm_up

RESULTS = ROOT / "benchmarks" / "results" / "iteration_level.json"
FIGURE = ROOT / "docs" / "images" / "iteration_level.png"
BASELINES = "benchmarks.paper.baselines"


@dataclass(frozen=True, slots=True)
class Variant:
    """A configuration of the system. In the arguments, `{stages}` stands for the number of stages,
    and `{one_more}` for this number plus one."""

    arguments: tuple[str, ...]
    module: str = "services.local"


LADDER = {
    "request level": Variant(("--baseline=request_level", "--pipeline-depth={stages}"), BASELINES),
    "padded": Variant(
        ("--baseline=padded", "--policy=orca", "--pipeline-depth={stages}"), BASELINES
    ),
    "selective": Variant(("--policy=orca", "--pipeline-depth={stages}")),
    "overlapped": Variant(("--policy=orca", "--pipeline-depth={one_more}")),
    "chunked": Variant(("--policy=chunked", "--pipeline-depth={one_more}")),
}
"""The variants of the ladder by name. Each has all features of the variant before it, and one
more."""

BESIDE = {
    "microbatch": Variant(
        ("--baseline=microbatch", "--microbatch-size=8", "--pipeline-depth={stages}"), BASELINES
    )
}
VARIANTS = {**LADDER, **BESIDE}


def throughput_at(points: Sequence[Point], level_s: float) -> float | None:
    """Returns the throughput, in requests per second, at which the median normalised latency
    reaches `level_s`.

    Points are in the order of their rates. Between two points, throughput is taken as linear in the
    logarithm of latency. Returns None if the first point is above the level. If the curve ends
    below the level, returns the throughput of the last point, which is a lower bound.
    """
    if not points or points[0].median_s > level_s:
        return None
    for low, high in itertools.pairwise(points):
        if high.median_s > level_s:
            share = math.log(level_s / low.median_s) / math.log(high.median_s / low.median_s)
            return low.requests_per_s + share * (high.requests_per_s - low.requests_per_s)
    return points[-1].requests_per_s


def compare(curves: Mapping[str, Sequence[Point]], level_s: float) -> list[str]:
    """Returns the lines of a table: for each variant, the throughput at the latency `level_s` and
    its ratio to the first variant of the ladder. For variants of the ladder, the table also has the
    ratio to the variant before, and the share of this step in the logarithm of the total gain."""
    found = {name: throughput_at(points, level_s) for name, points in curves.items()}
    rates = {name: rate for name, rate in found.items() if rate is not None}
    steps = [name for name in LADDER if name in rates]
    lines = [
        f"at {1e3 * level_s:.0f} ms/token: "
        f"{'variant':>14} {'req/s':>7} {'ratio':>7} {'step':>7} {'share':>7}"
    ]
    indent = " " * (len(lines[0]) - 46)
    for name in curves:
        if name not in rates:
            lines.append(f"{indent} {name:>14}  never that fast")
            continue
        line = f"{indent} {name:>14} {rates[name]:>7.2f}"
        if steps:
            line += f" {rates[name] / rates[steps[0]]:>7.2f}"
        if name in steps[1:]:
            step = rates[name] / rates[steps[steps.index(name) - 1]]
            total = math.log(rates[steps[-1]] / rates[steps[0]])
            line += f" {step:>7.2f} {_share(math.log(step), total):>7}"
        lines.append(line)
    return lines


def _share(part: float, total: float) -> str:
    return f"{100 * part / total:.0f} %" if total else "-"


async def measure_variant(
    name: str, model: Path, options: argparse.Namespace, *, meta: Mapping[str, Any]
) -> list[RunRecord]:
    """Runs one variant at increasing rates, until a run has too high a latency. Returns all runs,
    slowest rate first."""
    variant = VARIANTS[name]
    arguments = [
        f"--model={model}",
        f"--max-batch-size={options.max_batch_size}",
        f"--stages={options.stages}",
        "--scheduler=admission=reserve",  # as in the paper
        *(
            argument.format(stages=options.stages, one_more=options.stages + 1)
            for argument in variant.arguments
        ),
    ]
    if options.threads is not None:
        arguments.append(f"--threads={options.threads}")
    runs: list[RunRecord] = []
    vocab_size = vocab_size_of(model)
    async with local_system.running(arguments, module=variant.module) as system:
        client = OpenAIClient(system.http, model=system.model)
        requests = workload.from_options(options, rate=None, vocab_size=vocab_size)
        await warm_up(client, workload.rehearsal(requests, n_requests=16, n_output=4))
        for index, rate in enumerate(options.rates):
            run = await measure(
                client,
                workload.from_options(options, rate=rate, vocab_size=vocab_size, run=index),
                meta={**meta, "variant": name, "arguments": arguments[1:], "rate": rate},
                engine=system.pid,
                title=f"{name}, {rate:g} requests/s",
            )
            runs.append(without_token_times(run))
            print(f"{name:>14} {row(rate, run, bound_s=options.bound_s)}", flush=True)
            if is_unreasonable(runs, options.stop_at):
                break
    return runs


def is_unreasonable(runs: Sequence[RunRecord], factor: float) -> bool:
    """Returns whether the median normalised latency of the last run is more than `factor` times the
    one of the first run."""
    points = [found for run in runs if (found := point(run)) is not None]
    return len(points) > 1 and points[-1].median_s > factor * points[0].median_s


def without_token_times(run: RunRecord) -> RunRecord:
    """Returns the record without the times of single tokens, which makes it a tenth as large."""
    return RunRecord(
        run.meta, tuple(dataclasses.replace(each, token_times_s=()) for each in run.requests)
    )


@contextlib.contextmanager
def model_of(options: argparse.Namespace) -> Iterator[Path]:
    """Yields the checkpoint that the options name, or else a temporary checkpoint of random
    weights."""
    if options.model is not None:
        yield options.model
        return
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / options.shape
        make_model.write_model(model, make_model.SHAPES[options.shape])
        yield model


async def run(options: argparse.Namespace) -> None:
    """Runs all variants; prints the tables and draws the figure."""
    meta = {**machine.describe(), "seed": options.seed, "requests": options.requests}
    runs: dict[str, list[RunRecord]] = {}
    print(f"{'':>14} {COLUMNS}")
    with model_of(options) as model:
        for name in options.variants:
            runs[name] = await measure_variant(name, model, options, meta=meta)
    records.write(options.out, [each for of_one in runs.values() for each in of_one])
    curves = {
        name: [found for each in of_one if (found := point(each)) is not None]
        for name, of_one in runs.items()
    }
    lowest_s = min(points[0].median_s for points in curves.values() if points)
    for level_s in (2 * lowest_s, options.bound_s):
        print("\n" + "\n".join(compare(curves, level_s)))
    draw_latency(
        options.figure,
        curves,
        title=f"{options.requests} requests of the mixed trace at each rate",
        bound_s=options.bound_s,
    )
    print(f"\nwrote {options.out} and {options.figure}")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper.iteration_level",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, help="a checkpoint (default: random weights)")
    parser.add_argument("--shape", choices=make_model.SHAPES, default="llama-125m")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 2.0, 3.0, 4.0, 6.0, 8.0])
    parser.add_argument("--max-batch-size", type=int, default=32)
    parser.add_argument("--stages", type=int, default=1, help="of the pipeline")
    parser.add_argument("--threads", type=int, help="of a rank (default: all cores, shared)")
    parser.add_argument(
        "--bound-s", type=float, default=0.1, help="seconds per token to compare at"
    )
    parser.add_argument(
        "--stop-at",
        type=float,
        default=8.0,
        metavar="X",
        help="end a variant when its latency is X times that of its slowest trace",
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--figure", type=Path, default=FIGURE)
    parser.add_argument("--quick", action="store_true", help="a tiny model and two short traces")
    workload.add_options(parser)
    parser.set_defaults(requests=32)
    options = parser.parse_args(arguments)
    if options.quick:
        options.shape, options.rates, options.requests = "llama-tiny", [20.0, 60.0], 8
    return options


def vocab_size_of(model: Path) -> int:
    """Returns the number of tokens in the vocabulary of a checkpoint."""
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def main() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(parse(sys.argv[1:])))


if __name__ == "__main__":
    main()
