"""Fairness between two clients, one of which sends ten times as many requests, in overload.

    python -m benchmarks.make_model /tmp/llama-125m
    python -m benchmarks.serving.fairness --model /tmp/llama-125m --seconds 240   40 minutes
    python -m benchmarks.serving.fairness --rounds 1 --seconds 10 --capacity-s 5  a test run

In each round, the benchmark starts a whole local system with two API keys for each order in turn:
`fcfs`, `fair`, and `fair` with `fair_batch_tokens`. First, clients that send one request after the
other measure the capacity, which is used for all orders. The small client then sends a share
(`--share`) of the capacity alone, as a Poisson process. Then it sends requests again at the same
times, while a large client sends ten times as many. All requests have one size, and no two prompts
are alike.

The compared number is a ratio for each order: the p99 of the small client's latencies with the
large client, divided by its p99 without the large client, over all rounds. A latency is the time
from when a request is due to the last token of its answer. The ratio has two causes. One is the
waiting time before admission, which the order decides. The other is that an iteration with more
tokens takes longer. `fair_batch_tokens` limits the tokens per iteration while both clients have
requests, to a number at which reading the weights still takes most of the time; this costs some
throughput. So the model must be larger than a processor's cache, unlike the demo model.

Fairness is Jain's index of the clients' shares in each window of time
(`benchmarks/serving/shares.py`).

Drafts are switched off. A model of random weights repeats itself, so a client that is alone would
gain more from drafts.

The engine has a processor of its own, as its pod has.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from benchmarks import local_system, machine, records, workload
from benchmarks.local_system import System
from benchmarks.machine import ROOT
from benchmarks.pinning import ranks_apart
from benchmarks.records import RequestRecord, RunRecord, Spread
from benchmarks.serving import load
from benchmarks.serving.openai_client import OpenAIClient
from benchmarks.serving.overload import capacity
from benchmarks.serving.serve import warm_up
from benchmarks.serving.shares import WINDOW_S, demanded, served
from benchmarks.workload import PlannedRequest
from services.frontend.api_keys import hash_of
from simulator.fairness import jain_index

RESULTS = ROOT / "benchmarks" / "results" / "fairness.json"
FIGURE = ROOT / "docs" / "images" / "fairness.png"
ORDERS = ("fcfs", "fair", "paced")
"""Names of the measured orders. `paced` is the order `fair` with `fair_batch_tokens`."""
SMALL, LARGE = "small", "large"
TIMES = 10
"""Number of requests that the large client sends for each request of the small client."""
FIRST_TOKEN_ID, VOCAB_SIZE = 3, 1000
"""First token id of prompts, and the end of their range. Every model has these tokens, and none of
them is special."""
MAX_RATIO = 1.5
"""Largest allowed ratio: the small client's p99 with the large client, divided by its p99 alone."""


@dataclass(frozen=True, slots=True)
class OwnedRequest(PlannedRequest):
    """A request with the name of the client that sends it."""

    owner: str = SMALL


@dataclass(frozen=True, slots=True)
class Clients:
    """Clients with different API keys, used as one client: each request is sent by its owner."""

    by_name: Mapping[str, load.Client]

    def prepare(self, request: PlannedRequest) -> load.Call:
        """Returns a call by the client that owns the request."""
        owner = request.owner if isinstance(request, OwnedRequest) else SMALL
        return self.by_name[owner].prepare(request)


@dataclass(frozen=True, slots=True)
class Run:
    """The requests of one run and their records: of the small client alone, or of both clients."""

    order: str
    is_alone: bool
    records: Mapping[str, tuple[RequestRecord, ...]]
    """Records of the requests, by the name of the client."""
    seconds: float

    def to_record(self, meta: Mapping[str, Any]) -> list[RunRecord]:
        """Returns a record for each client. The times of single tokens, which need most space, are
        left out."""
        about = {"order": self.order, "alone": self.is_alone, "jain": self.jain()}
        return [
            RunRecord(
                {**meta, **about, "client": name},
                tuple(dataclasses.replace(each, token_times_s=()) for each in of_one),
            )
            for name, of_one in self.records.items()
        ]

    def jain(self) -> list[float]:
        """Returns Jain's index of each time window of the run."""
        n_windows = max(1, int(self.seconds / WINDOW_S))
        got = {name: served(of_one, n_windows) for name, of_one in self.records.items()}
        asked = {name: demanded(of_one, n_windows) for name, of_one in self.records.items()}
        return [
            jain_index([got[name][window] for name in got], [asked[name][window] for name in asked])
            for window in range(n_windows)
        ]


