"""The page that shows the pipeline: its files, and who is told what the scheduler does."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.frontend.api_keys import hash_of
from services.frontend.http import openapi, page_files
from services.frontend.http.page_files import read_files
from tests.fake_scheduler import FakeScheduler
from tests.fake_watch import FakeWatch, decision, epoch, iteration, mark
from tests.frontend.conftest import Site, running, soon

EVENTS = "/pipeline/events"


@asynccontextmanager
async def watched(directory: Path, watch: FakeWatch, **settings: Any) -> AsyncIterator[Site]:
    """A frontend with the page, whose scheduler can be watched."""
    async with running(directory, FakeScheduler(watch=watch), page=True, **settings) as site:
        yield site


class Stream:
    """A stream of events, as a page reads it."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.lines = response.aiter_lines()

    async def next(self) -> dict[str, Any]:
        """The next event."""
        while not (line := await soon(anext(self.lines))).startswith("data: "):
            assert line == ""
        event: dict[str, Any] = json.loads(line.removeprefix("data: "))
        return event

    async def types(self, n_events: int) -> list[str]:
        """The types of the next events."""
        return [(await self.next())["type"] for _ in range(n_events)]

    async def wait_end(self) -> list[str]:
        """What else comes until the stream ends."""
        return await soon(_rest(self.lines))


async def _rest(lines: AsyncIterator[str]) -> list[str]:
    return [line async for line in lines]


@asynccontextmanager
async def stream_of(site: Site, **request: Any) -> AsyncIterator[Stream]:
    """A viewer of a frontend."""
    async with site.http.stream("GET", EVENTS, **request) as response:
        assert response.status_code == 200, await response.aread()
        yield Stream(response)


async def test_a_viewer_is_told_what_there_is_and_then_what_happens(tmp_path: Path) -> None:
    watch = FakeWatch(epoch(3), mark("stage 1 was lost"))
    async with watched(tmp_path, watch) as site, stream_of(site) as stream:
        assert stream.response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert await stream.types(1) == ["here"]
        assert (await stream.next())["epoch"] == 3
        assert (await stream.next())["text"] == "stage 1 was lost"
        watch.tell(iteration(1, 7, 8), iteration(2, 8))
        assert (await stream.next())["numbers"] == [7, 8]
        assert (await stream.next())["numbers"] == [8]
        assert watch.asked == [False]
