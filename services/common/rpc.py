"""Makes gRPC channels and servers for all services, with one set of limits.

`rpc_handlers` makes the handlers of servicers.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor

from services.common import address as addresses
from services.common import errors

MAX_MESSAGE_BYTES = 64 * 2**20
"""Size in bytes of the largest message that either side accepts.

For messages of clients, the handlers have much lower limits.
"""

KEEPALIVE_S = 5
"""Seconds between two pings.

With this interval, either side notices in less than ten seconds that its peer is stopped or its
network is cut. A peer whose event loop hangs still answers pings, because gRPC's threads answer
them.
"""

KEEPALIVE_TIMEOUT_S = 4

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    # A proxy of the environment (`https_proxy`) is for the way out; it knows none of our peers.
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    # For what TCP has sent and the peer's host ignores.
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    # For the answer to a ping; a minute by default.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    ("grpc.http2.max_pings_without_data", 0),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    *CHANNEL_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_S * 1000 // 2),
    ("grpc.so_reuseport", 0),
    # TLS and the first HTTP/2 frames; two minutes by default.
    ("grpc.server_handshake_timeout_ms", 10_000),
]

WINDOW_BYTES = 16 * 2**10
"""Number of bytes of a message that a public server receives before the call's method starts to
read the message."""

FOR_STRANGERS: list[tuple[str, int]] = [
    # gRPC estimates a window for each connection, up to several megabytes per stream, also for
    # streams that are not read. Without the estimate, an unread stream takes at most its initial
    # window, and a stream that is read still has room for its whole message.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    # With this limit, gRPC closes a connection that pings too often, but only after pending writes.
    # Until then gRPC copies a growing list of errors for each further ping. Ten thousand pings, 170
    # KB, take half a second of a processor, and pings on several connections occupy all of gRPC's
    # threads. Without the limit ten thousand pings take two milliseconds.
    ("grpc.http2.max_ping_strikes", 0),
]
"""Options of a public server, whose clients may send many bytes that the server does not read."""

MAX_STREAMS = 256
"""Largest number of concurrent calls of one connection. gRPC's clients do not open a second
connection by themselves: their further calls wait."""

MAX_PENDING_CALLS = 8 * 2**10
"""Largest number of calls that wait to begin. Each waiting call takes 9 KiB.

From half of this number on, gRPC cancels calls at random, whichever client made them. gRPC's
default is 1,000.
"""

MAX_METADATA_BYTES = 16 * 2**10
"""Largest size in bytes of a call's metadata: names, a key and a trace.

By default gRPC has two limits, and refuses metadata between them at random. This one value is set
for both.
"""

MAX_CONNECTION_AGE_S = 3600
"""Seconds after which gRPC tells a client to make its next calls on another connection.

Frontends that started later thus get their share of the calls, and no connection lasts for ever.
"""

MAX_STREAM_AGE_S = 3 * 3600
"""Seconds that a call may last after its connection has reached `MAX_CONNECTION_AGE_S`. This is
longer than the longest answers take.

The limit ends calls whose client does not read. A server cannot end such calls in another way.
"""


def public_server_options(
    *, max_connections: int, head_limit_s: float, idle_limit_s: float, silence_limit_s: float
) -> list[tuple[str, int]]:
    """Returns the options of a public server, whose clients are not trusted.

    `MAX_STREAMS` limits the concurrent calls of one connection. The client's gRPC library keeps
    further calls waiting. gRPC's own protection against overload is off, for the following reason.
    A waiting call begins as soon as another call ends, before the server has removed the ended
    call. With the protection, the server would count one call too many and refuse the new call, and
    then all other waiting calls.

    Connections beyond `max_connections` are closed before anything is read from them. gRPC's
    defaults are right for floods of reset frames and settings frames: at most 32 calls begin at a
    time, and nothing is read from a client that does not read the answers to its frames. No option
    of gRPC usefully limits what a connection sends in addition to its calls, such as pings;
    `connection_watch.py` limits it.

    A client that is silent for a quarter of `silence_limit_s` is sent a ping. It has
    `silence_limit_s` seconds to answer the ping, because its network may come back.
    """
    silence_limit_ms = int(silence_limit_s * 1000)
    return [
        ("grpc.keepalive_time_ms", silence_limit_ms // 4),
        ("grpc.keepalive_timeout_ms", silence_limit_ms),
        ("grpc.http2.ping_timeout_ms", silence_limit_ms),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.http.overload_protection", 0),  # see above
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS // 2),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.server_handshake_timeout_ms", int(head_limit_s * 1000)),
        ("grpc.max_connection_idle_ms", int(idle_limit_s * 1000)),
        ("grpc.max_connection_age_ms", MAX_CONNECTION_AGE_S * 1000),
        ("grpc.max_connection_age_grace_ms", MAX_STREAM_AGE_S * 1000),
        *FOR_STRANGERS,
    ]


PROBE_SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", 4 * 2**10),
    ("grpc.max_allowed_incoming_connections", 256),
    ("grpc.max_concurrent_streams", 100),
    *FOR_STRANGERS,
]
"""Options of a server that serves only health, to any client that can reach its pod."""

RECONNECT_OPTIONS: list[tuple[str, int]] = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
]
"""Channel options for connecting to a peer that may not run yet.

