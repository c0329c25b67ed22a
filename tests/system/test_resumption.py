"""Streams go on, token for token, when their frontend dies, and when it loses its scheduler."""

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from orcinus_client import Client

from tests.faults.linked_tree import Link
from tests.limits import HANG_S
from tests.stream_content import together
from tests.system.stack import ROOT, Stack

N_BEFORE = 20
"""Chunks that each client has seen when the frontend is killed; many more are to come."""

LONG = {"max_tokens": 250, "ignore_eos": True}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/completions", {"prompt": [5, 6, 7], "temperature": 0, **LONG}),
    ("/completions", {"prompt": "the quick", "seed": 3, "n": 2, "min_tokens": 250, **LONG}),
    ("/completions", {"prompt": [[8], [9, 10]], "seed": 4, "repetition_penalty": 1.3, **LONG}),
    (
        "/chat/completions",
        {
            "messages": [{"role": "user", "content": "hello"}],
            "seed": 5,
            "frequency_penalty": 0.5,
            "stream_options": {"include_usage": True},
            **LONG,
        },
    ),
]


@contextlib.contextmanager
def frontend(scheduler: str, model: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """One more frontend of the scheduler at an address, and its base URL."""
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "services.frontend", f"--model={model}"),
            *(f"--scheduler={scheduler}", "--http-address=127.0.0.1:0"),
            *("--grpc-address=127.0.0.1:0", f"--ready-fd={writing}"),
        ],
        cwd=ROOT,
        pass_fds=[writing],
    )
    os.close(writing)
    try:
        with open(reading) as ready:  # a service stops when the other end is closed
            addresses: dict[str, str] = {}
            while "http" not in addresses:
                addresses = json.loads(ready.readline())
            yield process, f"http://{addresses['http']}/v1"
    finally:
        process.kill()
        process.wait()


def answers(chunks: list[dict[str, Any]]) -> dict[int, Any]:
    """What the chunks say of each answer, and the usage at -1. What was cached depends on what was
    asked before."""
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    for usage in usages:
        del usage["prompt_tokens_details"]
    found: dict[int, Any] = {-1: usages}
    for chunk in chunks:
        for choice in chunk["choices"]:
            found[choice["index"]] = together(found.get(choice["index"]), choice)
    return found


@pytest.mark.thorough
def test_streams_of_a_frontend_that_is_killed_go_on_at_another(
    one_stage: Stack, model: Path
) -> None:
    scheduler = one_stage.scheduler_address()
    with (
        frontend(scheduler, model) as (victim, first),
        frontend(scheduler, model) as (_, second),
        Client(first, second) as client,
        Client(second) as other,
        ThreadPoolExecutor(len(REQUESTS)) as threads,
    ):
        streams = [client.stream(*request) for request in REQUESTS]
        begun = list(threads.map(lambda stream: list(itertools.islice(stream, N_BEFORE)), streams))
        victim.kill()
        victim.wait()
        rest: list[list[dict[str, Any]]] = list(threads.map(list, streams))
        undisturbed = [list(other.stream(*request)) for request in REQUESTS]
    for before, after, whole in zip(begun, rest, undisturbed, strict=True):
        assert len({chunk["id"] for chunk in before + after}) == 1
        assert answers(before + after) == answers(whole)


async def events_of(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> AsyncIterator[Any]:
    """Yields the chunks of a stream as they come, from a client that never asks again."""
    async with http.stream("POST", path, json={**body, "stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def texts(chunks: list[dict[str, Any]]) -> dict[int, tuple[str, str | None]]:
    """The text of each answer, and why it ended."""
    found: dict[int, tuple[str, str | None]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            before, _ = found.get(choice["index"], ("", None))
            found[choice["index"]] = before + text, choice["finish_reason"]
    return found


@pytest.mark.thorough
async def test_streams_go_on_when_the_link_to_a_scheduler_that_lives_is_cut(
    one_stage: Stack, model: Path
) -> None:
    link, have_begun = Link(one_stage.scheduler_address()), asyncio.Semaphore(0)
    address = await link.listen()
    async with contextlib.aclosing(link), contextlib.AsyncExitStack() as stack:
        frontends = frontend(address, model)
        _, url = await asyncio.to_thread(stack.enter_context, frontends)

        async def whole(http: httpx.AsyncClient, request: tuple[str, dict[str, Any]]) -> list[Any]:
            chunks = []
            async for chunk in events_of(http, url + request[0], request[1]):
                chunks.append(chunk)
                if len(chunks) == N_BEFORE:
                    have_begun.release()
            return chunks

        async with httpx.AsyncClient(timeout=HANG_S) as http:
            reading = asyncio.gather(*(whole(http, request) for request in REQUESTS))
            for _ in REQUESTS:
                await have_begun.acquire()
            await link.cut(for_s=0.1)
            assert not reading.done()
            resumed = await reading
            undisturbed = [await whole(http, request) for request in REQUESTS]
    assert list(map(texts, resumed)) == list(map(texts, undisturbed))
    assert all(reason for answers in map(texts, resumed) for _, reason in answers.values())