def arrivals(
    rate: float, options: argparse.Namespace, *, owner: str, seed: Sequence[int]
) -> list[OwnedRequest]:
    """Returns the requests of the client `owner`, which arrive as a Poisson process of `rate`
    requests per second."""
    generator = np.random.default_rng(seed)
    times_s = np.cumsum(generator.exponential(1 / rate, int(rate * options.seconds)))
    prompts = generator.integers(FIRST_TOKEN_ID, VOCAB_SIZE, (len(times_s), options.n_prompt))
    return [
        OwnedRequest(float(time_s), tuple(prompt), options.n_output, owner=owner)
        for time_s, prompt in zip(times_s, prompts.tolist(), strict=True)
    ]


async def serve(
    order: str, clients: Clients, requests: Sequence[OwnedRequest], options: argparse.Namespace
) -> Run:
    """Sends the requests when they are due, and returns their records by client.

    Raises:
        RuntimeError: a request failed; the message has the error.
    """
    requests = sorted(requests, key=lambda request: request.arrival_s)
    done = await load.run(clients, requests, timeout_s=options.timeout_s)
    for record in done:
        if record.error is not None:
            raise RuntimeError(f"a request failed: {record.error}")
    owners = sorted({request.owner for request in requests}, reverse=True)
    by_owner = {
        owner: tuple(
            record for record, request in zip(done, requests, strict=True) if request.owner == owner
        )
        for owner in owners
    }
    return Run(order, len(owners) == 1, by_owner, options.seconds)


def clients_of(system: System) -> Clients:
    """Returns a client of the system for each of the two API keys."""
    return Clients(
        {
            name: OpenAIClient(system.http, model=system.model, api_key=key_of(name))
            for name in (SMALL, LARGE)
        }
    )


async def rate_of(system: System, options: argparse.Namespace) -> float:
    """Measures the system's capacity. Returns the rate of the small client in requests per second,
    which is a share of the capacity."""
    sample = OwnedRequest(0.0, tuple(range(7, 7 + options.n_prompt)), options.n_output)
    per_s = await capacity(clients_of(system), sample, for_s=options.capacity_s)
    rate: float = options.share * per_s
    print(f"capacity {per_s:.1f} requests/s, of which {rate:.2f} are small", flush=True)
    return rate


async def measure(
    order: str, number: int, system: System, rate: float, options: argparse.Namespace
) -> list[Run]:
    """Runs the small client alone, and then both clients together. Returns the two runs."""
    clients = clients_of(system)
    small = arrivals(rate, options, owner=SMALL, seed=(options.seed, number))
    large = arrivals(TIMES * rate, options, owner=LARGE, seed=(options.seed, number, 1))
    few = [dataclasses.replace(each, arrival_s=0.0, n_output=4) for each in large[:16]]
    await warm_up(clients, workload.backwards(few))
    alone = await serve(order, clients, workload.backwards(small), options)
    return [alone, await serve(order, clients, [*small, *large], options)]


def key_of(name: str) -> str:
    """Returns the API key of the client `name`."""
    return f"orc-benchmark-{name}"


def setting_of(order: str, options: argparse.Namespace) -> str:
    """Returns the scheduler's settings that choose an order, as `name=value,name=value`."""
    if order != "paced":
        return f"order={order}"
    return f"order=fair,fair_batch_tokens={options.fair_batch_tokens}"


def write_keys(path: Path) -> None:
    """Writes the file with the API keys of both clients."""
    keys = [{"name": name, "sha256": hash_of(key_of(name))} for name in (SMALL, LARGE)]
    path.write_text(json.dumps({"keys": keys}))


@dataclass(frozen=True, slots=True)
class Result:
    """The results of one order over all rounds."""

    order: str
    alone: RunRecord
    beside: RunRecord
    large: RunRecord
    jain: tuple[tuple[float, ...], ...]
    """Jain's index of each window, for each round."""

    @classmethod
    def of(cls, order: str, runs: Sequence[Run]) -> "Result":
        """Returns the results of all runs with an order."""

        def together(name: str, *, is_alone: bool) -> RunRecord:
            chosen = (run for run in runs if run.order == order and run.is_alone is is_alone)
            return RunRecord({}, tuple(each for run in chosen for each in run.records[name]))

        return cls(
            order,
            alone=together(SMALL, is_alone=True),
            beside=together(SMALL, is_alone=False),
            large=together(LARGE, is_alone=False),
            jain=tuple(
                tuple(run.jain()) for run in runs if run.order == order and not run.is_alone
            ),
        )

    @property
    def ratios(self) -> tuple[float, float]:
        """The p99 of the small client's latencies with the large client, divided by its p99 alone:
        for whole answers, and for first tokens."""
        return (
            _latency(self.beside).p99 / _latency(self.alone).p99,
            _first_token(self.beside).p99 / _first_token(self.alone).p99,
        )

    @property
    def requests_per_s(self) -> float:
        """Requests of both clients per second, from the first arrival to the last token, as the
        mean over all rounds."""
        both = [*self.beside.requests, *self.large.requests]
        ends_s = [one.arrival_s + one.latency_s for one in both]
        return len(both) / (max(ends_s) - min(one.arrival_s for one in both)) / self.n_rounds

    @property
    def n_rounds(self) -> int:
        """Number of rounds that were measured."""
        return len(self.jain)

    def lines(self) -> list[str]:
        """Returns the results as lines of text to print."""
        whole, first = self.ratios
        index = np.mean([each for windows in self.jain for each in windows])
        return [
            f"{self.order}: p99 of the small client {whole:.2f} x what it has alone, of its first "
            f"tokens {first:.2f} x; Jain's index {index:.3f}; {self.requests_per_s:.2f} requests/s",
            *(
                f"  {name:>12}: answer {_pair(_latency(run))}, first token "
                f"{_pair(_first_token(run))}, {len(run.requests)} requests"
                for name, run in (
                    ("small, alone", self.alone),
                    ("small", self.beside),
                    ("large", self.large),
                )
            ),
        ]


