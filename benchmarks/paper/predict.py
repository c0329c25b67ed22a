"""Compares the simulator's predictions with measurements of a running system.

    python -m benchmarks.make_model /tmp/llama-125m
    python -m benchmarks.paper.predict /tmp/llama-125m               25 minutes on two cores
    python -m benchmarks.paper.predict /tmp/llama-125m --pipelines 2 --stages 1 --policies chunked \
      --out benchmarks/results/predict_pipelines.json --figure docs/images/predict_pipelines.png
    python -m benchmarks.paper.predict models/demo --rates 0.5 --calibration-s 5 --run-s 5   a test

The second command takes 7 minutes. For each number of pipelines and stages and each policy, the
program starts a system and measures the costs of iterations with a load of a minute. From these
costs alone, the simulator with this project's scheduler predicts the results for Poisson arrivals
with the paper's lengths (section 6.2), at several shares of the highest rate. Then the program
sends the same requests to the system over HTTP, as `benchmarks.serving.serve` does.

`model` is the prediction made before the run. A shared machine changes its speed within minutes.
`speed` is the measured time of the run's iterations divided by the expected time. `at speed` is the
prediction with all costs multiplied by `speed`: its error is due to the model and not to the
machine. Nothing is fitted to measurements of the client.

Drafts are off, since their number depends on the text.
"""

import argparse
import asyncio
import dataclasses
import itertools
import json
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import uvloop
from matplotlib.figure import Figure
from pydantic import ByteSize

from benchmarks import machine, workload
from benchmarks.machine import ROOT
from benchmarks.plots import MARKERS
from benchmarks.records import RunRecord
from benchmarks.serving.openai_client import OpenAIClient
from benchmarks.serving.serve import measure, warm_up
from services.common.by_model import for_all
from services.common.cpus import usable_cpus
from services.local.settings import LocalSettings
from services.tune.calibration import Calibration, MeasuredIteration, calibrate, iterations_of
from services.tune.layout import Layout
from services.tune.model_shape import ModelShape
from services.tune.probe import Probe
from services.tune.search import Candidate, Memory, new_pool, scheduler_of
from services.tune.system import System, SystemFailed, running
from simulator.costs import LinearCosts
from simulator.engine import Arrival, Simulation
from simulator.outcome import Outcome, percentile
from simulator.site import OnePool
from simulator.virtual_clock import VirtualClock

RESULTS = ROOT / "benchmarks" / "results" / "predict.json"
FIGURE = ROOT / "docs" / "images" / "predict.png"

