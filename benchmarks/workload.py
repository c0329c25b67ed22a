"""Workloads: how long requests are, when they come, and which tokens they read.

The three are sampled separately, each by a generator of its own, so that one may change and the
others stay. For a seed `s`, with numpy's default generator:

    lengths    default_rng(s)       all prompt lengths, then all output lengths
    tokens     default_rng([s, 1])  the prompts one after the other
    arrivals   default_rng([s, 2])  gaps of mean 1, divided by the rate

So a trace at another rate is the same trace, stretched, and `mixed_lengths` of 64 requests with
seed 0 always has 17,709 prompt tokens and 4,230 output tokens. Lengths are those of Orca's
evaluation (section 6.2: prompts of 32 to 512 tokens, outputs of 1 to 128) unless others are asked
for, or those of public traces of production, whose files everybody gets from their publishers.
"""

import argparse
import csv
import datetime
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

PROMPT_TOKENS = (32, 512)
OUTPUT_TOKENS = (1, 128)
"""Shortest and longest, all lengths equally likely, as in the paper."""

FORMATS = ("azure", "burstgpt")


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths of a request, in tokens."""

    n_prompt: int
    n_output: int

    @property
    def n_tokens(self) -> int:
        """Both together: what a model's context must hold."""
        return self.n_prompt + self.n_output


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request to be sent, `arrival_s` seconds after the start of the run."""

    arrival_s: float
    prompt_token_ids: tuple[int, ...]
    n_output: int
    follows: int | None = field(default=None, kw_only=True)
    """Index of the request of which this is a further turn, for peers: it comes when that has
    ended, and its tokens come after that one's prompt and answer."""

    @property
    def n_prompt(self) -> int:
        return len(self.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests as they came somewhere; the first came at 0."""

    lengths: tuple[Lengths, ...]
    arrivals_s: tuple[float, ...]

    def fitting(self, max_tokens: int) -> "Trace":
        """Returns the trace without the requests that a context of so many tokens can't hold; times
        count from the first that is left."""
        return _trace(
            (arrival_s, lengths)
            for arrival_s, lengths in zip(self.arrivals_s, self.lengths, strict=True)
            if lengths.n_tokens <= max_tokens
        )

    def first(self, n_requests: int) -> "Trace":
        """Returns the trace of the first so many requests."""
        return Trace(self.lengths[:n_requests], self.arrivals_s[:n_requests])

    def at_scale(self, scale: float) -> tuple[float, ...]:
        """The times when everything goes `scale` times as fast."""
        return tuple(arrival_s / scale for arrival_s in self.arrivals_s)


def mixed_lengths(
    n_requests: int,
    *,
    seed: int,
    prompts: tuple[int, int] = PROMPT_TOKENS,
    outputs: tuple[int, int] = OUTPUT_TOKENS,
) -> tuple[Lengths, ...]:
    """Lengths of the paper's mixed trace; both bounds may occur."""
    generator = np.random.default_rng(seed)
    n_prompt = generator.integers(*prompts, n_requests, endpoint=True)
    n_output = generator.integers(*outputs, n_requests, endpoint=True)
    return tuple(map(Lengths, n_prompt.tolist(), n_output.tolist()))


def equal_lengths(n_requests: int, *, n_prompt: int, n_output: int) -> tuple[Lengths, ...]:
    """Lengths of the paper's homogeneous trace: all requests are the same."""
    return (Lengths(n_prompt, n_output),) * n_requests


def poisson_arrivals(n_requests: int, *, rate: float, seed: int) -> tuple[float, ...]:
    """Times of a Poisson process of `rate` requests a second, the first at 0."""
    gaps = np.random.default_rng([seed, 2]).exponential(1.0, n_requests)
    gaps[:1] = 0.0
    return tuple((np.cumsum(gaps) / rate).tolist())


def all_at_once(n_requests: int) -> tuple[float, ...]:
    """Everything is there at the start: the offline case."""
    return (0.0,) * n_requests


def plan(
    lengths: Sequence[Lengths], arrivals_s: Sequence[float], *, vocab_size: int, seed: int
) -> list[PlannedRequest]:
    """Requests of these lengths and times, their prompts sampled from the whole vocabulary."""
    generator = np.random.default_rng([seed, 1])
    return [
        PlannedRequest(
            arrival_s,
            tuple(generator.integers(0, vocab_size, each.n_prompt).tolist()),
            each.n_output,
        )
        for each, arrival_s in zip(lengths, arrivals_s, strict=True)
    ]


def read_trace(path: Path, file_format: str) -> Trace:
    """A trace in one of the `FORMATS`; requests that failed, without an answer, are left out.

    Raises:
        ValueError: a column is missing, or is not what it should be.
    """
    read = {"azure": _azure_request, "burstgpt": _burstgpt_request}[file_format]
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        try:
            requests = [read(row) for row in rows]
        except KeyError as error:
            raise ValueError(f"{path}: no {file_format} trace, it has no column {error}") from error
        except ValueError as error:
            raise ValueError(f"{path}, line {rows.line_num}: {error}") from error
    return _trace(each for each in requests if each[1].n_prompt and each[1].n_output)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that say what a server is asked; `from_options` reads them."""
    group = parser.add_argument_group("workload")
    group.add_argument("--requests", type=int, default=64, metavar="N")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument(
        "--prompt-tokens",
        type=_bounds,
        default=PROMPT_TOKENS,
        metavar="A[-B]",
        help="length of prompts: one number for all, or the bounds (default: 32-512)",
    )
    group.add_argument(
        "--output-tokens",
        type=_bounds,
        default=OUTPUT_TOKENS,
        metavar="A[-B]",
        help="length of outputs (default: 1-128)",
    )
    group.add_argument("--trace", type=Path, metavar="FILE", help="take lengths from a CSV file")
    group.add_argument("--trace-format", choices=FORMATS, default=FORMATS[0])
    group.add_argument(
        "--trace-scale",
        type=float,
        metavar="X",
        help="without rates, take the trace's times too, X times as fast",
    )
    group.add_argument(
        "--max-tokens", type=int, metavar="N", help="leave out what is longer, in a trace"
    )


def from_options(
    options: argparse.Namespace, *, rate: float | None, vocab_size: int
) -> list[PlannedRequest]:
    """The requests: as a Poisson process of `rate` requests a second; without a rate at the times
    of the trace if `--trace-scale` is given, else all at once.

    Raises:
        ValueError: there is no such trace.
    """
    arrivals_s = all_at_once(options.requests)
    if options.trace is None:
        lengths = mixed_lengths(
            options.requests,
            seed=options.seed,
            prompts=options.prompt_tokens,
            outputs=options.output_tokens,
        )
    else:
        trace = read_trace(options.trace, options.trace_format)
        if options.max_tokens is not None:
            trace = trace.fitting(options.max_tokens)
        trace = trace.first(options.requests)
        lengths = trace.lengths
        arrivals_s = trace.at_scale(options.trace_scale or math.inf)
    if rate is not None:
        arrivals_s = poisson_arrivals(len(lengths), rate=rate, seed=options.seed)
    return plan(lengths, arrivals_s, vocab_size=vocab_size, seed=options.seed)


def _bounds(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    return int(low), int(high or low)


def _trace(requests: Iterable[tuple[float, Lengths]]) -> Trace:
    """Returns the trace of requests, in the order of their times, which count from the first."""
    ordered = sorted(requests, key=lambda request: request[0])
    start = ordered[0][0] if ordered else 0.0
    return Trace(
        tuple(lengths for _, lengths in ordered),
        tuple(arrival_s - start for arrival_s, _ in ordered),
    )


def _azure_request(row: dict[str, str]) -> tuple[float, Lengths]:
    """Returns a request of Azure's LLM inference traces of 2023 (Splitwise) and 2024
    (DynamoLLM)."""
    time = datetime.datetime.fromisoformat(row["TIMESTAMP"])
    lengths = Lengths(int(row["ContextTokens"]), int(row["GeneratedTokens"]))
    return time.replace(tzinfo=time.tzinfo or datetime.UTC).timestamp(), lengths


def _burstgpt_request(row: dict[str, str]) -> tuple[float, Lengths]:
    """Returns a request of BurstGPT, with or without the columns of sessions."""
    lengths = Lengths(int(row["Request tokens"]), int(row["Response tokens"]))
    return float(row["Timestamp"]), lengths
