"""Parses the requests that a client sends over one connection, within limits.

httptools parses HTTP/1 piece by piece, and calls the methods `on_…` below. The limits are checked
as each part of a request is parsed, before the part is kept. If a request asks for an upgrade to
another protocol, httptools would take its body for data of that protocol. So the head is parsed
again without the upgrade. HTTP allows a server to ignore an upgrade.
"""

from typing import NamedTuple, Protocol

import httptools

from services.frontend.http.transport.connection_limits import ConnectionLimits
from services.frontend.http.transport.connection_refusal import Refused, malformed
from services.frontend.http.transport.incoming_request import IncomingRequest

UPGRADE_HEADERS = frozenset({b"upgrade", b"http2-settings"})

Headers = list[tuple[bytes, bytes]]


class RequestHead(NamedTuple):
    """The request line and the headers of a request."""

    method: str
    url: bytes
    version: str
    """Version of HTTP: `1.0` or `1.1`."""
    headers: Headers
    """Pairs of a name in lower case and a value, in the order of the request."""
    keeps_alive: bool
    """Whether the client allows the connection to stay open after the answer."""
    expects_continue: bool
    """Whether the client waits for the interim answer `100 Continue` before it sends the body."""


class Receiver(Protocol):
    """Receives the parts of requests from the parser, in the order of arrival."""

    def begin(self, head: RequestHead) -> None:
        """Receives the head of a request."""

    def add_body(self, data: bytes) -> None:
        """Receives the next bytes of the request's body."""

    def end(self) -> None:
        """Ends the request, which has been received completely."""


class RequestParser:
    """Parses the requests of one connection."""

    def __init__(self, limits: ConnectionLimits, receiver: Receiver) -> None:
        self.incoming = IncomingRequest(limits)
        """Counts the received bytes of the request that is being parsed."""
        self._receiver = receiver
        self._url = b""
        self._headers: Headers = []
        self._expects_continue = False
        self._begin_parsing()

    def feed(self, piece: bytes) -> None:
        """Parses the next bytes from the client.

        Raises:
            Refused: the bytes break a limit or a rule. Afterwards the parser must not get more
            bytes.
        """
        while piece:
            piece = self._feed(piece)

    def close(self) -> None:
        """Ends parsing and deletes httptools' parser. The parser and this object refer to each
        other, so without this call their memory would stay until the garbage collector runs."""
        del self._parser

    def _begin_parsing(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        # Data after a request with `connection: close` is no error: the request is answered first.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _feed(self, piece: bytes) -> bytes:
        """Parses bytes. Returns the bytes that must be parsed next. The result is empty, unless
        `piece` has a request for an upgrade to another protocol."""
        mark = self.incoming.mark()
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            return self._without_upgrade() + piece[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, Refused):
                raise error.__context__ from None
            raise malformed("this is not HTTP/1.1") from None
        self.incoming.add_piece(len(piece), since=mark)
        return b""

    def _without_upgrade(self) -> bytes:
        """Starts a new parser. Returns the head that has just been parsed, without the headers that
        ask for an upgrade."""
        version = self._parser.get_http_version()
        lines = [b"%b %b HTTP/%b" % (self._parser.get_method(), self._url, version.encode())]
        for name, value in self._headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(token for token in tokens if _is_kept(token.lower()))
            if name not in UPGRADE_HEADERS:
                lines.append(b"%b: %b" % (name, value))
        self._begin_parsing()
        return b"\r\n".join(lines) + b"\r\n\r\n"

    # Called by httptools

    def on_message_begin(self) -> None:
        self._url, self._headers, self._expects_continue = b"", [], False
        self.incoming.begin()

    def on_url(self, url: bytes) -> None:
        self._url += url
        self.incoming.add_url(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.incoming.is_in_body:  # a trailer, which no endpoint reads
            return
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = True
        self._headers.append((name, value))
        self.incoming.add_header(name, value, n_headers=len(self._headers))

    def on_headers_complete(self) -> None:
        version = self._parser.get_http_version()
        self.incoming.check_head(version)
        method = self._parser.get_method()
        if self._parser.should_upgrade():
            if method == b"CONNECT":
                raise malformed("this is no proxy")
            return  # the head is parsed again without the upgrade
        self._receiver.begin(
            RequestHead(
                method.decode("ascii"),
                self._url,
                version,
                self._headers,
                version != "1.0" and self._parser.should_keep_alive(),
                self._expects_continue,
            )
        )
        self.incoming.begin_body()

    def on_body(self, data: bytes) -> None:
        self._receiver.add_body(data)
        self.incoming.add_body(len(data))

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade():
            return
        self._receiver.end()
        self.incoming.end()


def _is_kept(connection_token: bytes) -> bool:
    return connection_token != b"upgrade" and connection_token not in UPGRADE_HEADERS
