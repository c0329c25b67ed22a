"""The API over a Unix socket, and what becomes of its file."""

import socket
import stat
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc.aio
import httpx
import pytest
from orcinus.v1 import inference_pb2

from services.frontend.http.transport.unix_socket import listen_unix
from tests.frontend.conftest import InferenceClient, running, soon
from tests.limits import HANG_S


async def test_the_api_is_served_there_too(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    async with running(tmp_path, http_socket=path) as site:
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, timeout=HANG_S) as client:
            body = {"prompt": "x", "max_tokens": 2, "stream": True}
            answer = await client.post("http://localhost/v1/completions", json=body)
        assert answer.text.endswith("data: [DONE]\n\n")
        assert (await site.http.get("/health")).status_code == 200
    assert not path.exists()


async def test_grpc_is_served_there_too(tmp_path: Path) -> None:
    path = tmp_path / "grpc%41.sock"
    async with running(tmp_path, grpc_socket=path) as site:
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        with pytest.raises(OSError, match="another process listens there"), listen_unix(path):
            pass
        async with grpc.aio.insecure_channel(f"unix:{quote(str(path))}") as channel:
            client = InferenceClient(channel)
            assert (await soon(client.describe_model())).model
            pieces = [
                piece
                async for piece in client.stream(
                    inference_pb2.GenerateStreamRequest(prompt=inference_pb2.Prompt(text="abc"))
                )
            ]
        assert pieces
        assert (await soon(site.inference.describe_model())).model
    assert not path.exists()


async def test_limits_hold_for_both_together(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    settings: dict[str, Any] = {"http_socket": path, "max_connections": 1, "max_head_bytes": 1000}
    async with running(tmp_path, **settings) as site:
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, timeout=HANG_S) as client:
            # The idle connection over TCP gives up its place.
            assert (await site.http.get("/health")).status_code == 200
            assert (await client.get("http://localhost/health")).status_code == 200
            assert len(site.frontend._http.state.places.taken) == 1
            large = await client.get("http://localhost/health", headers={"x": "y" * 2000})
            assert large.status_code == 431


def test_file_of_a_dead_process_is_replaced_and_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with listen_unix(path) as listener:
        listener.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert not path.exists()


def test_file_that_somebody_uses_stays(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    with listen_unix(path) as listener:
        listener.listen()
        with pytest.raises(OSError, match="another process listens there"), listen_unix(path):
            pass
        path.unlink()
        with listen_unix(path):
            pass
        path.write_text("another's")
    assert path.read_text() == "another's"
    with pytest.raises(OSError, match="no socket"), listen_unix(path):
        pass
    with pytest.raises(OSError, match="cannot listen on"), listen_unix(tmp_path / ("x" * 200)):
        pass
