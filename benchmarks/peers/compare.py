"""Compares local Orcinus systems with other engines ("peers"), side by side on this machine.

    python -m benchmarks.peers.install vllm openvino
    python -m benchmarks.make_model /tmp/llama-125m
    python -m benchmarks.peers.compare --model /tmp/llama-125m --peers vllm,openvino
    python -m benchmarks.peers.compare --model /tmp/llama-125m --peers vllm,openvino \\
        --rates 0.5x,0.9x

`ours` in the tables is the whole service, `services.local`, under load over HTTP. A peer is an
engine alone, stepped in process, without a server (`benchmarks.peers`). All engines load their
model at the start and then take turns. A rate is a number of requests per second. With an `x`
behind it, it is a multiple of our own offline throughput, which is measured with requests that all
arrive at once. The processor time of the load's client counts as ours.

Before the measurements, each engine answers the workload once to warm up. It also answers a part of
the workload one request at a time, so that tokens can be compared. Greedy decoding is the same
computation in all engines, but rounding may change one argmax, and all later tokens of that answer
then differ.
"""

import argparse
import asyncio
import contextlib
import os
import shlex
import signal
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop
from tqdm import tqdm

from benchmarks import machine, records, workload
from benchmarks.peers import contest
from benchmarks.peers.catalogue import DEFAULT_VENVS, PEERS
from benchmarks.peers.contest import WrongAnswer
from benchmarks.peers.contest_table import line_of, table
from benchmarks.peers.contestants import OUR_DTYPES, Ours, Peer, start
from benchmarks.peers.peer_process import PeerFailed
from benchmarks.records import RunRecord
from benchmarks.workload import PlannedRequest
from services.worker.models.checkpoint import open_checkpoint

OFFLINE = "offline"
N_COMPARED = 8
"""Number of requests for which the sampled tokens of the engines are compared."""
RESULTS = machine.ROOT / "benchmarks" / "results"


async def compare(options: argparse.Namespace) -> list[RunRecord]:
    """Runs all cases of the options, prints a table for each case, and returns all runs."""
    task = asyncio.current_task()
    assert task is not None
    # Peers are stopped (SIGSTOP) most of the time, so no other process would end them.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    meta = {**machine.describe(), "model": options.model.name, "dtype": options.dtype}
    vocab_size = open_checkpoint(options.model).config.vocab_size
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
    """Runs the workload once on each engine. Prints for each engine the share of greedy tokens that
    agree with the first engine's tokens before the first difference."""
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
    """Returns our own offline throughput in requests per second: the median of the offline runs in
    `results`, or the throughput of an additional run if there are none."""
    together = [run for run in results if run.meta["case"] == OFFLINE]
    runs = [
        run.summary() for run in contest.undisturbed(together) if run.meta["engine"] == ours.name
    ]
    if not runs:
        runs = [records.Summary.of(await ours.run(offline))]
    return statistics.median(run.requests_per_s for run in runs)


def agreement(mine: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Returns the share of all tokens that come before the first difference between the two answers
    to the same request."""
    n_same = sum(
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(mine, theirs, strict=True)
    )
    return n_same / sum(len(x) for x in mine)


def rate_of(text: str, capacity: float | None) -> float | None:
    """Returns the requests per second that `text`, a value of `--rates`, means. Returns None if all
    requests arrive at once. `capacity` is our offline throughput, which values that end in `x`
    need."""
    if text == OFFLINE:
        return None
    if text.endswith("x"):
        assert capacity is not None
        return float(text[:-1]) * capacity
    return float(text)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the parsed command line; exits with a message if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint, or a GGUF file")
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
    """Returns the default path of the results, whose name has the model, the element type and the
    start time of the first run."""
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
        print(f"benchmarks.peers.compare: {error}", file=sys.stderr)
        return 1
    path = options.out or file_for(results)
    records.write(path, results)
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
