"""Clients whose host says nothing more: both protocols wait for them equally long."""

import asyncio
import socket
from pathlib import Path

from services.common import address, rpc
from services.frontend.http.transport.silent_clients import notice_silence
from services.frontend.settings import FrontendSettings
from tests.frontend.conftest import running
from tests.http2_client import Http2Client

WATCH = "/grpc.health.v1.Health/Watch"
LIMIT_S = 0.4
A_CUT_S = 25.0


class SilentClient(Http2Client):
    """A client of gRPC that can fall silent: it acknowledges no ping then."""

    is_silent = False

    def flush(self) -> None:
        """Sends what there is to send, unless the client is silent."""
        if not self.is_silent:
            super().flush()


async def test_a_silent_grpc_client_is_waited_for_and_then_left(tmp_path: Path) -> None:
    clock = asyncio.get_running_loop().time
    async with (
        running(tmp_path, client_silence_limit_s=LIMIT_S) as site,
        SilentClient.connected(site.frontend.grpc_address) as client,
    ):
        call = client.call(WATCH)
        await client.wait_messages(call, 1)
        client.is_silent, began = True, clock()
        await client.wait_closed()
        assert clock() - began >= LIMIT_S


def test_the_kernel_waits_as_long_for_a_silent_http_client() -> None:
    (listener,) = address.listen("127.0.0.1:0")
    with listener:
        notice_silence(listener, 8.0)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            tcp = {
                option: accepted.getsockopt(socket.IPPROTO_TCP, option)
                for option in (
                    socket.TCP_USER_TIMEOUT,
                    socket.TCP_KEEPIDLE,
                    socket.TCP_KEEPINTVL,
                )
            }
    assert list(tcp.values()) == [8000, 2, 2]


def test_both_protocols_outlast_a_cut_after_which_tcp_tries_again_late() -> None:
    """TCP doubles its pause: after a cut it may be silent for as long as the cut again."""
    limit_s = FrontendSettings.model_fields["client_silence_limit_s"].default
    assert limit_s >= 4 * A_CUT_S
    options = dict(
        rpc.public_server_options(
            max_connections=1, head_limit_s=1.0, idle_limit_s=1.0, silence_limit_s=limit_s
        )
    )
    for name in ("grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"):
        assert options[name] >= limit_s * 1000
