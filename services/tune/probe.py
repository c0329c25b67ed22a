"""A short load that makes a system run iterations of every kind, so that their costs can be
measured.

The load has three kinds of steps. First, prompts of several lengths are sent one at a time. Then
groups of requests decode together, up to the largest batch. After a few groups, prompts are sent
while other requests decode. Each request of a group begins with one of the earlier prompts, whose
keys and values are in the prefix cache. So requests decode with contexts of all lengths, and their
prefill costs almost nothing. The whole load is run up to three times, each time with other tokens.
"""

import asyncio
import random
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass

from services.tune.system import Prompt, System

PROMPT_LENGTHS = (24, 128, 512, 8, 64, 320, 900)
GROUPS = (
    (16, True),
    (64, True),
    (64, False),
    (1, True),
    (32, False),
    (128, True),
    (4, False),
    (16, False),
    (8, True),
    (2, False),
)
"""For each group, the number of requests, and whether their prompts begin with one of the longer
earlier prompts (True) or one of the shorter ones (False). Two lengths are needed, because otherwise
the cost of a request could not be distinguished from the cost of its context."""
N_GROUPS_FIRST = 3
"""Number of groups that are run before prompts are sent while other requests decode."""
N_GROUP_OUTPUT = 8
N_ROUNDS = 3
BESIDE_LENGTHS = (96, 416, 240)
N_BESIDE = 24
"""Number of requests that decode while the prompts of `BESIDE_LENGTHS` are sent."""
ROOM = 64
"""Number of tokens of the context that remain for the output after the longest prompt."""


@dataclass(frozen=True, slots=True)
class Lone:
    """A request that ran while the system had no other requests."""

    n_prompt: int
    ttft_s: float


class Probe:
    """A load on a system, as a list of steps. Each call of `run` continues after the last step of
    the previous call."""

    def __init__(
        self, system: System, *, vocab_size: int, max_model_len: int, max_group: int
    ) -> None:
        """Creates a load for `system`. Groups with more than `max_group` requests are left out."""
        self.lone: list[Lone] = []
        """Requests that ran alone. Their times show how much time a request spends outside of
        iterations."""
        self._system = system
        self._vocab_size = vocab_size
        self._longest = max(1, max_model_len - ROOM)
        self._random = random.Random(0)
        self._steps: Iterator[Coroutine[object, object, None]] = self._all_steps(max_group)

    async def begin(self) -> None:
        """Sends a first short request, which is not measured. It is slow, because the system sets
        up connections and buffers.

        Raises:
            SystemFailed: the request failed.
        """
        await self._system.ask(Prompt(self._tokens(4), 2))

    def note_slots(self, n_slots: int) -> None:
        """Limits the length of further prompts, so that each request fits into the system's
        `n_slots` K/V slots."""
        self._longest = max(1, min(self._longest, n_slots - ROOM))

    async def run(self, limit_s: float) -> None:
        """Runs steps of the load until all steps are done or `limit_s` seconds have passed. A step
        that has begun by then is finished.

        Raises:
            SystemFailed: a request failed.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + limit_s
        while loop.time() < end_s and (step := next(self._steps, None)) is not None:
            await step

    def _all_steps(self, max_group: int) -> Iterator[Coroutine[object, object, None]]:
        for _ in range(N_ROUNDS):
            prefixes: list[list[int]] = []
            for length in self._lengths(PROMPT_LENGTHS):
                yield self._ask_alone(length, prefixes)
            prefixes.sort(key=len)
            half = len(prefixes) // 2
            for index, (size, is_long) in enumerate(GROUPS):
                if index == N_GROUPS_FIRST:
                    yield self._run_beside(prefixes)
                if size <= max_group:
                    yield self._run_group(prefixes[half:] if is_long else prefixes[:half], size)

    async def _ask_alone(self, length: int, prefixes: list[list[int]]) -> None:
        tokens = self._tokens(length)
        reply = await self._system.ask(Prompt(tokens, 2))
        prefixes.append(tokens)
        self.lone.append(Lone(length, reply.token_times_s[0] - reply.sent_s))

    async def _run_group(self, prefixes: Sequence[Sequence[int]], size: int) -> None:
        await self._together(
            Prompt([*prefixes[index % len(prefixes)], *self._tokens(2)], N_GROUP_OUTPUT)
            for index in range(size)
        )

    async def _run_beside(self, prefixes: Sequence[Sequence[int]]) -> None:
        decoding = [
            Prompt([*prefixes[index % len(prefixes)], *self._tokens(2)], 3 * N_GROUP_OUTPUT)
            for index in range(N_BESIDE)
        ]
        beside = [Prompt(self._tokens(length), 2) for length in self._lengths(BESIDE_LENGTHS)]

        async def one_by_one() -> None:
            for prompt in beside:
                await self._system.ask(prompt)

        coming = asyncio.create_task(one_by_one())
        try:
            await self._together(iter(decoding))
            await coming
        finally:
            coming.cancel()

    async def _together(self, prompts: Iterator[Prompt]) -> None:
        tasks = [asyncio.create_task(self._system.ask(prompt)) for prompt in prompts]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _tokens(self, length: int) -> list[int]:
        return [self._random.randrange(self._vocab_size) for _ in range(length)]

    def _lengths(self, lengths: Sequence[int]) -> list[int]:
        return [length for length in lengths if length <= self._longest] or [self._longest] * 2
