"""Recordings of real runs that the website shows side by side: request-level batches and Orca.

    python -m benchmarks.make_model build/llama-125m
    python -m benchmarks.serving.recordings              about three minutes on two cores

Starts a whole local system on two stages for each kind of scheduling in turn and sends the same
requests at the same times. Writes the scheduler's recording, without its decisions. The model is so
large that stages spend most of their time computing. Of several runs of each kind, the fastest is
kept, since other processes may have slowed down the other runs:

    request_level    a batch runs until its longest answer is complete    (baseline)
    orca             iteration level: Algorithm 1
    chunked          the same with a bounded number of tokens in an iteration

Prompts are short, outputs have very different lengths, and some requests arrive late. So the
recordings show requests that end early and leave the batch, and late requests that join the batch
or wait. Drafts are switched off, so that an iteration computes one token of each request.
"""

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks import local_system
from benchmarks.machine import ROOT

MODEL = ROOT / "build" / "llama-125m"
OUT = ROOT / "services" / "frontend" / "page" / "recordings"
MAX_BYTES = 300_000
"""Largest size of a recording in bytes. A page loads all recordings."""

N_STAGES = 2
MAX_BATCH_SIZE = 4
TIMEOUT_S = 60.0
SETTLE_S = 0.8
"""Seconds to wait until the timings of the last iterations have arrived. Stages report them four
times a second."""

COMMON = (
    f"--stages={N_STAGES}",
    f"--max-batch-size={MAX_BATCH_SIZE}",
    f"--pipeline-depth={N_STAGES}",
    "--threads=1",
)
VARIANTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "request_level": ("benchmarks.paper.baselines", ("--baseline=request_level",)),
    "orca": ("services.local", ("--policy=orca",)),
    "chunked": ("services.local", ("--policy=chunked", "--max-batch-tokens=16")),
}
"""For each recording by its name, the module that is run and the module's options."""


@dataclass(frozen=True, slots=True)
class Visit:
    """A request: its arrival time in seconds, and its lengths in tokens."""

    at_s: float
    n_prompt: int
    n_output: int


VISITS = (
    Visit(0.00, 6, 10),
    Visit(0.00, 10, 52),
    Visit(0.03, 12, 9),
    Visit(0.03, 20, 14),
    Visit(0.06, 9, 60),
    Visit(0.06, 16, 8),
    Visit(0.12, 24, 12),
    Visit(0.20, 8, 16),
    Visit(0.30, 14, 11),
    Visit(0.42, 18, 44),
    Visit(0.55, 7, 13),
    Visit(0.70, 22, 15),
)
"""The requests of a recording. No two have the same pair of lengths, so that the lengths identify a
request."""


def prompt_of(visit: Visit, index: int) -> list[int]:
    """Returns a prompt whose first token differs from the first tokens of all other prompts."""
    return [100 + 37 * index + (7 * place) % 31 for place in range(visit.n_prompt)]


async def ask(client: httpx.AsyncClient, visit: Visit, index: int) -> None:
    """Sends a request at its arrival time, and waits for the answer.

    Raises:
        httpx.HTTPStatusError: the request was refused.
    """
    await asyncio.sleep(visit.at_s)
    body = {
        "prompt": prompt_of(visit, index),
        "max_tokens": visit.n_output,
        "ignore_eos": True,
        "temperature": 0,
    }
    (await client.post("/v1/completions", json=body)).raise_for_status()


async def run(name: str, path: Path, model: Path) -> None:
    """Starts a system of the variant `name` that records its scheduling into the file `path`, and
    sends all requests to the system."""
    module, options = VARIANTS[name]
    settings = f"--scheduler=record={path},speculative-tokens=0,admission=reserve"
    arguments = (f"--model={model}", "--kv-memory=64MiB", *COMMON, *options, settings)
    async with local_system.running(arguments, module=module) as system:
        limits = httpx.Limits(max_connections=len(VISITS))
        async with httpx.AsyncClient(
            base_url=system.http, timeout=TIMEOUT_S, limits=limits
        ) as client:
            first = Visit(0.0, 5, 4)  # the first requests of a system, and of a client, are slow
            await asyncio.gather(*(ask(client, first, len(VISITS) + i) for i in range(len(VISITS))))
            await asyncio.sleep(SETTLE_S)
            await asyncio.gather(*(ask(client, visit, i) for i, visit in enumerate(VISITS)))
        await asyncio.sleep(SETTLE_S)


def shown(lines: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the lines of a recording that the page shows: the header, the epoch, and all lines
    from the first of the requests on, without decisions, figures and marks.

    Requests are numbered from 1 in the order of `VISITS`, so that a request has the same number in
    all recordings.
    """
    places = {(visit.n_prompt, visit.n_output): i for i, visit in enumerate(VISITS, 1)}
    numbers: dict[int, int] = {}
    for line in lines:
        length = line.get("n_prompt_tokens"), line.get("max_new_tokens")
        if length in places:
            numbers[line["number"]] = places[length]
    begins = next(i for i, line in enumerate(lines) if line.get("number") in numbers)
    for line in lines[:begins]:
        if line["type"] in ("recording", "epoch"):
            yield {**line, "t": lines[begins]["t"]} if "t" in line else line
    for line in lines[begins:]:
        if line["type"] not in ("decision", "figures", "mark"):
            yield renumbered(line, numbers)


def renumbered(line: dict[str, Any], numbers: Mapping[int, int]) -> dict[str, Any]:
    """Returns a line in which each request number is replaced by its value in `numbers`."""
    result = dict(line)
    if "number" in line:
        result["number"] = numbers[line["number"]]
    for field in ("numbers", "waiting", "running"):
        if field in line:
            result[field] = [numbers[number] for number in line[field]]
    if "first_tokens" in line:
        result["first_tokens"] = [[numbers[number], s] for number, s in line["first_tokens"]]
    return result


def took_s(recorded: Path) -> float:
    """Returns the seconds between the first and the last line about a request, among the lines that
    the page shows."""
    lines = list(shown([json.loads(line) for line in recorded.read_text().splitlines()]))
    times = [line["t"] for line in lines if line["type"] == "request"]
    return float(times[-1] - times[0])


def write(recorded: Path, to: Path) -> int:
    """Writes the lines of a recording that the page shows, and returns the size of the file in
    bytes.

    Raises:
        ValueError: the recording is too large, or requests or tokens are missing.
    """
    lines = [json.loads(line) for line in recorded.read_text().splitlines()]
    kept = list(shown(lines))
    n_tokens = sum(sum(line["n_new_tokens"]) for line in kept if line["type"] == "iteration")
    n_ended = sum(line.get("turn") == "ended" for line in kept)
    if n_ended != len(VISITS) or not n_tokens:
        raise ValueError(f"{recorded}: {n_ended} requests ended, with {n_tokens} tokens")
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in kept)
    if len(text) > MAX_BYTES:
        raise ValueError(f"{recorded}: {len(text)} bytes, {MAX_BYTES} at most")
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(text)
    return len(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT, help="the directory of the recordings")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each; the quickest is kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        recorded: dict[str, list[Path]] = {name: [] for name in VARIANTS}
        for index, name in itertools.product(range(options.rounds), VARIANTS):
            path = Path(directory) / f"{name}.{index}.jsonl"
            asyncio.run(run(name, path, options.model))
            recorded[name].append(path)
        for name, paths in recorded.items():
            quickest = min(paths, key=took_s)
            n_bytes = write(quickest, options.out / f"{name}.jsonl")
            print(f"{name}: {took_s(quickest):.3f} s, {n_bytes} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
