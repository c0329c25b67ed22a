"""Routers: how gateways and load balancers in front of independent replicas choose a replica.

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
"""Seconds for which a gateway uses the loads of the groups before it reads them again."""

PREFIX_WEIGHT, QUEUE_WEIGHT, MEMORY_WEIGHT = 3.0, 2.0, 2.0
"""Weights of the three parts of a group's score (`ApproximatePrefix`): the defaults of llm-d's
endpoint picker."""


class Load(Protocol):
    """The load of a group of pipelines, as a router sees it."""

    @property
    def n_requests(self) -> int:
        """Number of requests that are waiting or running."""

    @property
    def n_waiting(self) -> int:
        """Number of requests that are waiting."""

    @property
    def kv_use(self) -> float:
        """Share of the K/V blocks of all pipelines that running requests have reserved."""

    @property
    def n_kv_blocks(self) -> int:
        """Number of K/V blocks of all pipelines."""


class Router(Protocol):
    """A strategy that chooses the group of each request."""

    def choose(self, request: Request, groups: Sequence[Load], now_s: float) -> int:
        """Returns the index in `groups` of the group for a request that arrives at `now_s`."""


class RoundRobin:
    """A router that chooses the groups in turn."""

    def __init__(self) -> None:
        self._turns = count()

    def choose(self, request: Request, groups: Sequence[Load], now_s: float) -> int:
        """Returns the index of the group after the last chosen one."""
        return next(self._turns) % len(groups)


class LeastRequests:
    """A router that chooses the group with the fewest requests; of several, the first."""

    def choose(self, request: Request, groups: Sequence[Load], now_s: float) -> int:
        """Returns the index of the group with the fewest requests."""
        return min(range(len(groups)), key=lambda index: groups[index].n_requests)


class SeenBlocks:
    """The prompt blocks that were sent to one group lately: an approximation of the group's prefix
    cache. A block is identified by a hash of all tokens up to its end."""

    def __init__(self, max_blocks: int) -> None:
        """Makes an empty set that keeps the `max_blocks` most recently used blocks."""
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def n_found(self, hashes: Sequence[int]) -> int:
        """Returns the number of blocks at the beginning of a prompt that were sent to the group, up
        to the first one that was not."""
        return next((n for n, one in enumerate(hashes) if one not in self._blocks), len(hashes))

    def add(self, hashes: Sequence[int]) -> None:
        """Adds the blocks of a prompt, given by their hashes. Removes the least recently used
        blocks if there are more than the maximum."""
        for one in reversed(hashes):  # so that the last blocks are forgotten first
            self._blocks[one] = None
            self._blocks.move_to_end(one)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)


def block_hashes(request: Request, block_size: int) -> list[int]:
    """Returns a hash for each full block of a prompt. A hash depends on all tokens up to the
    block's end."""
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
    """A router that chooses the group with the highest score, computed as by llm-d's endpoint
    picker.

    The score is a weighted sum of three numbers from 0 to 1: the share of the prompt's blocks that
    were sent to the group before, the shortness of its queue, and the free share of its K/V memory.
    The shortness is 1 for the shortest of all queues and 0 for the longest. Of several groups with
    equal scores, one is chosen at random. When a request arrives, the gateway reads the loads again
    if it last read them at least `POLL_S` ago.
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
