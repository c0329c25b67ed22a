"""The page that shows the pipeline: its files, and who is told what the scheduler does."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.common import semconv
from services.frontend.api_keys import hash_of
from services.frontend.http.docs import openapi
from services.frontend.http.operations import page_files
from services.frontend.http.operations.page_files import DIRECTORY, INDEX, MEDIA_TYPES, read_files
from services.frontend.http.routes import OPENAPI_PATH, served_routes
from services.frontend.watching.view_feed import MAX_UNSENT_BYTES, STOPPING
from tests.exposition import Samples
from tests.fake_scheduler import FakeScheduler
from tests.fake_watch import FakeWatch, decision, epoch, iteration, mark
from tests.frontend.conftest import Site, running, soon
from tests.limits import HANG_S

EVENTS = "/pipeline/events"
LOOKER, CLIENT = ({"authorization": f"Bearer {name}"} for name in ("looker", "client"))


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
            assert line in ("", ": keep-alive")
        event: dict[str, Any] = json.loads(line.removeprefix("data: "))
        return event

    async def types(self, n_events: int) -> list[str]:
        """The types of the next events."""
        return [(await self.next())["type"] for _ in range(n_events)]

    async def wait_end(self) -> None:
        """Waits until the stream ends, with nothing more in it."""
        async with asyncio.timeout(HANG_S):
            assert [line async for line in self.lines if line] == []


@asynccontextmanager
async def stream_of(site: Site, **request: Any) -> AsyncIterator[Stream]:
    """A viewer of a frontend."""
    async with site.http.stream("GET", EVENTS, **request) as response:
        assert response.status_code == 200, await response.aread()
        yield Stream(response)


def keys_of(directory: Path, *names: str, **looker: Any) -> Path:
    """A file with keys of which that of the looker may have more than others."""
    entries = [
        {"name": name, "sha256": hash_of(name), **(looker if name == "looker" else {})}
        for name in names
    ]
    path = directory / "keys.json"
    path.write_text(json.dumps({"keys": entries}))
    return path


async def raw(site: Site, request: str) -> tuple[int, str]:
    """Status and body of the answer to a request that is sent as it is."""
    reader, writer = await asyncio.open_connection(*site.frontend.http_address.rsplit(":", 1))
    writer.write(f"{request}\r\nHost: x\r\nConnection: close\r\n\r\n".encode("latin-1"))
    head, _, body = (await soon(reader.read())).decode().partition("\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body


# The files


async def test_the_page_and_its_files_go_to_anybody_with_their_headers(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, "client")
    async with running(tmp_path, page=True, api_keys_file=keys) as site:
        paths = {"/": INDEX, **{f"/page/{name}": name for name in read_files(DIRECTORY)}}
        for path, name in paths.items():
            answer = await site.http.get(path)
            assert answer.status_code == 200
            assert answer.content == (DIRECTORY / name).read_bytes()
            assert answer.headers["content-type"] == MEDIA_TYPES[Path(name).suffix]
            assert page_files.HEADERS.items() <= answer.headers.items()
            head = await site.http.head(path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-length"] == str(len(answer.content))


def test_the_policy_lets_a_browser_load_and_reach_nothing_but_this_server() -> None:
    policy = dict(
        rule.split(" ", 1) for rule in page_files.HEADERS["content-security-policy"].split("; ")
    )
    assert policy.pop("img-src") == "'self' data:"
    assert set(policy.values()) == {"'none'", "'self'"}
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"


async def test_a_copy_that_is_still_right_is_not_sent_again(tmp_path: Path) -> None:
    async with running(tmp_path, page=True) as site:
        first = await site.http.get("/")
        etag = first.headers["etag"]
        right = (etag, f"W/{etag}", f'"other", {etag}', "*")
        for asked in (*right, '"other"', "", etag.strip('"')):
            answer = await site.http.get("/", headers={"if-none-match": asked})
            assert answer.status_code == (304 if asked in right else 200), asked
            assert answer.content == (b"" if asked in right else first.content)
            assert answer.headers["etag"] == etag
            assert page_files.HEADERS.items() <= answer.headers.items()


async def test_what_is_not_a_file_of_the_page_does_not_exist(tmp_path: Path) -> None:
    paths = (
        "/page/../settings.py",
        "/page/..%2fsettings.py",
        "/page/%2e%2e/settings.py",
        "/page/../../frontend/settings.py",
        "/page//etc/passwd",
        "/page/%2fetc/passwd",
        "/page/./index.html",
        "/page/index.html/",
        "/page/index.html%00",
        "/page/INDEX.HTML",
        "/page/recordings",
        "/page/",
        "/page",
        "/index.html",
        "//",
    )
    async with running(tmp_path, page=True) as site:
        for path in paths:
            status, body = await raw(site, f"GET {path} HTTP/1.1")
            assert status == 404, path
            assert json.loads(body)["error"]["type"] == "invalid_request_error"


async def test_files_are_only_read(tmp_path: Path) -> None:
    async with running(tmp_path, page=True) as site:
        for path in ("/", "/page/index.html", EVENTS):
            assert (await site.http.post(path, json={})).status_code == 405


def test_files_of_folders_are_found_and_hidden_ones_are_not(tmp_path: Path) -> None:
    (tmp_path / "recordings").mkdir()
    for name in (INDEX, "recordings/a.jsonl", ".hidden"):
        (tmp_path / name).write_text("x")
    files = read_files(tmp_path)
    assert {name: file.media_type for name, file in files.items()} == {
        INDEX: "text/html; charset=utf-8",
        "recordings/a.jsonl": "application/jsonl",
    }


def test_a_file_of_an_unknown_kind_ends_the_start_and_so_does_a_missing_index(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match="no index"):
        read_files(tmp_path)
    (tmp_path / "x.exe").write_text("x")
    with pytest.raises(ValueError, match=r"no media type is known for .*x\.exe"):
        read_files(tmp_path)


async def test_without_the_setting_there_is_no_page(tmp_path: Path) -> None:
    async with running(tmp_path) as site:
        for path in ("/", "/page/index.html", EVENTS):
            answer = await site.http.get(path)
            assert answer.status_code == 404
            assert answer.json()["error"]["message"] == f"Not Found: GET {path}"
        assert EVENTS not in (await site.http.get(OPENAPI_PATH)).json()["paths"]


@pytest.mark.parametrize("needs_key", [False, True], ids=["open", "keys"])
async def test_the_document_has_the_events_where_there_is_a_page(
    tmp_path: Path, needs_key: bool
) -> None:
    settings: dict[str, Any] = {"api_keys_file": keys_of(tmp_path)} if needs_key else {}
    async with running(tmp_path, page=True, **settings) as site:
        document = (await site.http.get(OPENAPI_PATH)).json()
        expected = openapi.document(
            served_routes(has_page=True, has_metrics=False), needs_key=needs_key
        )
        assert document == json.loads(json.dumps(expected))
        responses = document["paths"][EVENTS]["get"]["responses"]
        assert ("403" in responses) is needs_key
        assert EVENTS in (await site.http.get("/docs")).text


# The events


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


async def test_events_are_one_line_each_of_ascii(tmp_path: Path) -> None:
    watch = FakeWatch(epoch(1), mark("a\u2028b\nc"))
    async with watched(tmp_path, watch) as site, stream_of(site) as stream:
        await stream.types(2)
        assert (await stream.next())["text"] == "a\u2028b\nc"


async def test_decisions_are_left_out_unless_they_are_wanted(tmp_path: Path) -> None:
    watch = FakeWatch(epoch(1), decision("{}"), mark("x"))
    async with watched(tmp_path, watch) as site:
        for asked in ({}, {"decisions": "false"}, {"other": "1"}):
            async with stream_of(site, params=asked) as stream:
                assert await stream.types(3) == ["here", "epoch", "mark"]
        async with stream_of(site, params={"decisions": "true"}) as stream:
            assert await stream.types(4) == ["here", "epoch", "decision", "mark"]
        assert watch.asked == [False, True]


async def test_a_parameter_that_says_neither_is_refused(tmp_path: Path) -> None:
    async with watched(tmp_path, FakeWatch()) as site:
        answer = await site.http.get(EVENTS, params={"decisions": "maybe"})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "decisions"


@pytest.mark.parametrize(
    ("shown", "status", "code"),
    [
        ({}, 401, "invalid_api_key"),
        ({"authorization": "Bearer nobody's"}, 401, "invalid_api_key"),
        (CLIENT, 403, "permission_denied"),
        ({"x-api-key": "client"}, 403, "permission_denied"),
    ],
    ids=["no key", "unknown", "may not", "may not, x-api-key"],
)
async def test_with_keys_only_those_that_may_watch_do(
    tmp_path: Path, shown: Mapping[str, str], status: int, code: str
) -> None:
    watch = FakeWatch()
    keys = keys_of(tmp_path, "looker", "client", may_watch=True)
    async with watched(tmp_path, watch, api_keys_file=keys) as site:
        answer = await site.http.get(EVENTS, headers=shown)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert ("www-authenticate" in answer.headers) is (status == 401)
        assert watch.asked == []
        for mine in (LOOKER, {"x-api-key": "looker"}):
            async with stream_of(site, headers=mine) as stream:
                assert await stream.types(2) == ["here", "epoch"]


async def test_a_key_is_never_taken_from_the_address(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, "looker", may_watch=True)
    async with watched(tmp_path, FakeWatch(), api_keys_file=keys) as site:
        for name in ("key", "api_key", "authorization", "x-api-key"):
            answer = await site.http.get(EVENTS, params={name: "looker"})
            assert answer.status_code == 401


async def test_the_calls_of_a_key_that_watches_count(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, "looker", may_watch=True, requests_per_minute=1)
    async with (
        watched(tmp_path, FakeWatch(), api_keys_file=keys) as site,
        stream_of(site, headers=LOOKER) as stream,
    ):
        assert await stream.types(1) == ["here"]
        assert (await site.http.get(EVENTS, headers=LOOKER)).status_code == 429


async def test_a_stream_ends_when_its_key_may_no_longer_watch(tmp_path: Path) -> None:
    watch = FakeWatch()
    keys = keys_of(tmp_path, "looker", may_watch=True)
    async with (
        watched(tmp_path, watch, api_keys_file=keys) as site,
        stream_of(site, headers=LOOKER) as stream,
    ):
        assert await stream.types(2) == ["here", "epoch"]
        keys_of(tmp_path, "looker")
        told = {"type": ""}
        while told["type"] != "away":  # once the file is read again
            watch.tell(iteration(1, 7))
            told = await stream.next()
        assert "may not watch" in told["text"]
        await stream.wait_end()


async def test_silence_is_filled_with_comments(tmp_path: Path) -> None:
    async with watched(tmp_path, FakeWatch(), comment_s=0.05) as site, stream_of(site) as stream:
        while await soon(anext(stream.lines)) != ": keep-alive":
            pass


async def test_the_scheduler_is_asked_only_while_somebody_watches(tmp_path: Path) -> None:
    watch = FakeWatch()
    async with watched(tmp_path, watch) as site:
        assert watch.asked == []
        async with stream_of(site) as stream, stream_of(site) as other:
            assert await stream.types(2) == await other.types(2)
            assert watch.n_watchers == 1
        await soon(watch.wait_watchers(0))
        assert watch.asked == [False]


async def test_viewers_are_told_when_the_scheduler_goes_and_comes_back(tmp_path: Path) -> None:
    first = FakeScheduler(watch=FakeWatch(epoch(1)))
    second = FakeScheduler(watch=FakeWatch(epoch(9)))
    async with running(tmp_path, first, page=True) as site, stream_of(site) as stream:
        assert await stream.types(2) == ["here", "epoch"]
        await first.stop()
        away = await stream.next()
        assert away["type"] == "away"
        assert "127.0.0.1" not in away["text"]
        await second.start(first.address)
        assert (await stream.next())["type"] == "here"
        assert (await stream.next())["epoch"] == 9
    await second.stop()


async def test_there_are_so_many_viewers_and_a_place_is_given_back(tmp_path: Path) -> None:
    async with watched(tmp_path, FakeWatch(), max_viewers=1) as site:
        for _ in range(2):
            async with stream_of(site) as stream:
                assert await stream.types(1) == ["here"]
                assert viewers_of(site) == 1
                answer = await site.http.get(EVENTS)
                assert answer.status_code == 429
                assert answer.json()["error"]["code"] == "rate_limit_exceeded"
                assert int(answer.headers["retry-after"]) >= 1
            async with asyncio.timeout(HANG_S):
                while viewers_of(site):
                    await asyncio.sleep(0.01)
        refused = Samples.of(site.frontend._registry).sum(semconv.REFUSALS, reason="viewers")
        assert refused == 2


def viewers_of(site: Site) -> float:
    """The gauge of viewers."""
    return Samples.of(site.frontend._registry).sum(semconv.VIEWERS)


async def test_a_drain_ends_the_streams(tmp_path: Path) -> None:
    async with watched(tmp_path, FakeWatch(), drain_s=60.0) as site, stream_of(site) as stream:
        assert await stream.types(2) == ["here", "epoch"]
        site.stop.set()
        last = await stream.next()
        assert (last["type"], last["text"]) == ("away", STOPPING)
        await stream.wait_end()


async def test_a_viewer_that_reads_late_skips_what_it_missed(tmp_path: Path) -> None:
    watch = FakeWatch()
    async with watched(tmp_path, watch) as site, stream_of(site) as quick:
        assert await quick.types(2) == ["here", "epoch"]
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.setblocking(False)
            loop = asyncio.get_running_loop()
            host, port = site.frontend.http_address.split(":")
            await loop.sock_connect(slow, (host, int(port)))
            await loop.sock_sendall(slow, f"GET {EVENTS} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            async with asyncio.timeout(HANG_S):
                while viewers_of(site) < 2:
                    await asyncio.sleep(0.01)
            n_marks = 40 * MAX_UNSENT_BYTES // 100_000  # more than the system's buffers take
            for number in range(n_marks):
                watch.tell(mark(f"{number} " + "x" * 100_000))
                assert (await quick.next())["text"].startswith(f"{number} ")
            watch.tell(iteration(12345, 7))
            assert (await quick.next())["iteration"] == 12345
            received = b""
            async with asyncio.timeout(HANG_S):
                while b"12345" not in received[-4000:]:
                    received += await loop.sock_recv(slow, 2**16)
        assert received.count(b'"type":"gap"') == 1
        assert received.count(b'"type":"mark"') < n_marks


async def test_a_viewer_that_reads_nothing_is_cut_off(tmp_path: Path) -> None:
    watch = FakeWatch()
    async with watched(tmp_path, watch, send_limit_s=0.2) as site, stream_of(site) as quick:
        assert await quick.types(2) == ["here", "epoch"]
        _, writer = await asyncio.open_connection(*site.frontend.http_address.split(":"))
        writer.write(f"GET {EVENTS} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        async with asyncio.timeout(HANG_S):
            while viewers_of(site) < 2:
                await asyncio.sleep(0.01)
            while viewers_of(site) == 2:
                watch.tell(mark("x" * 100_000))
                await quick.next()
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
