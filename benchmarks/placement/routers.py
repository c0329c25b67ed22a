"""Routers: what gateways and load balancers in front of independent replicas do with a request.

Each request goes to one group of pipelines as soon as it arrives, and stays there.
"""

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from services.scheduler.core.request import Request

POLL_S = 0.2
"""Seconds for which a gateway uses the loads of groups before it reads them again."""

PREFIX_WEIGHT, QUEUE_WEIGHT, MEMORY_WEIGHT = 3.0, 2.0, 2.0
"""Weights of the scores of a group. They are the defaults of llm-d's endpoint picker."""


class Load(Protocol):
    """The load of a group of pipelines, as a router sees it."""

    @property
    def n_requests(self) -> int:
        """Number of requests that wait or run."""

    @property
    def n_waiting(self) -> int:
        """Number of requests that wait."""

    @property
    def kv_use(self) -> float:
        """Part of the K/V memory that running requests have reserved."""

    @property
    def n_kv_blocks(self) -> int:
        """Number of K/V blocks."""


class Router(Protocol):
    """The choice of a group for each request."""

    def choose(self, request: Request, groups: Sequence[Load], now_s: float) -> int:
        """Returns the index of the group for a request that arrives at `now_s`."""


class RoundRobin:
    """A router that gives each group its turn. With a single group, there is nothing to choose."""

    def __init__(self) -> None:
        self._turns = count()

    def choose(self, request: Request, groups: Sequence[Load], now_s: float) -> int:
        """Returns the index of the group whose turn it is."""
        return next(self._turns) % len(groups)


class LeastRequests:
    """The group that has the fewest requests now; the first of several."""

    def choose(self, request: Request, groups: Sequence[Load], now_s: float) -> int:
        """Returns the index of the group with the fewest requests."""
        return min(range(len(groups)), key=lambda index: groups[index].n_requests)


class SeenBlocks:
    """The blocks of prompts that were sent to one group lately: an approximation of its prefix
    cache. A block is known by a hash of all tokens up to its end."""

    def __init__(self, max_blocks: int) -> None:
        """Keeps the `max_blocks` blocks that were used last."""
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def n_found(self, hashes: Sequence[int]) -> int:
        """Returns how many of the first blocks of a prompt are known."""
        return next((n for n, one in enumerate(hashes) if one not in self._blocks), len(hashes))

    def add(self, hashes: Sequence[int]) -> None:
        """Adds the blocks of a prompt."""
        for one in reversed(hashes):  # so that the last blocks are forgotten first
            self._blocks[one] = None
            self._blocks.move_to_end(one)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)


def block_hashes(request: Request, block_size: int) -> list[int]:
    """Returns a hash for each full block of a prompt, which depends on all tokens up to its end."""
    hashes: list[int] = []
    for end in range(block_size, request.n_prompt_tokens + 1, block_size):
        packed = request.packed_span(end - block_size, block_size)
        hashes.append(hash((hashes[-1] if hashes else 0, packed)))
    return hashes


@dataclass(frozen=True, slots=True)
class Reading:
    """The load of a group at the time at which a gateway read it."""

    n_waiting: int
    kv_use: float


class ApproximatePrefix:
    """The group with the highest score, as llm-d's endpoint picker computes it.

    The score is a weighted sum of three numbers from 0 to 1: the part of the prompt's blocks that
    were sent to the group before, the shortness of its queue, and its free K/V memory. The
    shortness of a queue is 1 for the shortest queue and 0 for the longest. One of several groups
    with equal scores is sampled. The gateway reads loads with the first request after `POLL_S`.
    """

    def __init__(self, block_size: int, *, seed: int = 0) -> None:
        self._block_size = block_size
        self._seen: list[SeenBlocks] = []
        self._readings: list[Reading] = []
        self._read_s = float("-inf")
        self._random = random.Random(seed)

    def choose(self, request: Request, groups: Sequence[Load], now_s: float) -> int:
        """Returns the index of the group with the highest score."""
        if not self._seen:
            self._seen = [SeenBlocks(group.n_kv_blocks) for group in groups]
        if now_s - self._read_s >= POLL_S:
            self._readings = [Reading(group.n_waiting, group.kv_use) for group in groups]
            self._read_s = now_s
        hashes = block_hashes(request, self._block_size)
        scores = self._scores(hashes)
        best = max(scores)
        chosen = self._random.choice([n for n, score in enumerate(scores) if score == best])
        self._seen[chosen].add(hashes)
        return chosen

    def _scores(self, hashes: Sequence[int]) -> list[float]:
        queues = [one.n_waiting for one in self._readings]
        shortest, longest = min(queues), max(queues)
        return [
            PREFIX_WEIGHT * seen.n_found(hashes) / max(1, len(hashes))
            + QUEUE_WEIGHT * (longest - one.n_waiting) / max(1, longest - shortest)
            + MEMORY_WEIGHT * (1 - one.kv_use)
            for seen, one in zip(self._seen, self._readings, strict=True)
        ]
