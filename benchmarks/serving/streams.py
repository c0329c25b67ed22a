"""Keeps a number of streamed answers running while something else is measured."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Self

import httpx

FIRST_CHUNK_S = 300.0
"""Longest time until the first chunk of a stream."""


class Streams:
    """Streamed answers that run all the time, and the gaps between their chunks."""

    def __init__(self, client: httpx.AsyncClient, n_tokens: int) -> None:
        """Each stream ends after `n_tokens` tokens, and a new stream then takes its place."""
        self._client = client
        self._n_tokens = n_tokens
        self._gaps_s: list[float] = []
        self._has_begun = asyncio.Event()

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls, client: httpx.AsyncClient, n_streams: int, n_tokens: int
    ) -> AsyncIterator[Self]:
        """Keeps `n_streams` streams of `n_tokens` tokens each running until the end of the context,
        which begins when the first chunk has arrived. Raises the error of a stream that has
        failed."""
        streams = cls(client, n_tokens)
        tasks = [asyncio.create_task(streams._run(number)) for number in range(n_streams)]
        async with ended(tasks):
            async with asyncio.timeout(FIRST_CHUNK_S):
                await streams._has_begun.wait()
            yield streams

    def take(self) -> list[float]:
        """Returns the gaps between successive chunks of the streams, in seconds, that were measured
        since the last call of this method."""
        gaps_s, self._gaps_s = self._gaps_s, []
        return gaps_s

    async def _run(self, number: int) -> None:
        """Runs one stream after the other, until cancelled."""
        body = {
            "prompt": f"Whale {number}",
            "max_tokens": self._n_tokens,
            "ignore_eos": True,
            "stream": True,
            "seed": number,
        }
        while True:
            before = 0.0
            async with self._client.stream("POST", "/v1/completions", json=body) as response:
                response.raise_for_status()
                async for _ in response.aiter_bytes():
                    now = time.perf_counter()
                    if before:
                        self._gaps_s.append(now - before)
                    before = now
                    self._has_begun.set()


@contextlib.asynccontextmanager
async def ended(tasks: list[asyncio.Task[None]]) -> AsyncIterator[None]:
    """Ends the tasks at the end of the context. Raises the error of a task that has failed."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end
