"""Workloads: the lengths of requests, their arrival times, and the tokens of their prompts.

The three are sampled separately, each by a generator of its own, so that one may change and the
others stay. For a seed `s`, with numpy's default generator:

    lengths    default_rng(s)          all prompt lengths, then all output lengths
    tokens     default_rng([s, 1, r])  the prompts of run r one after the other, from r = 0
    arrivals   default_rng([s, 2])     gaps of mean 1, divided by the rate

So a trace at another rate has the same requests at scaled times, and `mixed_lengths` of 64 requests
with seed 0 always has 17,709 prompt tokens and 4,230 output tokens. Runs on one server have
different prompts, since servers keep the beginnings of prompts. By default, lengths are sampled as
in Orca's evaluation (section 6.2): prompts of 32 to 512 tokens, and outputs of 1 to 128. The
options can choose other bounds, or a public trace of production, whose file is downloaded from its
publisher.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from simulator.workload import FORMATS as FORMATS
from simulator.workload import OUTPUT_TOKENS, PROMPT_TOKENS
from simulator.workload import Lengths as Lengths
from simulator.workload import Trace as Trace
from simulator.workload import all_at_once as all_at_once
from simulator.workload import equal_lengths as equal_lengths
from simulator.workload import mixed_lengths as mixed_lengths
from simulator.workload import poisson_arrivals as poisson_arrivals
from simulator.workload import read_trace as read_trace


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request to be sent `arrival_s` seconds after the start of the run. If the request follows
    another one (`follows`), the seconds count from the end of the other request."""

    arrival_s: float
    prompt_token_ids: tuple[int, ...]
    n_output: int
    follows: int | None = field(default=None, kw_only=True)
    """Index of the previous request of the same conversation, or None. The tokens of this request
    come after the prompt and the answer of the previous request. Only peers support this field."""

    @property
    def n_prompt(self) -> int:
        return len(self.prompt_token_ids)


def plan(
    lengths: Sequence[Lengths],
    arrivals_s: Sequence[float],
    *,
    vocab_size: int,
    seed: int,
    run: int = 0,
) -> list[PlannedRequest]:
    """Returns requests with the given lengths and arrival times. The tokens of prompts are sampled
    from the whole vocabulary; runs with different numbers `run` have different tokens."""
    generator = np.random.default_rng([seed, 1, run])
    return [
        PlannedRequest(
            arrival_s,
            tuple(generator.integers(0, vocab_size, each.n_prompt).tolist()),
            each.n_output,
        )
        for each, arrival_s in zip(lengths, arrivals_s, strict=True)
    ]


AnyRequest = TypeVar("AnyRequest", bound=PlannedRequest)


def backwards(requests: Sequence[AnyRequest]) -> list[AnyRequest]:
    """Returns the requests with reversed prompts. Sent before the original requests, these leave
    nothing in a prefix cache that the original prompts could use."""
    return [replace(each, prompt_token_ids=each.prompt_token_ids[::-1]) for each in requests]


def rehearsal(
    requests: Sequence[PlannedRequest], *, n_requests: int, n_output: int
) -> list[PlannedRequest]:
    """Returns requests to warm up a server: the first `n_requests` requests with reversed prompts,
    all at once, with at most `n_output` output tokens each."""
    return [
        PlannedRequest(0.0, each.prompt_token_ids, min(each.n_output, n_output))
        for each in backwards(requests[:n_requests])
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that describe a workload and that `from_options` reads."""
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
    options: argparse.Namespace, *, rate: float | None, vocab_size: int, run: int = 0
) -> list[PlannedRequest]:
    """Returns the requests of a run. With a rate, they arrive as a Poisson process of `rate`
    requests per second. Without a rate, they arrive at the times of the trace if `--trace-scale` is
    given, else all at once.

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
    return plan(lengths, arrivals_s, vocab_size=vocab_size, seed=options.seed, run=run)


def _bounds(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    return int(low), int(high or low)
