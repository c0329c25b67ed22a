"""Bodies that are large, slow, many or full of structure: raw sockets against a whole frontend."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from services.common import errors
from services.frontend.http.bodies.reader import parse_body
from services.frontend.http.openai.chat_request import ChatBody
from services.frontend.request.refusals import Refusal
from tests.fake_scheduler import keeps_quiet
from tests.frontend.conftest import Site, running, soon
from tests.frontend.test_public_access import ALICE, locked
from tests.limits import HANG_S

MEBIBYTE = 2**20


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def sending(
    site: Site, head: str, content: bytes = b""
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A completion whose body is not complete."""
    host, port = site.frontend.http_address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode() + content)
    try:
        yield reader, writer
    finally:
        writer.close()


async def status_of(reader: asyncio.StreamReader) -> int:
    return int((await soon(reader.readline())).split()[1])


def refused(site: Site, reason: Refusal) -> int:
    return site.frontend._refusals[reason]


async def test_body_that_does_not_come_in_time_is_refused(tmp_path: Path) -> None:
    async with (
        running(tmp_path, body_limit_s=0.1) as site,
        sending(site, "Content-Length: 20\r\n", b'{"prompt"') as (reader, _),
    ):
        answer = await soon(reader.read())
        assert answer.split()[1] == b"408"
        assert b"x-should-retry" not in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "timed_out"
        assert refused(site, Refusal.BODY_TIMEOUT) == 1
        assert site.frontend._budget.n_bytes == 0


async def test_body_that_drips_is_refused_as_soon(tmp_path: Path) -> None:
    async with (
        running(tmp_path, body_limit_s=0.2) as site,
        sending(site, "Content-Length: 1000\r\n") as (reader, writer),
    ):
        answering = asyncio.ensure_future(status_of(reader))
        while not answering.done():
            writer.write(b" ")
            await asyncio.sleep(0.01)
        assert answering.result() == 408


async def test_bodies_take_memory_while_they_come(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"max_body_bytes": MEBIBYTE, "max_in_flight_bytes": 3 * MEBIBYTE}
    async with running(tmp_path, **limits) as site, AsyncExitStack() as clients:
        head, content = f"Content-Length: {MEBIBYTE}\r\n", bytes(700_000)
        for n in (1, 2):
            await clients.enter_async_context(sending(site, head, content))
            await until(lambda n=n: site.frontend._budget.n_bytes == n * len(content))  # type: ignore[misc]
        late, _ = await clients.enter_async_context(sending(site, head))
        assert await status_of(late) == 429
        assert refused(site, Refusal.MEMORY) == 1
        small = await soon(site.http.post("/v1/completions", json={"prompt": "x"}))
        assert small.status_code == 200, "room is left for small requests"
        await clients.aclose()
        await until(lambda: site.frontend._budget.n_bytes == 0)


async def test_body_of_no_known_length_is_refused_where_memory_ends(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"max_body_bytes": MEBIBYTE, "max_in_flight_bytes": 2 * MEBIBYTE}
    head, chunk = "Transfer-Encoding: chunked\r\n", b"%x\r\n%b\r\n" % (900_000, bytes(900_000))
    async with running(tmp_path, **limits) as site, sending(site, head, chunk):
        await until(lambda: site.frontend._budget.n_bytes == 900_000)
        async with sending(site, head, chunk) as (reader, _):
            assert await status_of(reader) == 429


@pytest.mark.parametrize(
    ("length", "status"), [(13, 100), (100_001, 413)], ids=["taken", "too large"]
)
async def test_a_client_that_asks_first_is_told(tmp_path: Path, length: int, status: int) -> None:
    head = f"Content-Length: {length}\r\nExpect: 100-continue\r\n"
    async with running(tmp_path) as site, sending(site, head) as (reader, writer):
        assert await status_of(reader) == status
        if status == 100:
            writer.write(b'{"prompt":"x"}'[:13])
            await soon(reader.readline())
            assert await status_of(reader) == 400, "which is no JSON"


