"""Loads: requests, many of whose prompts share beginnings, and the clients that send them.

- Mooncake: an hour of a chat service, from its publisher's file (`simulator.mooncake`).
- Chats: users who talk in several turns, made by a generator.
- Azure: lengths of a service whose prompts share nothing here (`simulator.published_traces`).

The traces have no names of clients, so each conversation is assigned to one of `N_CLIENTS` clients
at random. The first `N_LARGE` of them get a share of `LARGE_PART` of all conversations.
"""

import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from services.scheduler.core.clients.accounts import AccountLimits, AccountUse
from simulator.engine import A_TOKEN, STOP_TOKEN, Arrival
from simulator.mooncake import FIRST_TOKEN, MOONCAKE_BLOCK, read_mooncake, repeated
from simulator.published_traces import PUBLISHED, bursty_arrivals

N_CLIENTS, N_LARGE, LARGE_PART = 8, 2, 0.5
BLOCK = 64
"""Number of tokens in a K/V block, for loads whose trace has no block size."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests in the order of their arrival, and the block size of their prefix cache."""

    arrivals: tuple[Arrival, ...]
    block_size: int

    def at_rate(self, rate: float) -> "Load":
        """Returns the load with all arrival times scaled to a mean of `rate` requests per
        second."""
        span_s = self.arrivals[-1].time_s - self.arrivals[0].time_s
        factor = (len(self.arrivals) - 1) / rate / span_s
        return Load(
            tuple(replace(one, time_s=factor * one.time_s) for one in self.arrivals),
            self.block_size,
        )

    def first(self, n_requests: int) -> "Load":
        """Returns the load of the first `n_requests` requests."""
        return Load(self.arrivals[:n_requests], self.block_size)


class Clients:
    """Accounts of clients, to which conversations are assigned at random."""

    def __init__(self, seed: int) -> None:
        self._accounts = [AccountUse(AccountLimits(), name=str(n)) for n in range(N_CLIENTS)]
        self._random = random.Random(f"clients {seed}")

    def deal(self) -> AccountUse:
        """Returns the client of the next conversation."""
        if self._random.random() < LARGE_PART:
            return self._accounts[self._random.randrange(N_LARGE)]
        return self._accounts[self._random.randrange(N_LARGE, N_CLIENTS)]


def mooncake(path: Path, n_requests: int, *, seed: int) -> Load:
    """Returns `n_requests` requests of the trace that Mooncake has published, from the file `path`.

    Conversations are sampled, each with all its requests; the last one may be cut off. All prompts
    begin with the same block. Requests with an equal second block are one conversation.

    Raises:
        ValueError: a line is malformed, or the file has fewer lines than `n_requests`.
    """
    rows = read_mooncake(path)
    if len(rows) < n_requests:
        raise ValueError(f"{path}: has {len(rows)} requests, fewer than {n_requests}")
    conversations = list(dict.fromkeys(row.conversation for row in rows))
    random.Random(f"conversations {seed}").shuffle(conversations)
    rank = {one: place for place, one in enumerate(conversations)}
    chosen = sorted(rows, key=lambda row: rank[row.conversation])[:n_requests]
    clients = Clients(seed)
    accounts = {one: clients.deal() for one in dict.fromkeys(row.conversation for row in chosen)}
    return Load(
        tuple(
            _arrival(row.time_s, row.prompt, row.n_output, accounts[row.conversation])
            for row in sorted(chosen, key=lambda row: row.time_s)
        ),
        MOONCAKE_BLOCK,
    )


N_APPS = 24
SYSTEM_TOKENS = (400, 6000)
"""Lengths in tokens of the shortest and the longest system prompt. The logarithm of the length is
uniform."""
MEDIAN_MESSAGE, MEDIAN_ANSWER, SPREAD = 300, 200, 0.8
"""Median lengths of messages and answers in tokens, and the standard deviation of the logarithms of
both lengths."""
MAX_ANSWER = 1000
MEAN_TURNS = 6.0
TOKEN_S, MEAN_PAUSE_S = 0.025, 6.0
"""Assumed seconds per token of an answer, and mean seconds from the end of an answer to the next
message."""