By default gRPC pauses for up to two minutes between attempts, and would notice late that the peer
has started.
"""

EPOCH_METADATA = "orcinus-epoch"
MAX_DIGITS = 20
"""Number of decimal digits of the largest 64-bit number."""

Options = Sequence[tuple[str, str | int]]
"""Channel options of gRPC: pairs of a name and a value."""


class Connect(Protocol):
    """Type of a function that opens a channel to `host:port`, with TLS or in plaintext."""

    def __call__(self, address: str, options: Options = ()) -> grpc.aio.Channel: ...


def connect(
    address: str, options: Options = (), *, credentials: grpc.ChannelCredentials | None = None
) -> grpc.aio.Channel:
    """Returns a channel to `host:port`. Without credentials, the channel is in plaintext.

    The channel has the limits of this project, unless `options` name others.
    """
    all_options = list(dict[str, str | int]((*CHANNEL_OPTIONS, *options)).items())
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=all_options)
    return grpc.aio.secure_channel(address, credentials, options=all_options)


def create_server(options: Options = ()) -> grpc.aio.Server:
    """Returns a gRPC server without any service.

    The server has the limits of this project, unless options name others.
    """
    return grpc.aio.server(options=list(dict[str, str | int]((*SERVER_OPTIONS, *options)).items()))


def bind(
    server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None
) -> str:
    """Binds a server to `host:port`. Port 0 takes a free port. Returns the address that clients can
    use.

    Raises:
        OSError: the address is in use, or does not belong to this machine.
        ValueError: the address is not `host:port`.
    """
    parsed = addresses.parse(address)
    try:
        for place in addresses.places(parsed):
            if credentials is None:
                port = server.add_insecure_port(str(place))
            else:
                port = server.add_secure_port(str(place), credentials)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from error
    except OSError as error:
        raise OSError(f"cannot listen on {address}: {addresses.reason_of(error)}") from error
    return str(parsed._replace(port=port))


def bind_unix(server: grpc.aio.Server, path: Path) -> None:
    """Binds a server to the path of a Unix socket, in plaintext. Raises OSError if the path cannot
    be bound."""
    try:
        server.add_insecure_port(f"unix:{quote(str(path))}")
    except RuntimeError as error:
        raise OSError(str(error)) from error


def method_path(service: ServiceDescriptor, method: str) -> str:
    """Returns the path of a gRPC method, such as `/orcinus.v1.XService/Method`, for calls that send
    and receive plain bytes instead of messages."""
    return f"/{service.full_name}/{method}"


def epoch_metadata(epoch: int) -> tuple[tuple[str, str], ...]:
    """Returns gRPC metadata that holds the epoch of a stream."""
    return ((EPOCH_METADATA, str(epoch)),)


def epoch_of(context: Any) -> int:
    """Returns the epoch in the metadata of a stream.

    Raises:
        InvalidRequest: the metadata has no epoch, or one that is not a number of at most
            `MAX_DIGITS` digits.
    """
    for key, value in context.invocation_metadata() or ():
        if key == EPOCH_METADATA and str(value).isdecimal() and len(value) <= MAX_DIGITS:
            return int(value)
    raise errors.InvalidRequest(EPOCH_METADATA, "metadata must name an epoch")