async def test_an_upload_counts_as_an_answer_of_its_key(tmp_path: Path) -> None:
    authorization = f"Authorization: {ALICE['authorization']}\r\n"
    async with locked(tmp_path, max_in_flight=2) as site, AsyncExitStack() as clients:
        head = f"Content-Length: 1000\r\nExpect: 100-continue\r\n{authorization}"
        for _ in range(2):
            reader, _ = await clients.enter_async_context(sending(site, head))
            assert await status_of(reader) == 100
        reader, _ = await clients.enter_async_context(sending(site, head))
        assert await status_of(reader) == 429
        assert refused(site, Refusal.KEY_IN_FLIGHT) == 1
        await clients.aclose()
        async with asyncio.timeout(HANG_S):
            body = {"prompt": "x", "n": 2}
            while (await site.http.post("/v1/completions", json=body, headers=ALICE)).is_error:
                await asyncio.sleep(0.01)


async def test_an_answer_in_flight_leaves_no_room_for_an_upload(tmp_path: Path) -> None:
    authorization = f"Authorization: {ALICE['authorization']}\r\n"
    async with locked(tmp_path, max_in_flight=1) as site:
        site.scheduler.behaviour = keeps_quiet
        waiting = asyncio.ensure_future(
            site.http.post("/v1/completions", json={"prompt": "x"}, headers=ALICE)
        )
        await site.scheduler.wait_requests()
        async with sending(site, f"Content-Length: 9\r\n{authorization}") as (reader, _):
            assert await status_of(reader) == 429
        waiting.cancel()


async def test_structure_does_not_hold_the_event_loop(tmp_path: Path) -> None:
    async with running(tmp_path, max_body_bytes=8 * MEBIBYTE) as site:
        tools = b"[" + b",".join([b"[]"] * 100_000) + b"]"
        body = b'{"messages": [{"role": "user", "content": "x"}], "tools": ' + tools + b"}"
        response = await site.http.post("/v1/chat/completions", content=body)
        assert response.status_code == 413
        assert "objects and arrays" in response.json()["error"]["message"]
        assert refused(site, Refusal.BODY_TOO_LARGE) == 1


@pytest.mark.parametrize("field", ["stop", "modalities", "metadata", "logit_bias"])
async def test_of_many_wrong_items_one_is_explained(tmp_path: Path, field: str) -> None:
    is_object = field in ("metadata", "logit_bias")
    items: Any = {str(i): [] for i in range(15_000)} if is_object else [1] * 100_000
    body = {"messages": [{"role": "user", "content": "x"}], field: items}
    async with running(tmp_path, max_body_bytes=MEBIBYTE) as site:
        response = await site.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith(field)


def test_of_many_wrong_items_only_the_first_is_looked_at() -> None:
    """To find all of them takes forty times as long, in which nobody else is served."""
    body = {"messages": [{"role": "user", "content": "x"}], "stop": [1] * 100_000}
    data = json.dumps(body).encode()
    with pytest.raises(errors.InvalidRequest, match=r"stop\.0") as caught:
        parse_body(ChatBody, data)
    assert isinstance(caught.value.__context__, ValidationError)
    assert caught.value.__context__.error_count() == 1


async def test_errors_repeat_little_of_what_a_client_sends(tmp_path: Path) -> None:
    long = "x" * 90_000
    async with running(tmp_path) as site:
        body = {"prompt": "x", "model": long}
        response = await site.http.post("/v1/completions", json=body)
        assert response.status_code == 404
        assert len(response.content) < 1000
        for path in (f"/v1/models/{long[:9000]}", f"/{long[:9000]}"):
            response = await site.http.get(path)
            assert response.status_code == 404
            assert len(response.content) < 1000


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"content-type": "application/json; charset=utf-8"}, 200),
        ({"content-type": "Application/JSON", "content-encoding": "identity"}, 200),
        ({"content-type": "application/vnd.api+json"}, 200),
        ({"content-type": "application/x-www-form-urlencoded"}, 200),
        ({"content-type": "text/plain"}, 200),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
        ({"content-type": "application/x-protobuf"}, 415),
        ({"content-encoding": "gzip"}, 415),
        ({"content-encoding": "identity, zstd"}, 415),
    ],
    ids=str,
)
@pytest.mark.asyncio(loop_scope="module")
async def test_bodies_that_cannot_be_json_are_refused_by_their_headers(
    site: Site, headers: dict[str, str], status: int
) -> None:
    answer = await site.http.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
    assert answer.status_code == status
    if status == 415:
        error = answer.json()["error"]
        assert error["code"] == "unsupported_media_type"
        assert error["param"] in headers
