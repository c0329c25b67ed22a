"""Counts how much of a request has come, within the limits.

The parser reports the parts that it has read. Bytes that it does not report, the line ends of a
head and the framing of a body, are counted by the pieces that it is fed.
"""

from http import HTTPStatus
from typing import NamedTuple

from services.frontend.http.transport.connection_limits import ConnectionLimits
from services.frontend.http.transport.connection_refusal import Refused, malformed
from services.frontend.request.refusals import Refusal

MAX_FRAMING_BYTES = 64 * 2**10
"""Largest number of bytes by which the chunk sizes, extensions and trailers of a body may exceed
the body itself, and that may follow each other without a byte of the body."""

VERSIONS = frozenset({"1.0", "1.1"})


class ReadMark(NamedTuple):
    """A point in what a client has sent."""

    n_requests: int
    is_in_body: bool
    n_body: int


class IncomingRequest:
    """The requests of a connection, one after the other. All methods except `begin` and `end` raise
    Refused if a limit or a rule is broken."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self.is_in_body = False
        """Whether the head has come, and not all of the body."""
        self._n_requests = 0  # that have come completely
        self._n_head = 0  # bytes of the present head; 0 before its first byte
        self._n_named = 0  # those of them that the parser has reported
        self._n_hosts = 0
        self._n_body = 0  # bytes of the present body,
        self._n_framing = 0  # of its chunks' sizes, extensions and trailers,
        self._n_framing_run = 0  # and those of them since the last byte of the body

    @property
    def has_begun(self) -> bool:
        """Whether a part of a request has come, and not all of it."""
        return self._n_head > 0

    def mark(self) -> ReadMark:
        """Returns the present point, for `add_piece`."""
        return ReadMark(self._n_requests, self.is_in_body, self._n_body)

    def add_piece(self, n_bytes: int, *, since: ReadMark) -> None:
        """Counts bytes that the parser has been fed since a point, if all of them belong to the
        same head or to the same body."""
        if since.n_requests != self._n_requests or since.is_in_body != self.is_in_body:
            return
        if self.is_in_body:
            self._add_framing(n_bytes, self._n_body - since.n_body)
        else:
            self._n_head += n_bytes
            self._check_size(self._n_head)

    def begin(self) -> None:
        """Notes the beginning of a request."""
        self._n_head = 1
        self._n_named = self._n_hosts = 0

    def add_url(self, n_bytes: int) -> None:
        """Counts a part of the request line."""
        self._n_named += n_bytes
        self._check_size(self._n_named, HTTPStatus.REQUEST_URI_TOO_LONG)

    def add_header(self, name: bytes, value: bytes, *, n_headers: int) -> None:
        """Counts a header, which is number `n_headers` of its request."""
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
        """Checks a head that has come completely."""
        if version not in VERSIONS:
            raise malformed(f"HTTP/{version} is not spoken here")
        if self._n_hosts > 1 or (not self._n_hosts and version != "1.0"):
            raise malformed("a request must have one Host")

    def begin_body(self) -> None:
        """Notes the end of the head."""
        self.is_in_body = True
        self._n_body = self._n_framing = self._n_framing_run = 0

    def add_body(self, n_bytes: int) -> None:
        """Counts bytes of the body, whose size its reader limits."""
        self._n_body += n_bytes

    def end(self) -> None:
        """Notes that all of the request has come."""
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
        """Counts `n_bytes` bytes that came inside a body, of which `n_body` are the body itself."""
        self._n_framing += n_bytes - n_body
        self._n_framing_run = 0 if n_body else self._n_framing_run + n_bytes
        if max(self._n_framing - self._n_body, self._n_framing_run) > MAX_FRAMING_BYTES:
            raise Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                "the chunks of the body are too small, or have too much besides",
                Refusal.BODY_TOO_LARGE,
            )
