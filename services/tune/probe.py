"""A short load whose iterations show what each kind of work costs on a system.

First prompts of several lengths, one at a time; then groups of requests that decode together, up to
as many as a batch may have; then prompts beside requests that decode. Those of a group begin with
one of the prompts from before, so that the prefix cache has it: they decode with all contexts, and
cost next to nothing to begin. All of it is done again, with other tokens, up to three times.
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
"""Numbers of requests, and whether they begin with the longer prompts or with the shorter ones:
with prompts of one length, the cost of a request could not be told from the cost of its context."""
N_GROUPS_FIRST = 3
"""Groups that come before prompts beside a group."""
N_GROUP_OUTPUT = 8
N_ROUNDS = 3
BESIDE_LENGTHS = (96, 416, 240)
N_BESIDE = 24
"""Requests that decode while these come."""
ROOM = 64
"""Tokens of a context that prompts leave free."""


@dataclass(frozen=True, slots=True)
class Lone:
    """A request that had the system to itself."""

    n_prompt: int
    ttft_s: float


class Probe:
    """A load on a system; `run` goes on where it stopped the last time."""

    def __init__(
        self, system: System, *, vocab_size: int, max_model_len: int, max_group: int
    ) -> None:
        """Groups have `max_group` requests at most."""
        self.lone: list[Lone] = []
        """Requests that were alone, for the time that a request takes outside of iterations."""
        self._system = system
        self._vocab_size = vocab_size
        self._longest = max(1, max_model_len - ROOM)
        self._random = random.Random(0)
        self._steps: Iterator[Coroutine[object, object, None]] = self._all_steps(max_group)

    async def begin(self) -> None:
        """Sends a first short request, for which the system has things to set up.

        Raises:
            SystemFailed: it failed.
        """
        await self._system.ask(Prompt(self._tokens(4), 2))

    def note_slots(self, n_slots: int) -> None:
        """Sends no request from now on that does not fit into so many K/V slots."""
        self._longest = max(1, min(self._longest, n_slots - ROOM))

    async def run(self, limit_s: float) -> None:
        """Runs until everything is done, or `limit_s` has passed, but for what has been begun.

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
