"""Ours and what others would use instead, side by side on this machine.

    python -m benchmarks.peers.install vllm openvino
    python -m benchmarks.make_model /tmp/llama-125m
    python -m benchmarks.compare --model /tmp/llama-125m --peers vllm,openvino
    python -m benchmarks.compare --model /tmp/llama-125m --peers vllm,openvino --rates 0.5x,0.9x

Ours is the whole service, `services.local`, under load over HTTP; a peer is its engine alone,
stepped in process, without a server (`benchmarks.peers`). All have their model loaded from the
start and take turns. Rates are requests a second, or with an x behind them parts of what ours does
offline, when everything is there at once. What the load's client takes of the processor counts as
ours.

Before anything is measured each engine answers the workload once, to warm up, and a part of it one
by one, so that tokens can be compared: greedy decoding is the same computation for all, but
rounding may tip a choice, and every token after it is another.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import signal
import statistics
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop
from tqdm import tqdm

from benchmarks import contest, load, local_system, machine, records, workload
from benchmarks.contest import Range, WrongAnswer
from benchmarks.openai_client import OpenAIClient
from benchmarks.peers import peer_process
from benchmarks.peers.catalogue import DEFAULT_VENVS, PEERS
from benchmarks.peers.peer_process import PeerFailed, PeerProcess
from benchmarks.records import RequestRecord, RunRecord
from benchmarks.workload import PlannedRequest

OURS = "ours"
OFFLINE = "offline"
OUR_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
OUR_OPTIONS = "--max-batch-size=64 --kv-memory=2GiB"
"""As many requests at once, and as much K/V memory, as the peers have."""
N_COMPARED = 8
"""Requests whose tokens are compared."""
RESULTS = machine.ROOT / "benchmarks" / "results"
HEADER = (
    f"{'':<14} {'tokens/s':>9} {'ours is':>22} {'p50 ms':>8} {'ours is':>22} {'p99 ms':>8} "
    f"{'ours is':>22} {'others':>7} {'disturbed':>10}"
)


class Ours:
    """A local system, spoken to over HTTP."""

    def __init__(self, name: str, system: local_system.System, options: Sequence[str]) -> None:
        self.name = name
        self.about = {"options": list(options)}
        self._system = system
        self._client = OpenAIClient(system.http, model=system.model)

    @property
    def pid(self) -> int:
        return self._system.pid

    async def run(self, requests: Sequence[PlannedRequest]) -> list[RequestRecord]:
        return await load.run(self._client, requests)

    async def tokens(self, requests: Sequence[PlannedRequest]) -> list[list[int]]:
        """What it writes for each, one after the other."""
        return [await asyncio.to_thread(self._complete, request) for request in requests]

    def _complete(self, request: PlannedRequest) -> list[int]:
        body = {
            "model": self._system.model,
            "prompt": request.prompt_token_ids,
            "max_tokens": request.n_output,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        call = urllib.request.Request(
            f"{self._system.http}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(call) as response:
            tokens: list[int] = json.load(response)["choices"][0]["token_ids"]
        return tokens


class Peer:
    """A peer in its process."""

    def __init__(self, process: PeerProcess) -> None:
        self.name = process.name
        self.about = process.about
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def run(self, requests: Sequence[PlannedRequest]) -> list[RequestRecord]:
        done, _ = await asyncio.to_thread(self._process.run, requests)
        return done

    async def tokens(self, requests: Sequence[PlannedRequest]) -> list[list[int]]:
        """What it writes for each, one after the other."""
        return [
            (await asyncio.to_thread(self._process.run, [request]))[1][0] for request in requests
        ]


def agreement(mine: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Part of the tokens that come before the first difference of their request."""
    n_same = sum(
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(mine, theirs, strict=True)
    )
    return n_same / sum(len(x) for x in mine)


