"""Both clients against real frontends: streams go on whatever happens to the connection."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span
from orcinus.v1 import scheduler_pb2
from orcinus_client import (
    AsyncClient,
    Client,
    InvalidRequest,
    Overloaded,
    Retry,
    TimedOut,
    Unauthenticated,
    UnexpectedAnswer,
)

from tests.fake_scheduler import FakeRequest, loses_pipeline_after, rejects, says, stalls_after
from tests.frontend.conftest import Site, running, soon

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "one 世 two 🐋 three"


@contextlib.asynccontextmanager
async def cutting_proxy(target: str, n_bytes: int) -> AsyncIterator[str]:
    """A way to a frontend on which each connection breaks after so many bytes of the answer."""
    host, _, port = target.rpartition(":")
    relays: set[asyncio.Task[None] | None] = set()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relays.add(asyncio.current_task())
        from_there, to_there = await asyncio.open_connection(host, int(port))
        ways = (
            asyncio.ensure_future(forward(reader, to_there, n_bytes=2**20)),
            asyncio.ensure_future(forward(from_there, writer, n_bytes=n_bytes)),
        )
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for stream in (writer, to_there):
            stream.close()
        await asyncio.gather(*ways, return_exceptions=True)

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    async with server:
        yield "http://{}:{}".format(*server.sockets[0].getsockname())
        await soon(asyncio.gather(*filter(None, relays), return_exceptions=True))


async def forward(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, n_bytes: int
) -> None:
    """Passes on so many bytes, or all that come."""
    while n_bytes > 0 and (data := await reader.read(min(n_bytes, 2**16))):
        writer.write(data)
        await writer.drain()
        n_bytes -= len(data)


def content_of(chunk: dict[str, Any]) -> dict[str, Any]:
    """A chunk without what differs from request to request."""
    return {key: value for key, value in chunk.items() if key not in {"id", "created"}}


@pytest.fixture(params=[Client, AsyncClient], ids=["threads", "asyncio"])
def is_async(request: pytest.FixtureRequest) -> bool:
    """Whether the client is the one for asyncio."""
    return request.param is AsyncClient


async def stream(urls: list[str], *, is_async: bool, **body: Any) -> list[dict[str, Any]]:
    """All chunks of a stream."""
    bases = [f"{url}/v1" for url in urls]
    if is_async:
        async with AsyncClient(*bases) as client:
            return [chunk async for chunk in client.stream_completion("x", **body)]

    def read() -> list[dict[str, Any]]:
        with Client(*bases) as client:
            return list(client.stream_completion("x", **body))

    return await asyncio.to_thread(read)


async def chunks(urls: list[str], *, is_async: bool = False, **body: Any) -> list[dict[str, Any]]:
    """All chunks of a stream, without what differs from request to request."""
    found = await stream(urls, is_async=is_async, **{"max_tokens": 100, **body})
    assert len({(chunk["id"], chunk["created"]) for chunk in found}) == 1
    return list(map(content_of, found))


@pytest.mark.parametrize("n_bytes", [5, 700, 1009, 1500])
async def test_cut_after_any_byte_leaves_no_trace(site: Site, n_bytes: int, is_async: bool) -> None:
    said = site.tokens(TEXT)
    site.scheduler.behaviour = says(*said)
    options: dict[str, Any] = {
        "max_tokens": len(said),
        "seed": 7,
        "stream_options": {"include_usage": True},
    }
    undisturbed = await chunks([site.url], is_async=is_async, **options)
    n_before = len(site.scheduler.requests)
    # Short cuts bring no event at all, so that there has to be another way.
    async with cutting_proxy(site.frontend.http_address, n_bytes) as broken:
        urls = [broken, site.url] if n_bytes < 700 else [broken]
        found = await soon(chunks(urls, is_async=is_async, **options))
        assert found == undisturbed
    assert len(site.scheduler.requests) > n_before + 1


async def test_answers_of_a_frontend_that_gives_up_go_on_elsewhere(
    site: Site, tmp_path: Path
) -> None:
    said = site.tokens(TEXT)
    async with running(tmp_path) as other:
        site.scheduler.behaviour = loses_pipeline_after(*said[:3])
        other.scheduler.behaviour = says(*said)
        found = await chunks([site.url, other.url], max_tokens=len(said), n=2)
        given = [list(r.submission.generated_token_ids) for r in other.scheduler.requests]
    assert "".join(c["text"] for chunk in found for c in chunk["choices"] if not c["index"]) == TEXT
    assert all(list(said[: len(tokens)]) == tokens for tokens in given)
    assert any(given)


async def test_full_pool_is_tried_again_at_the_next(site: Site, tmp_path: Path) -> None:
    async with running(tmp_path) as other:
        site.scheduler.behaviour = rejects(scheduler_pb2.REJECTION_REASON_POOL_FULL)
        other.scheduler.behaviour = says(*site.tokens("ab"))
        found = await chunks([site.url, other.url], max_tokens=2)
    assert [chunk["choices"][0]["text"] for chunk in found] == ["a", "b", ""]


async def test_a_frontend_that_dies_in_the_middle_leaves_no_trace(
    site: Site, tmp_path: Path, is_async: bool
) -> None:
    said = site.tokens(TEXT)
    options = {"max_tokens": len(said), "seed": 7}
    site.scheduler.behaviour = says(*said)
    undisturbed = await chunks([site.url], is_async=is_async, **options)
    async with running(tmp_path, drain_s=0.0) as dying:
        dying.scheduler.behaviour = stalls_after(*said[:3])
        reading = asyncio.ensure_future(chunks([dying.url, site.url], is_async=is_async, **options))
        await dying.scheduler.wait_requests()
        dying.stop.set()
        assert await soon(reading) == undisturbed


async def test_wrong_request_is_not_tried_again(site: Site, is_async: bool) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await chunks([site.url, "http://127.0.0.1:1"], is_async=is_async, max_tokens=-1)
    assert (refused.value.status, refused.value.field) == (400, "max_tokens")


async def test_whole_answers_come_from_the_next_frontend(site: Site) -> None:
    site.scheduler.behaviour = says(*site.tokens("ab"))
    async with AsyncClient("http://127.0.0.1:1", f"{site.url}/v1/") as client:
        answer = await soon(client.completion("ab", max_tokens=2))
        models = await soon(client.models())
        turn = await soon(client.chat([{"role": "user", "content": "x"}], max_tokens=1))
    assert answer["choices"][0]["text"] == "ab"
    assert models["data"][0]["id"] == answer["model"]
    assert turn["choices"][0]["message"]["role"] == "assistant"


async def test_a_full_pool_is_an_error_that_says_when_to_try_again(site: Site) -> None:
    site.scheduler.behaviour = rejects(scheduler_pb2.REJECTION_REASON_POOL_FULL)
    async with AsyncClient(f"{site.url}/v1", retry=Retry(max_failures=1)) as client:
        with pytest.raises(Overloaded) as refused:
            await soon(client.completion("x"))
    assert refused.value.retry_after_s is not None
    assert refused.value.retry_after_s >= 1


@contextlib.asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that gives every request the same bytes and hangs up, or says nothing if there are
    none; yields its base URL and the requests that have come."""
    requests: list[bytes] = []
    is_over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        if not answer:
            await is_over.wait()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield "http://{}:{}/v1".format(*server.sockets[0].getsockname()), requests
        is_over.set()


