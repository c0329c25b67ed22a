"""A short load whose iterations show what each kind of work costs on a system.

First prompts of several lengths, one at a time; then groups of requests that decode together, up to
as many as a batch may have; then prompts beside requests that decode. Those of a group begin with
one of the prompts from before, so that the prefix cache has it: they decode with all contexts, and
cost next to nothing to begin. All of it is done again, with other tokens, while there is time.
"""

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.tune.system import Prompt, System

PROMPT_LENGTHS = (24, 128, 320, 512, 8, 64)
GROUP_SIZES = (16, 64, 1, 32, 128, 4, 8, 2)
N_GROUP_OUTPUT = 8
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
    """The load. Its times are by the event loop's clock."""

    def __init__(self, system: System, *, vocab_size: int, max_model_len: int) -> None:
        self.lone: list[Lone] = []
        """Requests that were alone, for the time that a request takes outside of iterations."""
        self._system = system
        self._vocab_size = vocab_size
        self._longest = max(1, max_model_len - ROOM)
        self._random = random.Random(0)

    async def run(self, limit_s: float, *, max_group: int) -> None:
        """Runs until everything was done twice, or `limit_s` has passed, but for what has been
        begun.

        Raises:
            SystemFailed: a request failed.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + limit_s
        await self._system.ask(Prompt(self._tokens(4), 2))  # the first one has things to set up
        for _ in range(2):
            prefixes = []
            for length in self._lengths(PROMPT_LENGTHS):
                if loop.time() >= end_s:
                    return
                prefixes.append(await self._ask_alone(length))
            sizes = [size for size in GROUP_SIZES if size <= max_group]
            for index, size in enumerate(sizes):
                if index == 2:
                    await self._run_beside(prefixes)
                if loop.time() >= end_s:
                    return
                await self._run_group(prefixes, size)

    async def _ask_alone(self, length: int) -> list[int]:
        tokens = self._tokens(length)
        reply = await self._system.ask(Prompt(tokens, 2))
        if reply.token_times_s:
            self.lone.append(Lone(length, reply.token_times_s[0] - reply.sent_s))
        return tokens

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
        return [length for length in lengths if length <= self._longest] or [self._longest]