class Turn(NamedTuple):
    """A request of a chat. `runs` describes the prompt as pairs of a token and its number of
    repetitions."""

    time_s: float
    runs: Sequence[tuple[int, int]]
    n_output: int
    account: AccountUse


def chats(n_requests: int, *, rate: float, seed: int) -> Load:
    """Returns `n_requests` turns of chats, with about `rate` turns per second.

    Chats begin as a Poisson process. Each chat belongs to one of `N_APPS` apps and begins with the
    app's system prompt; app number k has a probability in proportion to 1 / k. A prompt is the
    system prompt, all earlier messages and answers of the chat, and a new message. The number of
    turns is geometric, pauses are exponential. The next message arrives a pause after the end of
    the answer, which is assumed to take `TOKEN_S` per token. Chats that have begun before the first
    request are in their later turns.
    """
    generator = np.random.default_rng([seed, 5])
    low, high = np.log(SYSTEM_TOKENS)
    systems = np.exp(generator.uniform(low, high, N_APPS)).astype(int).tolist()
    weights = 1 / np.arange(1, N_APPS + 1)
    clients = Clients(seed)
    tokens = iter(range(FIRST_TOKEN + N_APPS, 2**31))
    span_s = n_requests / rate
    lead_s = 4 * MEAN_TURNS * (MEAN_PAUSE_S + MEDIAN_ANSWER * TOKEN_S)
    turns: list[Turn] = []
    begin_s = -lead_s
    while begin_s < 1.2 * span_s:
        begin_s += generator.exponential(MEAN_TURNS / rate)
        app = int(generator.choice(N_APPS, p=weights / weights.sum()))
        opening = (FIRST_TOKEN + app, systems[app])
        turns += _chat(begin_s, opening, clients.deal(), tokens, generator)
    coming = sorted((one for one in turns if one.time_s >= 0), key=lambda one: one.time_s)
    return Load(
        tuple(
            _arrival(one.time_s, repeated(one.runs), one.n_output, one.account)
            for one in coming[:n_requests]
        ),
        BLOCK,
    )


def _chat(
    begin_s: float,
    opening: tuple[int, int],
    account: AccountUse,
    tokens: Iterator[int],
    generator: np.random.Generator,
) -> Iterator[Turn]:
    """Yields the turns of one chat. `opening` is the system prompt: one token and the number of its
    repetitions. `tokens` yields the token that each message repeats."""
    runs, time_s = [opening], begin_s
    for _ in range(int(generator.geometric(1 / MEAN_TURNS))):
        n_message, n_answer = np.exp(
            generator.normal(np.log((MEDIAN_MESSAGE, MEDIAN_ANSWER)), SPREAD)
        ).tolist()
        n_output = min(MAX_ANSWER, 2 + int(n_answer))
        runs = [*runs, (next(tokens), 1 + int(n_message))]
        yield Turn(time_s, runs, n_output, account)
        runs = [*runs, (A_TOKEN, n_output - 1), (STOP_TOKEN, 1)]
        time_s += n_output * TOKEN_S + generator.exponential(MEAN_PAUSE_S)


def azure(n_requests: int, *, seed: int) -> Load:
    """Returns requests with the lengths and the variation of arrivals of Azure's conversations of
    2023, sampled from the published distributions. Each request is a conversation of its own, and
    no two prompts share a token."""
    trace = PUBLISHED["Azure 2023 conversation"]
    times_s = bursty_arrivals(n_requests, rate=1.0, variation=trace.variation, seed=seed)
    clients = Clients(seed)
    lengths = trace.lengths(n_requests, seed=seed)
    return Load(
        tuple(
            _arrival(time_s, repeated([(token, one.n_prompt)]), one.n_output, clients.deal())
            for token, (time_s, one) in enumerate(zip(times_s, lengths, strict=True), FIRST_TOKEN)
        ),
        BLOCK,
    )


def _arrival(time_s: float, prompt: "array[int]", n_output: int, account: AccountUse) -> Arrival:
    return Arrival(time_s, len(prompt), max(1, n_output), prompt_token_ids=prompt, account=account)
