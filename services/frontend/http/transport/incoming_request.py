"""Counts the received bytes of a request, and checks the limits.

The parser reports the parts of a request that it has read. It does not report the line ends of a
head and the framing of a body. Therefore the pieces of data that the parser gets are counted as
well: in a body, all bytes of a piece that the parser does not report are framing.
"""

from http import HTTPStatus
from typing import NamedTuple

from services.frontend.http.transport.connection_limits import ConnectionLimits
from services.frontend.http.transport.connection_refusal import Refused, malformed
from services.frontend.request.refusals import Refusal

MAX_FRAMING_BYTES = 64 * 2**10
"""Limit on the framing of a body in bytes: chunk sizes, extensions and trailers. The framing may be
at most this many bytes larger than the body itself. Also, at most this many bytes of framing may
come in a row without a byte of the body."""

VERSIONS = frozenset({"1.0", "1.1"})


class ReadMark(NamedTuple):
    """A position in the data that a client has sent."""

    n_requests: int
    is_in_body: bool
    n_body: int


class IncomingRequest:
    """Counts the bytes of a connection's requests, one request after the other. If a limit or a
    rule is broken, `add_piece`, `add_url`, `add_header` and `check_head` raise Refused."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self.is_in_body = False
        """Whether the head of the request has been received, and its body has not been received
        completely."""
        self._n_requests = 0  # received completely
        self._n_head = 0  # bytes of the current head; 0 before the first byte
        self._n_named = 0  # bytes of the head that the parser has reported
        self._n_hosts = 0
        self._n_body = 0  # bytes of the current body
        self._n_framing = 0  # bytes of the body's framing
        self._n_framing_run = 0  # bytes of framing since the last byte of the body

    @property
    def has_begun(self) -> bool:
        """Whether a request has been received in part, but not completely."""
        return self._n_head > 0

    def mark(self) -> ReadMark:
        """Returns the current position in the client's data, for a later call of `add_piece`."""
        return ReadMark(self._n_requests, self.is_in_body, self._n_body)

    def add_piece(self, n_bytes: int, *, since: ReadMark) -> None:
        """Counts `n_bytes` bytes that the parser has got since the position `since`. Does nothing
        unless all these bytes belong to one head or to one body.

        In a head, all bytes count towards `ConnectionLimits.max_head_bytes`. In a body, the bytes
        that are not bytes of the body itself count towards `MAX_FRAMING_BYTES`.

        Raises:
            Refused: a limit is exceeded.
        """
        if since.n_requests != self._n_requests or since.is_in_body != self.is_in_body:
            return
        if self.is_in_body:
            self._add_framing(n_bytes, self._n_body - since.n_body)
        else:
            self._n_head += n_bytes
            self._check_size(self._n_head)

    def begin(self) -> None:
        """Begins to count a new request."""
        self._n_head = 1
        self._n_named = self._n_hosts = 0

    def add_url(self, n_bytes: int) -> None:
        """Counts a part of the request line."""
        self._n_named += n_bytes
        self._check_size(self._n_named, HTTPStatus.REQUEST_URI_TOO_LONG)

    def add_header(self, name: bytes, value: bytes, *, n_headers: int) -> None:
        """Counts a header. `n_headers` is the number of headers of the request so far, this header
        included."""
        self._n_named += len(name) + len(value) + 4
        self._check_size(self._n_named)
        if n_headers > self._limits.max_headers:
            raise Refused(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"a request may have at most {self._limits.max_headers} headers",
                Refusal.HEAD_TOO_LARGE,
            )
        if len(name) == 4 and name.lower() == b"host":
            self._n_hosts += 1

    def check_head(self, version: str) -> None:
        """Checks a complete head: the version of HTTP, and that there is one `Host` header, which
        HTTP/1.0 may lack."""
        if version not in VERSIONS:
            raise malformed(f"HTTP/{version} is not spoken here")
        if self._n_hosts > 1 or (not self._n_hosts and version != "1.0"):
            raise malformed("a request must have one Host")

    def begin_body(self) -> None:
        """Marks the head as complete and begins to count the body."""
        self.is_in_body = True
        self._n_body = self._n_framing = self._n_framing_run = 0

    def add_body(self, n_bytes: int) -> None:
        """Counts bytes of the body. The size of the body is limited where the body is read
        (`request_body.py`)."""
        self._n_body += n_bytes

    def end(self) -> None:
        """Marks the request as received completely."""
        self.is_in_body = False
        self._n_requests += 1
        self._n_head = 0

    def _check_size(
        self, n_bytes: int, status: HTTPStatus = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
    ) -> None:
        if n_bytes > self._limits.max_head_bytes:
            raise Refused(
                status,
                f"the request line and headers may have {self._limits.max_head_bytes} bytes "
                "together",
                Refusal.HEAD_TOO_LARGE,
            )

    def _add_framing(self, n_bytes: int, n_body: int) -> None:
        """Counts `n_bytes` bytes received inside a body, of which `n_body` are bytes of the body
        itself and the rest is framing. Raises Refused if there is too much framing."""
        self._n_framing += n_bytes - n_body
        self._n_framing_run = 0 if n_body else self._n_framing_run + n_bytes
        if max(self._n_framing - self._n_body, self._n_framing_run) > MAX_FRAMING_BYTES:
            raise Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                "the chunks of the body are too small, or have too much besides",
                Refusal.BODY_TOO_LARGE,
            )
