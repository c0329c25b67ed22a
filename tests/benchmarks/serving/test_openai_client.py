"""The HTTP client: what it sends, and what it makes of whatever a server says."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.records import RequestRecord
from benchmarks.serving import load
from benchmarks.serving.load import Answer, Reply
from benchmarks.serving.openai_client import OpenAIClient, events_of, reply_of
from benchmarks.workload import PlannedRequest

REQUEST = PlannedRequest(arrival_s=0.0, prompt_token_ids=(5, 6, 7), n_output=3)
USAGE = {"prompt_tokens": 3, "completion_tokens": 3}


def event(**content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def chunk(*token_ids: int, text: str = "x") -> bytes:
    return event(choices=[{"index": 0, "text": text, "token_ids": token_ids}], usage=None)


WHOLE = [chunk(1), chunk(2, 3), event(choices=[], usage=USAGE), b"data: [DONE]\n\n"]


@dataclass
class Server:
    """Answers every request with the same pieces, and keeps what it is asked."""

    pieces: Sequence[bytes]
    status: str = "200 OK"
    hangs_up: bool = False
    waits_for_ever: bool = False
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    url: str = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = dict(line.split(": ") for line in head.strip().split("\r\n")[1:])
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        self.requests.append((head, body))
        writer.write(f"HTTP/1.1 {self.status}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        for piece in self.pieces:
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()
        if self.waits_for_ever:
            await reader.read()
        if not self.hangs_up:
            writer.write(b"0\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self.answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            yield


async def ask(server: Server, *, timeout_s: float = 30.0, **options: Any) -> RequestRecord:
    async with server.running():
        client = OpenAIClient(server.url, model="m", **options)
        (record,) = await load.run(client, [REQUEST], timeout_s=timeout_s)
    return record


async def test_asks_for_exactly_the_tokens_that_are_planned() -> None:
    server = Server(WHOLE)
    record = await ask(server, api_key="k", body={"ignore_eos": None, "top_k": 1})
    head, body = server.requests[0]
    assert head.startswith("POST /v1/completions HTTP/1.1\r\n")
    assert "authorization: Bearer k" in head
    assert body == {
        "model": "m",
        "prompt": [5, 6, 7],
        "max_tokens": 3,
        "min_tokens": 3,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "top_k": 1,
    }
    assert (record.error, record.n_prompt, record.n_output) == (None, 3, 3)
    assert record.first_token_s == record.token_times_s[0]
    assert record.token_times_s[1] == record.token_times_s[2] == record.end_s


async def test_sends_texts_where_there_are_some() -> None:
    server = Server(WHOLE)
    await ask(server, prompts={(5, 6, 7): "five six seven"})
    assert server.requests[0][1]["prompt"] == "five six seven"


@pytest.mark.parametrize(
    ("server", "error"),
    [
        pytest.param(
            Server([b'{"error": "full"}'], status="429 Too Many Requests"),
            'HTTP 429: {"error": "full"}',
            id="status",
        ),
        pytest.param(
            Server([chunk(1), event(error={"message": "lost"})]), '{"message": "lost"}', id="event"
        ),
        pytest.param(
            Server([chunk(1), event(choices=[], usage={"completion_tokens": 1})]),
            "1 tokens instead of 3",
            id="too few",
        ),
        pytest.param(
            Server(WHOLE[:1], hangs_up=True), "ConnectionResetError: the server hung up", id="end"
        ),
        pytest.param(Server([], waits_for_ever=True), "no end after 0.2 s", id="silence"),
    ],
)
async def test_failures_are_recorded_as_such(server: Server, error: str) -> None:
    record = await ask(server, timeout_s=0.2 if server.waits_for_ever else 30)
    assert record.error == error
    assert not record.is_complete


async def test_a_server_that_is_not_there_is_a_failure_of_every_request() -> None:
    server = Server([])
    async with server.running():
        pass
    done: list[None] = []
    client = OpenAIClient(server.url, model="m")
    failed = await load.run(client, [REQUEST, REQUEST], on_done=lambda: done.append(None))
    assert [record.error is not None for record in failed] == [True, True]
    assert len(done) == 2


async def test_requests_are_sent_when_they_are_due_whatever_became_of_others() -> None:
    server = Server([], waits_for_ever=True)
    requests = [PlannedRequest(0.05 * index, (1,), 1) for index in range(3)]
    async with server.running():
        client = OpenAIClient(server.url, model="m")
        done = await load.run(client, requests, timeout_s=0.5)
    assert [record.arrival_s for record in done] == [0.0, 0.05, 0.1]
    assert all(record.start_s >= record.arrival_s for record in done)
    assert done[2].start_s < done[0].end_s


def cuts(data: bytes, places: Sequence[int]) -> Iterator[tuple[float, bytes]]:
    """The data in pieces; the time of each is the place at which it ends."""
    edges = [0, *sorted(places), len(data)]
    for start, end in itertools.pairwise(edges):
        yield float(end), data[start:end]


@given(st.lists(st.integers(0, len(b"".join(WHOLE))), max_size=12))
def test_events_are_the_same_wherever_the_stream_is_cut(places: list[int]) -> None:
    data = b"".join(WHOLE)
    read = list(events_of(list(cuts(data, places))))
    assert [content for _, content in read] == [
        json.loads(piece.removeprefix(b"data: ")) for piece in WHOLE[:3]
    ]
    for (time_s, _), n_bytes in zip(read, (len(WHOLE[0]), len(b"".join(WHOLE[:2]))), strict=False):
        assert time_s == min(end for end in [*places, len(data)] if end >= n_bytes)


def test_events_may_end_their_lines_as_windows_does() -> None:
    data = WHOLE[0].replace(b"\n", b"\r\n")
    assert len(list(events_of([(0.0, data[:-1]), (1.0, data[-1:])]))) == 1


def test_chunks_without_token_ids_count_as_one_each() -> None:
    pieces = [(1.0, event(choices=[{"text": "a"}])), (2.0, event(choices=[{"text": "b"}]))]
    assert reply_of(200, pieces) == Reply((Answer(1.0, 1), Answer(2.0, 1)))