def options_of_ours(given: str, *, model: Path, dtype: str, threads: int) -> list[str]:
    """The command line of a local system: what was given, and the threads shared out."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--threads", type=int)
    mine, _ = parser.parse_known_args(shlex.split(given))
    options = [f"--model={model}", f"--dtype={OUR_DTYPES[dtype]}", *shlex.split(OUR_OPTIONS)]
    if mine.threads is None:
        options.append(f"--threads={max(1, threads // (mine.stages * mine.tp))}")
    return [*options, *shlex.split(given)]


async def start(
    options: argparse.Namespace, stack: contextlib.AsyncExitStack
) -> tuple[list[Ours], list[Peer]]:
    """All engines, one after the other, each with its model loaded."""
    shared = {"model": options.model.resolve(), "dtype": options.dtype, "threads": options.threads}
    peers = []
    for name in tqdm(options.peers, desc="starting peers", leave=False):
        process = await asyncio.to_thread(
            peer_process.start,
            PEERS[name],
            venvs=options.venvs,
            options=options.peer_options.get(name, []),
            **shared,
        )
        peers.append(Peer(stack.enter_context(process)))
    ours = []
    for number, given in enumerate(options.ours or [""], 1):
        arguments = options_of_ours(given, **shared)
        system = await stack.enter_async_context(local_system.running(arguments))
        ours.append(Ours(OURS if number == 1 else f"{OURS} {number}", system, arguments))
    return ours, peers


async def compare(options: argparse.Namespace) -> list[RunRecord]:
    """Everything that the options ask for; prints each case's table when it is there."""
    task = asyncio.current_task()
    assert task is not None
    # Peers are stopped most of the time: nothing but us would ever end them.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    meta = {**machine.describe(), "model": options.model.name, "dtype": options.dtype}
    vocab_size = json.loads((options.model / "config.json").read_text())["vocab_size"]
    offline = workload.from_options(options, rate=None, vocab_size=vocab_size)
    results: list[RunRecord] = []
    async with contextlib.AsyncExitStack() as stack:
        ours, peers = await start(options, stack)
        engines: list[Ours | Peer] = [*ours, *peers]
        await warm_up(engines, offline)
        capacity = None
        for rate in options.rates:
            if rate.endswith("x") and capacity is None:
                capacity = await our_capacity(ours[0], offline, results)
            per_s = rate_of(rate, capacity)
            requests = workload.from_options(options, rate=per_s, vocab_size=vocab_size)
            order = list(contest.turns(engines, options.rounds))
            for turn in (bar := tqdm(order, desc=rate, unit="run", leave=False)):
                bar.set_postfix_str(turn.contestant.name)
                run = await contest.measure(
                    turn,
                    requests,
                    meta={**meta, "case": rate, "rate": per_s},
                    n_repeats=options.repeats,
                )
                results.append(run)
                tqdm.write(line_of(run), file=sys.stderr)
            print(table(rate, results), flush=True)
    return results


async def warm_up(engines: Sequence[Ours | Peer], requests: Sequence[PlannedRequest]) -> None:
    """Has each engine see the workload once, and says whether they write what the first does."""
    compared = requests[:N_COMPARED]
    expected = await engines[0].tokens(compared)
    for engine in tqdm(engines, desc="warming up", leave=False):
        contest.check(engine.name, requests, await engine.run(requests))
        if engine is not engines[0]:
            same = agreement(expected, await engine.tokens(compared))
            print(f"{engine.name}: {same:.1%} of greedy tokens as ours before one differs")


async def our_capacity(
    ours: Ours, offline: Sequence[PlannedRequest], results: Sequence[RunRecord]
) -> float:
    """Requests a second that ours does offline: as measured in this comparison, else once."""
    together = [run for run in results if run.meta["case"] == OFFLINE]
    runs = [
        run.summary() for run in contest.undisturbed(together) if run.meta["engine"] == ours.name
    ]
    if not runs:
        runs = [records.Summary.of(await ours.run(offline))]
    return statistics.median(run.requests_per_s for run in runs)


def rate_of(text: str, capacity: float | None) -> float | None:
    """Requests a second; None when all come at once."""
    if text == OFFLINE:
        return None
    if text.endswith("x"):
        assert capacity is not None
        return float(text[:-1]) * capacity
    return float(text)