PolicyName = Literal["orca", "chunked"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
RATES = (0.3, 0.5, 0.7, 0.9, 1.1)
MAX_BATCH_SIZE, MAX_BATCH_TOKENS = 32, 512
KV_BYTES = 2**29
FIGURES = ("tokens_per_s", "median_latency_s", "median_normalised_s", "median_ttft_s", "p99_ttft_s")
COLUMNS = (
    f"{'rate':>6} {'speed':>6}   {'tokens/s':>24}   {'median latency, s':>24}   "
    f"{'first token, s':>24}   {'p99 of it, s':>24}\n{'':>13}"
    + f"   {'real':>6} {'model':>8} {'at speed':>8}"
    * 4
)


@dataclass(frozen=True, slots=True)
class Case:
    """A number of stages, a policy and a number of pipelines, for which figures are predicted and
    measured."""

    stages: int
    policy: PolicyName
    pipelines: int = 1

    def __str__(self) -> str:
        name = f"{self.stages} stage{'s'[: self.stages > 1]}, {self.policy}"
        return name if self.pipelines == 1 else f"{self.pipelines} pipelines of {name}"

    @property
    def candidate(self) -> Candidate:
        """One pipeline as the simulator's input; all CPUs are divided among all stages."""
        n_stages = self.pipelines * self.stages
        layout = Layout(self.stages, 1, max(1, usable_cpus() // n_stages))
        return Candidate(layout, MAX_BATCH_SIZE, MAX_BATCH_TOKENS)

    def local_settings(self, model: Path) -> LocalSettings:
        """Returns the settings of the local system for this case."""
        candidate = self.candidate
        return LocalSettings(
            model=for_all(model),
            stages=self.stages,
            pipelines=self.pipelines,
            threads=candidate.layout.threads,
            policy=self.policy,
            max_batch_size=candidate.max_batch_size,
            max_batch_tokens=candidate.max_batch_tokens,
            kv_memory=ByteSize(KV_BYTES),
            http_port=0,
            grpc_port=0,
            fail_fast=True,
            scheduler=(("speculative-tokens", "0"),),
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a run, measured or predicted; times are in seconds."""

    tokens_per_s: float
    """Output tokens per second, from the first arrival to the last token."""
    median_latency_s: float
    """Seconds from a request's arrival to its last token."""
    median_normalised_s: float
    median_ttft_s: float
    p99_ttft_s: float

    @classmethod
    def predicted(cls, outcome: Outcome) -> "Figures":
        """Returns the figures of a simulation."""
        ttfts_s = [request.ttft_s for request in outcome.requests]
        return cls(
            tokens_per_s=outcome.tokens_per_s,
            median_latency_s=statistics.median(
                request.end_s - request.arrival_s for request in outcome.requests
            ),
            median_normalised_s=statistics.median(
                request.normalised_s for request in outcome.requests
            ),
            median_ttft_s=statistics.median(ttfts_s),
            p99_ttft_s=percentile(ttfts_s, 99),
        )

    @classmethod
    def measured(cls, run: RunRecord) -> "Figures":
        """Returns the figures of a measured run.

        Raises:
            RuntimeError: a request failed.
        """
        errors = {request.error for request in run.requests} - {None}
        if errors:
            raise RuntimeError(f"requests failed: {sorted(map(str, errors))[0]}")
        ttfts_s = [request.time_to_first_token_s or 0.0 for request in run.requests]
        return cls(
            tokens_per_s=run.summary().output_tokens_per_s,
            median_latency_s=statistics.median(request.latency_s for request in run.requests),
            median_normalised_s=statistics.median(
                request.normalised_latency_s for request in run.requests
            ),
            median_ttft_s=statistics.median(ttfts_s),
            p99_ttft_s=percentile(ttfts_s, 99),
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """The predicted and the measured figures at one rate."""

    rate: float
    """Requests per second."""
    speed: float
    """Measured time of the run's iterations, divided by the expected time."""
    real: Figures
    model: Figures
    """The figures that were predicted before the run."""
    at_speed: Figures
    """The figures that are predicted with costs scaled to the machine's speed in the run."""

    def __str__(self) -> str:
        columns = [f"{self.rate:6.2f} {self.speed:6.2f}"]
        for name in ("tokens_per_s", "median_latency_s", "median_ttft_s", "p99_ttft_s"):
            real, model, at_speed = (
                getattr(each, name) for each in (self.real, self.model, self.at_speed)
            )
            columns.append(f"{real:6.4g} {model / real:7.3f}x {at_speed / real:7.3f}x")
        return "   ".join(columns)


def predict(
    case: Case, costs: LinearCosts, memory: Memory, requests: Sequence[workload.PlannedRequest]
) -> Outcome:
    """Returns the outcome of a simulation of `requests` with this project's schedulers, which share
    one pool."""
    clock, first = VirtualClock(), new_pool()
    pools = [first, *(first.beside() for _ in range(case.pipelines - 1))]
    schedulers = [
        scheduler_of(case.candidate, memory, clock, policy=case.policy, pool=pool) for pool in pools
    ]
    arrivals = [Arrival(each.arrival_s, each.n_prompt, each.n_output) for each in requests]
    return Simulation(OnePool(schedulers, pools), costs, arrivals, clock=clock).run()


def slower(costs: LinearCosts, factor: float) -> LinearCosts:
    """Returns the costs of a machine on which all operations take `factor` times as long."""
    return LinearCosts(
        tuple(tuple(factor * each for each in stage) for stage in costs.coefficients),
        gap_s=factor * costs.gap_s,
        plan_s=factor * costs.plan_s,
        hop_s=factor * costs.hop_s,
        result_s=factor * costs.result_s,
        request_s=factor * costs.request_s,
    )


def speed(costs: LinearCosts, iterations: Sequence[MeasuredIteration]) -> float:
    """Returns the measured compute time of all iterations, divided by the time that `costs`
    predicts for them: at 2.0, the machine took twice as long as predicted."""
    bare = dataclasses.replace(costs, gap_s=0.0)
    taken_s = sum(sum(each.stages_s) for each in iterations)
    expected_s = sum(
        bare.stage_s(index, each.work) for each in iterations for index in range(costs.n_stages)
    )
    return taken_s / expected_s


async def calibrated(
    system: System, shape: ModelShape, *, limit_s: float
) -> tuple[Calibration, Memory]:
    """Returns the costs of iterations, measured with a load of `limit_s` seconds, and the K/V
    memory.

    Raises:
        SystemFailed: a request failed.
    """
    probe = Probe(
        system,
        vocab_size=shape.vocab_size,
        max_model_len=shape.max_model_len,
        max_group=MAX_BATCH_SIZE,
    )
    async with system.recorded() as first:
        await probe.begin()
    if not first:
        raise SystemFailed("it reported no iterations")
    probe.note_slots(system.n_slots)
    async with system.recorded() as records:
        await probe.run(limit_s)
    return calibrate(iterations_of(records), probe.lone), Memory(system.n_slots)


def trace(
    options: argparse.Namespace, *, rate: float | None, n_requests: int, vocab_size: int
) -> list[workload.PlannedRequest]:
    """Returns requests with the paper's lengths, as a Poisson process or, if `rate` is None, all at
    once. No two prompts have a common beginning, even if they belong to different rates."""
    lengths = workload.mixed_lengths(n_requests, seed=options.seed)
    arrivals_s = workload.all_at_once(n_requests)
    if rate is not None:
        arrivals_s = workload.poisson_arrivals(n_requests, rate=rate, seed=options.seed)
    seed = options.seed if rate is None else options.seed + 1 + round(1000 * rate)
    return workload.plan(lengths, arrivals_s, vocab_size=vocab_size, seed=seed)


async def compare(
    case: Case, shape: ModelShape, options: argparse.Namespace
) -> tuple[Calibration, list[Comparison]]:
    """Calibrates one case, predicts and measures it at all rates, and prints each comparison.

    Raises:
        SystemFailed: the system does not start, or a request failed.
        RuntimeError: a request failed.
    """
    async with running(case.local_settings(options.model)) as system:
        calibration, memory = await calibrated(system, shape, limit_s=options.calibration_s)
        costs = calibration.costs
        print(
            f"{case}: {calibration.n_iterations} iterations fitted within {calibration.error:.1%}",
            flush=True,
        )
        at_once = trace(options, rate=None, n_requests=128, vocab_size=shape.vocab_size)
        capacity = predict(case, costs, memory, at_once).requests_per_s
        client = OpenAIClient(system.http_url, model=options.model.name)
        await warm_up(client, workload.rehearsal(at_once, n_requests=4, n_output=2))
        print(COLUMNS, flush=True)
        comparisons = []
        for part in options.rates:
            rate = part * capacity
            n_requests = max(options.min_requests, round(rate * options.run_s))
            requests = trace(options, rate=rate, n_requests=n_requests, vocab_size=shape.vocab_size)
            model = predict(case, costs, memory, requests)
            async with system.recorded() as records:
                run = await measure(client, requests, meta={}, title=f"{case}, {rate:.2f}/s")
            factor = speed(costs, iterations_of(records))
            at_speed = predict(case, slower(costs, factor), memory, requests)
            comparisons.append(
                Comparison(
                    rate=rate,
                    speed=factor,
                    real=Figures.measured(run),
                    model=Figures.predicted(model),
                    at_speed=Figures.predicted(at_speed),
                )
            )
            print(comparisons[-1], flush=True)
        return calibration, comparisons


def worst(comparisons: Sequence[Comparison], which: str, figure: str) -> float:
    """Returns the largest relative error of a prediction: `which` is `model` or `at_speed`."""
    errors: list[float] = [
        abs(getattr(getattr(each, which), figure) / getattr(each.real, figure) - 1)
        for each in comparisons
    ]
    return max(errors)


def draw(path: Path, found: dict[Case, list[Comparison]], *, title: str) -> None:
    """Draws measured and predicted throughput and median latency over the rate."""
    figure = Figure(figsize=(10, 5), layout="constrained")
    throughput, latency = figure.subplots(1, 2)
    for index, (case, comparisons) in enumerate(found.items()):
        rates = [each.rate for each in comparisons]
        for axes, name in ((throughput, "tokens_per_s"), (latency, "median_latency_s")):
            for which, line, label in (
                ("real", MARKERS[index], f"{case}: measured"),
                ("model", "-", "predicted beforehand"),
                ("at_speed", "--", "at the machine's speed"),
            ):
                values = [getattr(getattr(each, which), name) for each in comparisons]
                axes.plot(rates, values, line, color=f"C{index}", linewidth=1, label=label)
    throughput.set_ylabel("output tokens/s")
    latency.set_ylabel("median latency (s)")
    latency.set_yscale("log")
    for axes in (throughput, latency):
        axes.set_xlabel("requests/s that come")
        axes.grid(visible=True, which="both", alpha=0.3)
    figure.legend(
        *throughput.get_legend_handles_labels(), fontsize=7, ncols=4, loc="outside lower center"
    )
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def record_of(
    case: Case, calibration: Calibration, comparisons: Sequence[Comparison]
) -> dict[str, Any]:
    """Returns the record of a case, as a dictionary for JSON."""
    return {
        "pipelines": case.pipelines,
        "stages": case.stages,
        "policy": case.policy,
        "n_iterations": calibration.n_iterations,
        "error_of_fit": round(calibration.error, 4),
        "worst_error": {
            which: {name: round(worst(comparisons, which, name), 4) for name in FIGURES}
            for which in ("model", "at_speed")
        },
        "rates": [
            json.loads(
                json.dumps(dataclasses.asdict(each)),
                parse_float=lambda text: round(float(text), 5),
            )
            for each in comparisons
        ],
    }


async def run(options: argparse.Namespace) -> None:
    """Compares all cases of the options, and writes the record and the figure."""
    began_s = time.monotonic()
    shape = ModelShape.read(options.model)
    found: dict[Case, list[Comparison]] = {}
    results = []
    for what in itertools.product(options.stages, options.policies, options.pipelines):
        case = Case(*what)
        calibration, found[case] = await compare(case, shape, options)
        results.append(record_of(case, calibration, found[case]))
        for figure in ("tokens_per_s", "median_latency_s"):
            print(
                f"{case}: {figure} is predicted within "
                f"{worst(found[case], 'model', figure):.1%}, and within "
                f"{worst(found[case], 'at_speed', figure):.1%} at the machine's speed"
            )
    record = {
        **machine.describe(),
        "command": shlex.join(["python", "-m", "benchmarks.paper.predict", *sys.argv[1:]]),
        "seconds": round(time.monotonic() - began_s),
        "cases": results,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    draw(options.figure, found, title=f"{options.model.name}: measured, and as it was predicted")
    print(f"wrote {options.out} and {options.figure}")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper.predict",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, help="directory of a checkpoint")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pipelines", type=int, nargs="+", default=[1])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument(
        "--rates", type=float, nargs="+", default=RATES, help="parts of what it can serve at most"
    )
    parser.add_argument("--calibration-s", type=float, default=60.0, help="seconds of the load")
    parser.add_argument("--run-s", type=float, default=50.0, help="in which requests come")
    parser.add_argument("--min-requests", type=int, default=24, help="at each rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="record, JSON")
    parser.add_argument("--figure", type=Path, default=FIGURE, help="plot, PNG")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse(sys.argv[1:])
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run(options))
    except (SystemFailed, RuntimeError, ValueError) as error:
        print(f"benchmarks.paper.predict: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