def _latency(run: RunRecord) -> Spread:
    return _spread([record.latency_s for record in run.requests])


def _first_token(run: RunRecord) -> Spread:
    return _spread([record.time_to_first_token_s or 0.0 for record in run.requests])


def _spread(values: Sequence[float]) -> Spread:
    spread = Spread.of(values)
    if spread is None:
        raise RuntimeError("no requests: the run is too short for the rate")
    return spread


def _pair(spread: Spread) -> str:
    return f"{spread.median:.2f} s, p99 {spread.p99:.2f} s"


def draw(path: Path, results: Sequence[Result]) -> None:
    """Draws the distribution of the latencies of the small client's answers, and Jain's index over
    time."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for result, color in zip(results, ("tab:red", "tab:blue", "tab:green"), strict=True):
        for name, run, style in (("alone", result.alone, ":"), ("beside", result.beside, "-")):
            values = sorted(record.latency_s for record in run.requests)
            parts = np.arange(1, len(values) + 1) / len(values)
            left.step(values, parts, style, color=color, label=f"{result.order}, {name}")
        index = np.mean(result.jain, axis=0)
        times_s = WINDOW_S * (np.arange(len(index)) + 0.5)
        right.plot(times_s, index, marker="o", color=color, label=result.order)
    left.set_xscale("log")
    left.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.xaxis.set_major_formatter(ScalarFormatter())
    left.xaxis.set_minor_formatter(NullFormatter())
    left.set_xlabel("latency of the small client's answers (s)")
    left.set_ylabel("part of its answers")
    left.set_title(f"alone, and beside one that asks for {TIMES} x as much", fontsize=10)
    right.set_ylim(0.45, 1.03)
    right.set_xlabel("time (s)")
    right.set_ylabel("Jain's index of shares received")
    right.set_title(f"fairness, in windows of {WINDOW_S:g} s", fontsize=10)
    for axes in (left, right):
        axes.grid(visible=True, which="both", alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


async def run(options: argparse.Namespace) -> int:
    """Measures all orders in turn. The exit status is 1 if the last order exceeds the largest
    allowed ratio."""
    runs: list[Run] = []
    rate = options.rate
    with tempfile.TemporaryDirectory() as directory:
        keys = Path(directory) / "keys.json"
        write_keys(keys)
        for number in range(options.rounds):
            for order in ORDERS:
                arguments = [
                    f"--model={options.model}",
                    f"--scheduler={setting_of(order, options)},speculative_tokens=0",
                    f"--api-keys-file={keys}",
                    "--max-requests=4096",
                    *options.system.split(),
                ]
                async with local_system.running(arguments) as system:
                    with ranks_apart():
                        rate = rate or await rate_of(system, options)
                        runs += await measure(order, number, system, rate, options)
    results = [Result.of(order, runs) for order in ORDERS]
    for result in results:
        print("\n".join(result.lines()), flush=True)
    meta = {**machine.describe(), "rate": rate, "seed": options.seed}
    records.write(options.out, [record for each in runs for record in each.to_record(meta)])
    draw(options.figure, results)
    print(f"wrote {options.out} and {options.figure}")
    return int(results[-1].ratios[0] > MAX_RATIO)


def main() -> int:
    """Parses the command line and runs the benchmark. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="models/demo")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=45.0, help="in which requests come")
    parser.add_argument("--capacity-s", type=float, default=15.0, help="to find the capacity in")
    parser.add_argument("--share", type=float, default=0.15, help="of it that is the small one's")
    parser.add_argument("--rate", type=float, help="of the small one, instead of its share")
    parser.add_argument("--n-prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--n-output", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="that a client waits")
    parser.add_argument("--fair-batch-tokens", type=int, default=6, help="where it is paced")
    parser.add_argument(
        "--system",
        default="--threads=1",
        help="more options of services.local",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--figure", type=Path, default=FIGURE)
    return uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
