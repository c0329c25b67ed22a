"""Traces: the lengths of requests and their times of arrival.

Lengths and times are sampled by two separate generators, so that one may change without the other.
For a seed `s`, with numpy's default generator:

    lengths    default_rng(s)       all prompt lengths, then all output lengths
    arrivals   default_rng([s, 2])  gaps of mean 1, divided by the rate

So a trace at another rate has the same requests, with all gaps scaled. By default lengths are as in
Orca's evaluation (section 6.2: prompts of 32 to 512 tokens, outputs of 1 to 128). Lengths can also
be read from public traces of production, whose files their publishers offer.
"""

import csv
import datetime
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PROMPT_TOKENS = (32, 512)
OUTPUT_TOKENS = (1, 128)
"""Shortest and longest length in tokens; all lengths in between are equally likely, as in the
paper."""

FORMATS = ("azure", "burstgpt")


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths of a request, in tokens."""

    n_prompt: int
    n_output: int

    @property
    def n_tokens(self) -> int:
        """Number of tokens of prompt and output together, which the model's context must hold."""
        return self.n_prompt + self.n_output


@dataclass(frozen=True, slots=True)
class Trace:
    """A sequence of requests with their times of arrival in seconds; the first arrives at 0."""

    lengths: tuple[Lengths, ...]
    arrivals_s: tuple[float, ...]

    def fitting(self, max_tokens: int) -> "Trace":
        """Returns the trace without requests of more than `max_tokens` tokens. Times count from the
        first request that is left."""
        return _trace(
            (arrival_s, lengths)
            for arrival_s, lengths in zip(self.arrivals_s, self.lengths, strict=True)
            if lengths.n_tokens <= max_tokens
        )

    def first(self, n_requests: int) -> "Trace":
        """Returns a trace of the first `n_requests` requests."""
        return Trace(self.lengths[:n_requests], self.arrivals_s[:n_requests])

    def at_scale(self, scale: float) -> tuple[float, ...]:
        """Returns the times of arrival for a rate that is `scale` times as high."""
        return tuple(arrival_s / scale for arrival_s in self.arrivals_s)


def mixed_lengths(
    n_requests: int,
    *,
    seed: int,
    prompts: tuple[int, int] = PROMPT_TOKENS,
    outputs: tuple[int, int] = OUTPUT_TOKENS,
) -> tuple[Lengths, ...]:
    """Returns lengths as in the paper's mixed trace, sampled uniformly between the bounds in
    `prompts` and in `outputs`, both included."""
    generator = np.random.default_rng(seed)
    n_prompt = generator.integers(*prompts, n_requests, endpoint=True)
    n_output = generator.integers(*outputs, n_requests, endpoint=True)
    return tuple(map(Lengths, n_prompt.tolist(), n_output.tolist()))


def equal_lengths(n_requests: int, *, n_prompt: int, n_output: int) -> tuple[Lengths, ...]:
    """Returns lengths as in the paper's homogeneous trace: all requests have equal lengths."""
    return (Lengths(n_prompt, n_output),) * n_requests


def poisson_arrivals(n_requests: int, *, rate: float, seed: int) -> tuple[float, ...]:
    """Returns times of arrival, in seconds, of a Poisson process of `rate` requests per second; the
    first is 0."""
    gaps = np.random.default_rng([seed, 2]).exponential(1.0, n_requests)
    gaps[:1] = 0.0
    return tuple((np.cumsum(gaps) / rate).tolist())


def all_at_once(n_requests: int) -> tuple[float, ...]:
    """Returns times of arrival that are all 0: the offline case."""
    return (0.0,) * n_requests


def read_trace(path: Path, file_format: str) -> Trace:
    """Reads a trace in one of the `FORMATS`. Requests that failed and have no answer are left out.

    Raises:
        ValueError: a column is missing, or a value is malformed.
    """
    read = {"azure": _azure_request, "burstgpt": _burstgpt_request}[file_format]
    with path.open(newline="") as file:
        rows = csv.DictReader(file, restval="")
        try:
            requests = [read(row) for row in rows]
        except KeyError as error:
            raise ValueError(f"{path}: no {file_format} trace, it has no column {error}") from error
        except (ValueError, csv.Error) as error:
            raise ValueError(f"{path}, line {rows.line_num}: {error}") from error
    return _trace(each for each in requests if each[1].n_prompt > 0 and each[1].n_output > 0)


def _trace(requests: Iterable[tuple[float, Lengths]]) -> Trace:
    """Returns the trace of requests, sorted by time of arrival; the first arrives at 0."""
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
    """Returns a request of BurstGPT, from a file with or without the columns of sessions."""
    lengths = Lengths(int(row["Request tokens"]), int(row["Response tokens"]))
    return float(row["Timestamp"]), lengths
