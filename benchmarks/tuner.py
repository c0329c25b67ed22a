"""The tuner's choice against every setting of a grid, each of which is run.

    python -m benchmarks.tuner                                about an hour and a half on two cores
    python -m benchmarks.tuner --shapes llama-125m --sizes 32 128 --tokens 512 2048    ten minutes
    python -m benchmarks.tuner --quick                        whether it runs

For each shape of a model `python -m services.tune` finds its settings on a workload of its own.
Then every layout with every batch size and every number of batch tokens serves requests of other
lengths and tokens, which the tuner has not seen, over HTTP as a user's would come. Those that count
are then run again, in turns: the best of the grid, the tuner's choice, the defaults, and settings
by hand. Ratios are of the medians of these later runs, so that the best of the grid is not just the
luckiest.
"""

import argparse
import asyncio
import dataclasses
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import local_system, machine, make_model, workload
from benchmarks.openai_client import OpenAIClient
from benchmarks.plots import Ranking, draw_rankings
from benchmarks.serve import measure, warm_up
from services.common.cpus import usable_cpus
from services.tune.layout import Layout, layouts

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "tuner.json"
FIGURE = ROOT / "docs" / "images" / "tuner.png"
SHAPES = ("llama-125m", "llama-350m", "mixtral-8x20m")
DEFAULTS, BY_HAND = (32, 512), (64, 512)
"""Batch size and batch tokens: those of the settings, and those of other benchmarks here."""
TUNER_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Point:
    """Settings that are run."""

    layout: Layout
    max_batch_size: int
    max_batch_tokens: int

    def __str__(self) -> str:
        return f"{self.layout}, {self.max_batch_size} requests, {self.max_batch_tokens} tokens"

    def arguments(self) -> list[str]:
        """Returns the options of `services.local`."""
        return [
            f"--stages={self.layout.stages}",
            f"--tp={self.layout.tp}",
            f"--threads={self.layout.threads}",
            f"--max-batch-size={self.max_batch_size}",
            f"--max-batch-tokens={self.max_batch_tokens}",
        ]


@dataclass(frozen=True, slots=True)
class Choice:
    """The tuner's choice, the memory that goes with it, and the time that it took."""

    point: Point
    kv_memory: int
    seconds: float


async def tune(model: Path, options: argparse.Namespace) -> Choice:
    """Returns what the tuner chooses for a model.

    Raises:
        RuntimeError: it failed, and has said why on standard error.
    """
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.tune",
            f"--model={model}",
            f"--requests={options.requests}",
            f"--seed={options.seed}",
            f"--budget-s={options.budget_s}",
            f"--out={out}",
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


async def throughput(
    model: Path, point: Point, options: argparse.Namespace, *, kv_memory: int, seed: int
) -> float:
    """Returns the output tokens a second with which a system serves requests that come at once.

    Raises:
        RuntimeError: a request failed, or the system does not start.
    """
    vocab_size = int(json.loads((model / "config.json").read_text())["vocab_size"])
    requests = workload.plan(
        workload.mixed_lengths(options.requests, seed=seed),
        workload.all_at_once(options.requests),
        vocab_size=vocab_size,
        seed=seed,
    )
    arguments = [f"--model={model}", f"--kv-memory={kv_memory}", *point.arguments()]
    async with local_system.running(arguments) as system:
        client = OpenAIClient(system.http, model=system.model)
        # Backwards, since the prefix cache must not have what is measured.
        first = [
            dataclasses.replace(each, n_output=4, prompt_token_ids=each.prompt_token_ids[::-1])
            for each in requests[:8]
        ]
        await warm_up(client, first)
        run = await measure(client, requests, meta={}, engine=system.pid, title=str(point))
    summary = run.summary()
    if summary.n_failed:
        raise RuntimeError(f"{point}: {summary.n_failed} requests failed")
    return summary.output_tokens_per_s


async def compare(name: str, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the record of one shape, after telling it."""
    choice = await tune(model, options)
    print(f"{name}: the tuner chose {choice.point} in {choice.seconds:.0f} s", flush=True)
    config = json.loads((model / "config.json").read_text())
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
                grid[point] = await throughput(
                    model, point, options, kv_memory=options.kv_memory, seed=options.seed + 1
                )
                print(f"{name}: {grid[point]:>8.1f} tokens/s  {point}", flush=True)
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
        for of, point in named.items():
            kv_memory = choice.kv_memory if of == "tuner" else options.kv_memory
            value = await throughput(
                model, point, options, kv_memory=kv_memory, seed=options.seed + 2 + turn
            )
            again[of].append(value)
            print(f"{name}: {value:>8.1f} tokens/s  {of}: {point}", flush=True)
    medians = {of: statistics.median(values) for of, values in again.items()}
    for of in named:
        if of != "tuner":
            print(f"{name}: the tuner's choice is {medians['tuner'] / medians[of]:.3f} x {of}")
    return {
        "shape": name,
        "tuner_s": round(choice.seconds, 1),
        "grid": {str(point): round(value, 2) for point, value in grid.items()},
        "points": {of: str(point) for of, point in named.items()},
        "again": {of: [round(value, 2) for value in values] for of, values in again.items()},
    }


def ranking_of(record: dict[str, Any]) -> Ranking:
    """Returns a shape's runs as they are drawn."""
    return Ranking(
        sorted(record["grid"].values()),
        {of: statistics.median(values) for of, values in record["again"].items()},
    )


async def run(options: argparse.Namespace) -> None:
    """Compares for all shapes, and writes the record and the figure."""
    shapes = []
    for name in options.shapes:
        with tempfile.TemporaryDirectory() as directory:
            model = Path(directory) / name
            make_model.write_model(model, make_model.SHAPES[name])
            shapes.append(await compare(name, model, options))
        meta = {**machine.describe(), "requests": options.requests, "seed": options.seed}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"meta": meta, "shapes": shapes}, indent=1) + "\n")
    draw_rankings(
        options.figure,
        {record["shape"]: ranking_of(record) for record in shapes},
        title=f"{options.requests} requests at once: every setting of the grid",
    )
    print(f"wrote {options.out} and {options.figure}")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tuner",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shapes", nargs="+", choices=make_model.SHAPES, default=list(SHAPES))
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 32, 128], metavar="N")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 2048], metavar="N")
    parser.add_argument("--layouts", type=int, default=8, help="the first so many of the tuner's")
    parser.add_argument("--max-ranks", type=int, default=8)
    parser.add_argument("--requests", type=int, default=64)
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
