"""The example that goes on with its stream, whatever happens to the connection."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from orcinus.v1 import scheduler_pb2

from examples import resuming_client
from tests.fake_scheduler import loses_pipeline_after, rejects, says
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


async def chunks(urls: list[str], **body: Any) -> list[dict[str, Any]]:
    """All chunks of a stream, as the example sees them."""
    request = {"prompt": "x", "max_tokens": 100, **body}
    found = await asyncio.to_thread(
        lambda: list(resuming_client.stream(urls, "/v1/completions", request))
    )
    assert len({(chunk["id"], chunk["created"]) for chunk in found}) == 1
    return list(map(content_of, found))


@pytest.mark.parametrize("n_bytes", [5, 750, 1059, 1550])
async def test_cut_after_any_byte_leaves_no_trace(site: Site, n_bytes: int) -> None:
    said = site.tokens(TEXT)
    site.scheduler.behaviour = says(*said)
    options: dict[str, Any] = {
        "max_tokens": len(said),
        "seed": 7,
        "stream_options": {"include_usage": True},
    }
    undisturbed = await chunks([site.url], **options)
    n_before = len(site.scheduler.requests)
    # Short cuts bring no event at all, so that there has to be another way.
    async with cutting_proxy(site.frontend.http_address, n_bytes) as broken:
        urls = [broken, site.url] if n_bytes < 700 else [broken]
        assert await soon(chunks(urls, **options)) == undisturbed
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


async def test_wrong_request_is_not_tried_again(site: Site) -> None:
    with pytest.raises(resuming_client.Refused, match="max_tokens"):
        await chunks([site.url, "http://127.0.0.1:1/nobody"], max_tokens=0)


async def test_client_gives_up_on_a_server_that_stays_away() -> None:
    nobody = resuming_client.stream(["http://127.0.0.1:1"], "/v1", {}, max_failures=3)
    with pytest.raises(resuming_client.Broken, match="gave up after 3"):
        await asyncio.to_thread(next, nobody)
