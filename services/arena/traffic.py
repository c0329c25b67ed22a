"""The requests that each entrant serves. They are sampled from published distributions, or read
from files.

A trace is `paper`, one of `NAMES`, or a file: Azure's or BurstGPT's (CSV), or Mooncake's (JSON
lines). Traces do not name clients, so the client of each request is chosen at random. The first
client has half of all requests, and the other clients share the rest.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from services.scheduler.core.clients.accounts import AccountLimits, AccountUse
from simulator.engine import Arrival
from simulator.mooncake import read_mooncake
from simulator.published_traces import PUBLISHED, bursty_arrivals
from simulator.workload import Lengths, Trace, mixed_lengths, poisson_arrivals, read_trace

PAPER = "paper"
NAMES: Mapping[str, str] = {
    "azure-code": "Azure 2023 coding",
    "azure-conversation": "Azure 2023 conversation",
    "burstgpt": "BurstGPT, GPT-4",
}
"""Names of the sampled traces, and their names in `simulator.published_traces`. `PAPER` is a
further sampled trace, with the lengths of Orca's evaluation and Poisson arrivals."""
LARGE_PART = 0.5
"""Fraction of all requests that the first client sends."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests of a trace, with the times of their arrival."""

    name: str
    arrivals: tuple[Arrival, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Options for the choice of requests from a trace."""

    n_requests: int
    max_tokens: int
    """Largest number of tokens of a prompt and its output together. Longer requests are left
    out."""
    n_clients: int = 4
    asks_exactly: bool = False
    """Whether the limit that a request sets on its output is the number of tokens that it
    generates. Otherwise the limit is the next power of two, as for clients that know the length
    roughly."""
    seed: int = 0


def traffic_of(text: str, choice: Choice) -> Traffic:
    """Returns the chosen requests of a trace. `text` is the name or the file of the trace.

    Raises:
        ValueError: there is no such trace, or the file is malformed or has no requests that fit.
    """
    path = Path(text)
    if text == PAPER:
        lengths = mixed_lengths(choice.n_requests, seed=choice.seed)
        times_s = poisson_arrivals(choice.n_requests, rate=1.0, seed=choice.seed)
        trace = Trace(lengths, times_s)
    elif text in NAMES:
        published = PUBLISHED[NAMES[text]]
        trace = Trace(
            published.lengths(choice.n_requests, seed=choice.seed),
            bursty_arrivals(
                choice.n_requests, rate=1.0, variation=published.variation, seed=choice.seed
            ),
        )
    elif path.is_file():
        trace = _read(path)
    else:
        known = ", ".join((PAPER, *NAMES))
        raise ValueError(f"trace {text!r} is no file, and none of {known}")
    trace = trace.fitting(choice.max_tokens).first(choice.n_requests)
    if not trace.lengths:
        raise ValueError(f"trace {text!r}: no request has at most {choice.max_tokens} tokens")
    return Traffic(path.stem if path.is_file() else text, _arrivals(trace, choice))


def _read(path: Path) -> Trace:
    with path.open(newline="") as file:
        first = file.readline()
    if first.lstrip().startswith("{"):
        rows = [row for row in read_mooncake(path) if row.n_output > 0]
        return Trace(
            tuple(Lengths(row.n_prompt, row.n_output) for row in rows),
            tuple(row.time_s for row in rows),
        )
    columns = next(csv.reader([first]), [])
    return read_trace(path, "azure" if "ContextTokens" in columns else "burstgpt")


def _arrivals(trace: Trace, choice: Choice) -> tuple[Arrival, ...]:
    accounts = [AccountUse(AccountLimits(), name=f"client {n}") for n in range(choice.n_clients)]
    chance = Random(f"clients {choice.seed}")
    return tuple(
        Arrival(
            time_s,
            each.n_prompt,
            each.n_output,
            max_new_tokens=each.n_output if choice.asks_exactly else _asked(each, choice),
            account=_deal(accounts, chance),
        )
        for each, time_s in zip(trace.lengths, trace.arrivals_s, strict=True)
    )


def _asked(lengths: Lengths, choice: Choice) -> int:
    """Returns the limit that a request sets on its output, in tokens: the smallest power of two
    that is not below the length of the output, but at most what `choice.max_tokens` leaves after
    the prompt."""
    power = 1 << (lengths.n_output - 1).bit_length()
    return min(power, choice.max_tokens - lengths.n_prompt)


def _deal(accounts: Sequence[AccountUse], chance: Random) -> AccountUse | None:
    if len(accounts) < 2:
        return accounts[0] if accounts else None
    if chance.random() < LARGE_PART:
        return accounts[0]
    return accounts[1 + chance.randrange(len(accounts) - 1)]
