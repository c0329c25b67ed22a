"""Streams that wait behind a real proxy for longer than it keeps a silent connection.

The proxy is Debian's nginx. Times are short; `PROXY_IDLE_S=60 PROXY_COMMENT_S=15 PROXY_QUEUE_S=90`
are those of life.
"""

import asyncio
import os
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from orcinus.v1 import scheduler_pb2

from tests.fake_scheduler import FakeRequest, FakeScheduler
from tests.frontend.conftest import Site, running, soon
from tests.limits import HANG_S

IDLE_S = float(os.environ.get("PROXY_IDLE_S", "4"))
COMMENT_S = float(os.environ.get("PROXY_COMMENT_S", "1"))
QUEUE_S = float(os.environ.get("PROXY_QUEUE_S", "10"))

CONFIGURATION = """
daemon off; master_process off; pid {directory}/pid; error_log {directory}/error.log;
events {{}}
http {{
  access_log off;
  client_body_temp_path {directory}/body; proxy_temp_path {directory}/proxy;
  fastcgi_temp_path {directory}/fastcgi; uwsgi_temp_path {directory}/uwsgi;
  scgi_temp_path {directory}/scgi;
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass http://{upstream}; proxy_read_timeout {idle_s:.0f}s; }}
  }}
}}
"""

pytestmark = [
    pytest.mark.proxy,
    pytest.mark.timeout(60 + 2 * QUEUE_S),
    pytest.mark.skipif(
        shutil.which("nginx") is None, reason="nginx is missing: apt-get install nginx"
    ),
]


@asynccontextmanager
async def proxied(site: Site, directory: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client that reaches the site through nginx."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    configuration = directory / "nginx.conf"
    configuration.write_text(
        CONFIGURATION.format(
            directory=directory, port=port, upstream=site.frontend.http_address, idle_s=IDLE_S
        )
    )
    nginx = await asyncio.create_subprocess_exec(
        "nginx", "-e", str(directory / "error.log"), "-c", str(configuration)
    )
    url, timeout = f"http://127.0.0.1:{port}", httpx.Timeout(HANG_S, read=QUEUE_S + HANG_S)
    try:
        async with httpx.AsyncClient(base_url=url, timeout=timeout) as client:
            await soon(_up(client))
            yield client
    finally:
        nginx.terminate()
        await soon(nginx.wait())


async def _up(client: httpx.AsyncClient) -> None:
    while True:
        try:
            await client.get("/health")
        except httpx.ConnectError:
            await asyncio.sleep(0.05)
        else:
            return


async def waits_in_the_queue(request: FakeRequest) -> None:
    request.accept()
    await asyncio.sleep(QUEUE_S)
    request.last_token(7, scheduler_pb2.COMPLETION_REASON_LENGTH)


async def stream(client: httpx.AsyncClient) -> httpx.Response:
    body = {"prompt": "x", "max_tokens": 1, "stream": True}
    return await client.post("/v1/completions", json=body)


async def test_queued_stream_survives_a_proxy_that_closes_silent_connections(
    tmp_path: Path,
) -> None:
    scheduler = FakeScheduler(waits_in_the_queue)
    async with (
        running(tmp_path, scheduler, comment_s=COMMENT_S) as site,
        proxied(site, tmp_path) as client,
    ):
        answer = await stream(client)
    assert answer.status_code == 200
    assert answer.text.count(": keep-alive\n") >= int(QUEUE_S / COMMENT_S) - 1
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_stream_that_waits_for_a_pipeline_survives_too(tmp_path: Path) -> None:
    scheduler = FakeScheduler(pipeline=None)
    hold_s = QUEUE_S + HANG_S
    async with (
        running(tmp_path, scheduler, is_open=False, comment_s=COMMENT_S, hold_s=hold_s) as site,
        proxied(site, tmp_path) as client,
    ):
        await soon(scheduler.wait_connections(1))
        waiting = asyncio.ensure_future(stream(client))
        await asyncio.sleep(QUEUE_S)
        assert not waiting.done()
        scheduler.open()
        answer = await soon(waiting)
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_silent_stream_does_not(tmp_path: Path) -> None:
    scheduler = FakeScheduler(waits_in_the_queue)
    async with (
        running(tmp_path, scheduler, comment_s=10 * QUEUE_S) as site,
        proxied(site, tmp_path) as client,
    ):
        with pytest.raises(httpx.RemoteProtocolError):
            await stream(client)