def line_of(run: RunRecord) -> str:
    """A run in a line, while others still go on."""
    return (
        f"{run.meta['case']} {run.meta['round']} {run.meta['engine']}: "
        f"{contest.output_rate(run.summary()):.1f} tokens/s, "
        f"others {run.meta['other_cpus']:.2f} cores{', disturbed' * run.meta['is_disturbed']}"
    )


def table(case: str, results: Sequence[RunRecord]) -> str:
    """A case: medians over its rounds, and beside them ours through theirs, pair by pair."""
    runs = [run for run in results if run.meta["case"] == case]
    counted = contest.undisturbed(runs)
    names = list(dict.fromkeys(run.meta["engine"] for run in runs))
    rate = runs[0].meta["rate"]
    title = case if rate is None else f"{case}, {rate:.2f} requests/s"
    n_rounds, n_counted = (len({run.meta["round"] for run in each}) for each in (runs, counted))
    lines = [f"{title}: median of {n_counted} of {n_rounds} rounds", HEADER]
    for name in names:
        mine = [run.meta for run in runs if run.meta["engine"] == name]
        n_disturbed = f"{sum(meta['is_disturbed'] for meta in mine)} of {len(mine)}"
        others = statistics.mean(meta["other_cpus"] for meta in mine)
        lines.append(f"{row(name, [name], counted)} {others:>7.2f} {n_disturbed:>10}")
    if len(peers := [name for name in names if name in PEERS]) > 1:
        lines.append(row("best peer", peers, counted))
    return "\n".join(lines) + "\n"


def row(title: str, names: Sequence[str], runs: Sequence[RunRecord]) -> str:
    """What an engine did, or the best of several."""
    cells = [f"{title:<14}"]
    for measured, scale, width in (
        (contest.output_rate, 1.0, 9),
        (contest.median_latency, 1e3, 8),
        (contest.p99_latency, 1e3, 8),
    ):
        value = contest.best(runs, names, measured)
        cells.append(f"{scale * statistics.median(value.values()):>{width}.1f}")
        cells.append(f"{spread(contest.ratio(runs, OURS, names, measured)):>22}")
    return " ".join(cells)


def spread(values: Range) -> str:
    return f"{values.median:.2f} x ({values.low:.2f}-{values.high:.2f})"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint")
    parser.add_argument("--dtype", choices=sorted(OUR_DTYPES), default="bf16")
    parser.add_argument(
        "--peers", type=names_of_peers, default=[], help="of " + ", ".join(sorted(PEERS))
    )
    parser.add_argument(
        "--rates",
        type=lambda text: text.split(","),
        default=[OFFLINE],
        metavar="R,R",
        help=f"cases: {OFFLINE}, requests a second, or 0.5x for half of what ours does offline",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--ours",
        action="append",
        metavar="OPTIONS",
        help="options of services.local; given again, another of ours joins in",
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=OPTIONS",
        help="options of a peer's adapter, such as transformers='--max-batch-size 32'",
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each engine")
    parser.add_argument("--repeats", type=int, default=2, help="of a run that was disturbed")
    parser.add_argument("--venvs", type=Path, default=DEFAULT_VENVS, help="where peers are")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: in benchmarks/results")
    workload.add_options(parser)
    options = parser.parse_args(arguments)
    pairs = [each.partition("=") for each in options.peer]
    options.peer_options = {name: shlex.split(given) for name, _, given in pairs}
    if unknown := options.peer_options.keys() - set(options.peers):
        parser.error(f"--peer: {', '.join(sorted(unknown))} is not among --peers")
    return options


def names_of_peers(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - PEERS.keys():
        raise argparse.ArgumentTypeError(f"no peer is called {', '.join(sorted(unknown))}")
    return names


def file_for(results: Sequence[RunRecord]) -> Path:
    """Where results go by default: a file for each comparison, in the order of time."""
    meta: dict[str, Any] = results[0].meta
    start = meta["start"].replace(":", "").removesuffix("+0000")
    return RESULTS / f"compare-{meta['model']}-{meta['dtype']}-{start}.json"


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            results = runner.run(compare(options))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    except (PeerFailed, WrongAnswer, RuntimeError) as error:
        print(f"benchmarks.compare: {error}", file=sys.stderr)
        return 1
    path = options.out or file_for(results)
    records.write(path, results)
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