async def completion(url: str, *, is_async: bool, **limits: Any) -> dict[str, Any]:
    """A whole answer."""
    if is_async:
        async with AsyncClient(url, **limits) as client:
            return await soon(client.completion("x"))

    def ask() -> dict[str, Any]:
        with Client(url, **limits) as client:
            return client.completion("x")

    return await asyncio.to_thread(ask)


async def test_an_answer_that_takes_too_long_is_not_computed_again(is_async: bool) -> None:
    async with answering(b"") as (url, requests):
        with pytest.raises(TimedOut):
            await completion(url, is_async=is_async, answer_timeout_s=0.1)
    assert len(requests) == 1


async def test_a_whole_answer_may_take_longer_than_a_stream_is_silent(site: Site) -> None:
    async def says_late(request: FakeRequest) -> None:
        await asyncio.sleep(0.3)
        await says(*site.tokens("ab"))(request)

    site.scheduler.behaviour = says_late
    n_before = len(site.scheduler.requests)
    async with AsyncClient(f"{site.url}/v1", read_timeout_s=0.1) as client:
        answer = await soon(client.completion("ab", max_tokens=2))
    assert answer["choices"][0]["text"] == "ab"
    assert len(site.scheduler.requests) == n_before + 1


@pytest.mark.parametrize("body", [b"<p>Sign in</p>", b'"text"', b"\xff"], ids=["page", "text", "?"])
async def test_a_page_of_a_proxy_is_an_error_of_the_client(body: bytes, is_async: bool) -> None:
    head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    async with answering(head.encode() + body) as (url, requests):
        with pytest.raises(UnexpectedAnswer):
            await completion(url, is_async=is_async)
        with pytest.raises(UnexpectedAnswer):
            await stream([url.removesuffix("/v1")], is_async=is_async)
    assert len(requests) == 2


async def test_keys_and_the_current_span_are_sent(site: Site) -> None:
    seen: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 401 x\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno")
        writer.close()

    span = NonRecordingSpan(SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=TraceFlags(1)))
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = "http://{}:{}/v1".format(*server.sockets[0].getsockname())
        async with AsyncClient(url, api_key="secret") as client:
            with use_span(span), pytest.raises(Unauthenticated, match="401: no"):
                await soon(client.completion("x"))
    assert b"Bearer secret" in seen[0]
    assert f"traceparent: 00-{0xABC:032x}-{0xDEF:016x}-01".encode() in seen[0]
