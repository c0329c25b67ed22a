"""Compares the simulator's predictions with measurements of a running system.

    python -m benchmarks.make_model /tmp/llama-125m
    python -m benchmarks.paper.predict /tmp/llama-125m               25 minutes on two cores
    python -m benchmarks.paper.predict /tmp/llama-125m --pipelines 2 --stages 1 --policies chunked \
      --out benchmarks/results/predict_pipelines.json --figure docs/images/predict_pipelines.png
    python -m benchmarks.paper.predict models/demo --rates 0.5 --calibration-s 5 --run-s 5   a test

The command with `--pipelines` takes 7 minutes. For each number of pipelines and stages and each
policy, the program starts a system and measures the costs of iterations with a load of a minute.
From these costs alone, the simulator with this project's scheduler predicts the results for Poisson
arrivals with the paper's lengths (section 6.2), at several shares of the highest rate. Then the
program sends the same requests to the system over HTTP, as `benchmarks.serving.serve` does.

In the table, `model` is the prediction made before the run. A shared machine changes its speed
within minutes. `speed` is the measured time of the run's iterations divided by the expected time.
`at speed` is the prediction with all costs multiplied by `speed`: its error is due to the model and
not to the machine. Nothing is fitted to measurements of the client.

Drafts are off, since their number depends on the text.
"""

import argparse
import asyncio
import dataclasses
import itertools
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

from benchmarks import machine, workload
from benchmarks.machine import ROOT
from benchmarks.paper.comparison import (
    COLUMNS,
    MAX_BATCH_SIZE,
    POLICIES,
    Case,
    Comparison,
    Figures,
    draw,
    record_of,
    worst,
)
from benchmarks.serving.openai_client import OpenAIClient
from benchmarks.serving.serve import measure, warm_up
from services.arena.real import calibrated
from services.tune.calibration import Calibration, MeasuredIteration, iterations_of
from services.tune.model_shape import ModelShape
from services.tune.search import Memory, new_pool, scheduler_of
from services.tune.system import SystemFailed, running
from simulator.costs import LinearCosts
from simulator.engine import Arrival, Simulation
from simulator.outcome import Outcome
from simulator.site import OnePool
from simulator.virtual_clock import VirtualClock

RESULTS = ROOT / "benchmarks" / "results" / "predict.json"
FIGURE = ROOT / "docs" / "images" / "predict.png"

RATES = (0.3, 0.5, 0.7, 0.9, 1.1)


def predict(
    case: Case, costs: LinearCosts, memory: Memory, requests: Sequence[workload.PlannedRequest]
) -> Outcome:
    """Simulates `requests` on this project's schedulers, one per pipeline, which share one pool.
    Returns the outcome."""
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
    """Returns the measured compute time of all iterations, divided by the time that `costs` predict
    for them: at 2.0, the machine took twice as long as predicted."""
    bare = dataclasses.replace(costs, gap_s=0.0)
    taken_s = sum(sum(each.stages_s) for each in iterations)
    expected_s = sum(
        bare.stage_s(index, each.work) for each in iterations for index in range(costs.n_stages)
    )
    return taken_s / expected_s


def trace(
    options: argparse.Namespace, *, rate: float | None, n_requests: int, vocab_size: int
) -> list[workload.PlannedRequest]:
    """Returns requests with the paper's lengths. They arrive as a Poisson process of `rate`
    requests per second, or all at once if `rate` is None. The seed of the prompts depends on
    `rate`, so that runs at different rates find no common prefix in the cache."""
    lengths = workload.mixed_lengths(n_requests, seed=options.seed)
    arrivals_s = workload.all_at_once(n_requests)
    if rate is not None:
        arrivals_s = workload.poisson_arrivals(n_requests, rate=rate, seed=options.seed)
    seed = options.seed if rate is None else options.seed + 1 + round(1000 * rate)
    return workload.plan(lengths, arrivals_s, vocab_size=vocab_size, seed=seed)


async def compare(
    case: Case, shape: ModelShape, options: argparse.Namespace
) -> tuple[Calibration, list[Comparison]]:
    """Calibrates the costs of one case, predicts and measures the case at all rates, and prints
    each comparison.

    Raises:
        SystemFailed: the system does not start, or a request of the calibration failed.
        RuntimeError: a request of a measured run failed.
    """
    async with running(case.local_settings(options.model)) as system:
        calibration, memory = await calibrated(
            system, shape, max_batch_size=MAX_BATCH_SIZE, limit_s=options.calibration_s
        )
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


async def run(options: argparse.Namespace) -> None:
    """Runs all cases that the options name, and writes the record and the plot."""
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
