"""The gain of optimistic admission, where requests use a quarter of their `max_tokens`.

    python -m benchmarks.make_model /tmp/llama-125m
    python -m benchmarks.serving.preemption /tmp/llama-125m
    python -m benchmarks.serving.preemption /tmp/llama-125m --memory 2 --rounds 8

Requests of mixed lengths arrive all at once. All have the same `max_tokens`, four times the mean
length of their answers; a stop token ends each answer. The K/V memory is a quarter of the memory
that a full batch reserves. Whole systems on loopback serve the requests over HTTP in turns: one
reserves all memory that a request can need, the other admits optimistically. Answers must have the
same tokens in all runs, even if requests were preempted and recomputed.

Prints the throughput of each run and the number of preemptions. The result is the ratio of the
throughputs of optimistic and full reservation, the median over the rounds. The ratio cannot exceed
the throughput of a full batch divided by that of a quarter batch, and a CPU computes 32 requests
hardly faster than 8. With `--memory 2` all reservations fit into memory, and the ratio is the cost
of the accounting for optimistic admission.

Drafts are switched off: they make small batches faster, and a model of random weights repeats
itself.
"""

import argparse
import asyncio
import json
import re
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvloop
from matplotlib.figure import Figure

from benchmarks import local_system, machine

TIMEOUT_S = 600.0
FIRST_TOKEN_ID, VOCAB_SIZE, STOP_TOKEN_ID = 4, 1000, 3
BLOCK_SIZE = 16
PREEMPTIONS = re.compile(r"^orcinus_preemptions_total (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of all requests on one system: the tokens of the answers, the seconds, and the number
    of preemptions."""

    is_optimistic: bool
    answers: tuple[tuple[int, ...], ...]
    seconds: float
    n_preemptions: int

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second."""
        return sum(map(len, self.answers)) / self.seconds


def bodies(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the bodies of the requests. The length of each answer is fixed: after `min_tokens`
    tokens, a logit bias makes the next token the stop token."""
    generator = np.random.default_rng(options.seed)
    n_prompts = generator.integers(16, options.n_prompt + 1, options.requests).tolist()
    n_used = generator.integers(4, options.n_used + 1, options.requests).tolist()
    max_tokens = 4 * round(statistics.mean(n_used))
    return [
        {
            "prompt": generator.integers(FIRST_TOKEN_ID, VOCAB_SIZE, n_prompt).tolist(),
            "max_tokens": max_tokens,
            "min_tokens": n_output - 1,
            "stop_token_ids": [STOP_TOKEN_ID],
            "logit_bias": {str(STOP_TOKEN_ID): 100},
            "ignore_eos": True,
            "temperature": 0,
            "return_token_ids": True,
        }
        for n_prompt, n_output in zip(n_prompts, n_used, strict=True)
    ]


def n_slots(requests: list[dict[str, Any]], batch_size: int, share: float) -> int:
    """Returns the number of K/V slots to use: `share` of the slots that a full batch of
    `batch_size` requests reserves, but at least enough for the longest request."""
    needs: list[int] = [len(request["prompt"]) + request["max_tokens"] for request in requests]
    wanted = int(share * batch_size * statistics.mean(needs))
    return max(wanted, max(needs) + BLOCK_SIZE)


async def run_once(options: argparse.Namespace, *, is_optimistic: bool) -> Run:
    """Starts a system and serves all requests with it."""
    requests = bodies(options)
    admission = "optimistic" if is_optimistic else "reserve"
    slots = n_slots(requests, options.batch_size, options.memory)
    arguments = [f"--model={options.model}", "--log-level=ERROR", "--metrics"]
    arguments += [f"--max-batch-size={options.batch_size}", *options.system.split()]
    arguments += [f"--scheduler=admission={admission},n_slots={slots},speculative_tokens=0"]
    limits = httpx.Limits(max_connections=options.requests)
    async with (
        local_system.running(arguments) as system,
        httpx.AsyncClient(base_url=system.http, timeout=TIMEOUT_S, limits=limits) as client,
    ):
        # Expected lengths of answers are learned from earlier requests.
        await asyncio.gather(*(ask(client, request) for request in requests[: options.batch_size]))
        before = await n_preemptions(client, system.metrics["scheduler"])
        start_s = time.perf_counter()
        answers = await asyncio.gather(*(ask(client, request) for request in requests))
        seconds = time.perf_counter() - start_s
        after = await n_preemptions(client, system.metrics["scheduler"])
    return Run(is_optimistic, tuple(answers), seconds, after - before)


async def ask(client: httpx.AsyncClient, request: dict[str, Any]) -> tuple[int, ...]:
    """Sends a request and returns the token ids of its answer. Raises RuntimeError if the request
    is refused."""
    answer = await client.post("/v1/completions", json=request)
    if answer.status_code != httpx.codes.OK:
        raise RuntimeError(answer.text)
    return tuple(answer.json()["choices"][0]["token_ids"])


async def n_preemptions(client: httpx.AsyncClient, url: str) -> int:
    """Returns the number of preemptions since the scheduler's start, from its metrics at `url`."""
    found = PREEMPTIONS.search((await client.get(url)).text)
    if found is None:
        raise RuntimeError(f"no preemptions at {url}")
    return int(float(found[1]))


def report(runs: list[Run]) -> str:
    """Returns the comparison of the runs as text.

    Raises:
        RuntimeError: answers of two runs differ.
    """
    if any(run.answers != runs[0].answers for run in runs):
        raise RuntimeError("answers differ")
    return f"throughput {ratio(runs):.3f} x, same tokens"


def line_of(run: Run) -> str:
    """Returns the results of one run as a line of text."""
    kind = "optimistic" if run.is_optimistic else "reserving"
    return f"{kind:>10}: {run.tokens_per_s:8.1f} tokens/s, {run.n_preemptions} preempted"


def ratio(runs: list[Run]) -> float:
    """Returns the throughput with optimistic admission divided by the throughput with full
    reservation, as the median over the rounds."""
    return statistics.median(
        lent.tokens_per_s / reserved.tokens_per_s
        for reserved, lent in zip(
            (run for run in runs if not run.is_optimistic),
            (run for run in runs if run.is_optimistic),
            strict=True,
        )
    )


def draw(path: Path, runs: list[Run]) -> None:
    """Draws the throughput of each run, in the order of the runs."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for index, run in enumerate(runs):
        colour = "C1" if run.is_optimistic else "C0"
        label = "optimistic" if run.is_optimistic else "reserving"
        bars = axes.bar(index, run.tokens_per_s, color=colour, label=label if index < 2 else None)
        axes.bar_label(bars, [f"{run.n_preemptions} preempted"], fontsize=8)
    axes.set_xticks([])
    axes.set_xlabel("runs, in their order")
    axes.set_ylabel("throughput (tokens/s)")
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


async def run(options: argparse.Namespace) -> None:
    """Runs all rounds and prints the results."""
    runs = []
    for number in range(options.rounds):
        for is_optimistic in (False, True) if number % 2 == 0 else (True, False):
            runs.append(await run_once(options, is_optimistic=is_optimistic))
            sys.stdout.write(line_of(runs[-1]) + "\n")
            sys.stdout.flush()
    sys.stdout.write(report(runs) + "\n")
    if options.png is not None:
        draw(options.png, runs)
    if options.json is not None:
        record = {**machine.describe(), "ratio": round(ratio(runs), 3), "runs": rows(runs)}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def rows(runs: list[Run]) -> list[dict[str, Any]]:
    """Returns the results of all runs as dictionaries for the record."""
    return [
        {
            "is_optimistic": run.is_optimistic,
            "tokens_per_s": round(run.tokens_per_s, 1),
            "n_preemptions": run.n_preemptions,
        }
        for run in runs
    ]


def main() -> None:
    """Parses the command line and runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="models/demo")
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--batch-size", type=int, default=16, help="requests of a full batch")
    parser.add_argument("--n-prompt", type=int, default=64, help="longest prompt")
    parser.add_argument("--n-used", type=int, default=256, help="longest answer")
    parser.add_argument("--memory", type=float, default=0.25, help="share of all reservations")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs")
    parser.add_argument("--system", default="", help="more options of services.local")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--png", type=Path, default=None)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record")
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
