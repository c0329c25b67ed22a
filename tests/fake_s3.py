"""S3-compatible storage on this machine. It answers listings and ranges of objects, and refuses
requests as real storage does."""

import hashlib
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import services
from tests.fake_http import serving_http

ROOT = Path(services.__path__[0]).parent
ACCESS_KEY = "AKIDEXAMPLE"
MAX_KEYS = 3
"""Largest number of keys in one answer. The number is small, so that a listing takes several
answers, as a listing of thousands of keys does."""


@dataclass(slots=True)
class Stored:
    """An object in a bucket."""

    content: bytes
    etag: str | None = None
    """ETag of the object. If None, the ETag is the MD5 of the content, as for an object that was
    uploaded in one part."""
    encryption: str | None = None
    sent: bytes | None = None
    """Bytes that are sent in place of the content; None sends the content."""

    @property
    def shown_etag(self) -> str:
        return self.etag or hashlib.md5(self.content, usedforsecurity=False).hexdigest()


@dataclass(slots=True)
class FakeS3:
    """The objects of the storage, the faults that it simulates, and the requests that it got."""

    buckets: dict[str, dict[str, Stored]] = field(default_factory=dict)
    drops_after: int | None = None
    """Number of bytes of an answer after which each connection is dropped; None drops none."""
    hangs_at: int | None = None
    """Reads that begin at this byte or later send only their first half and then hang; None never
    hangs."""
    is_hanging: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    status: int | None = None
    """HTTP status of all answers. If None, each answer has the correct status."""
    ignores_ranges: bool = False
    has_etags: bool = True
    lists_all: bool = False
    """Whether listings have all objects, whatever the prefix of the request."""
    reads: list[tuple[str, int, int]] = field(default_factory=list)
    """The key, the first byte, and the byte after the last, of each read."""
    n_requests: int = 0
    url: str = ""

    def put(self, bucket: str, prefix: str, files: dict[str, bytes]) -> None:
        """Adds files below a prefix of a bucket."""
        objects = self.buckets.setdefault(bucket, {})
        objects.update({f"{prefix}/{name}": Stored(content) for name, content in files.items()})

    def environment(self, home: Path, **variables: str) -> dict[str, str]:
        """Returns the environment of a process that uses this storage and no other."""
        return {
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'protos' / 'gen'}",
            "HOME": str(home),
            "AWS_ENDPOINT_URL": self.url,
            "AWS_REGION": "eu-north-1",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_METADATA_ENDPOINT": "http://127.0.0.1:1",
            **variables,
        }

    @contextmanager
    def serving(self, tls: ssl.SSLContext | None = None) -> Iterator["FakeS3"]:
        """Serves until the end of the block, and yields the storage."""
        with serving_http(_Handler, released=self.released, tls=tls, s3=self) as self.url:
            yield self


class _Handler(BaseHTTPRequestHandler):
    s3: FakeS3
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.s3.n_requests += 1
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        bucket, _, key = unquote(url.path).removeprefix("/").partition("/")
        if self.s3.status is not None:
            self._refuse(self.s3.status, "SlowDown")
        elif not self._is_signed(query):
            self._refuse(403, "InvalidAccessKeyId")
        elif bucket not in self.s3.buckets:
            self._refuse(404, "NoSuchBucket")
        elif query.get("list-type") == "2":
            self._list(self.s3.buckets[bucket], query)
        elif key not in self.s3.buckets[bucket]:
            self._refuse(404, "NoSuchKey")
        else:
            self._object(key, self.s3.buckets[bucket][key])

    def _is_signed(self, query: dict[str, str]) -> bool:
        header = self.headers["Authorization"] or ""
        if header.startswith("AWS4-HMAC-SHA256 "):
            fields = dict(part.strip().split("=", 1) for part in header[17:].split(","))
            scope, signature = fields["Credential"], fields["Signature"]
        else:
            scope, signature = query.get("X-Amz-Credential", ""), query.get("X-Amz-Signature", "")
        access_key, _, rest = scope.partition("/")
        return (
            access_key == ACCESS_KEY
            and rest.endswith("/eu-north-1/s3/aws4_request")
            and len(signature) == 64
        )

    def _list(self, objects: dict[str, Stored], query: dict[str, str]) -> None:
        prefix = query.get("prefix", "")
        keys = sorted(
            key
            for key in objects
            if self.s3.lists_all or (key.startswith(prefix) and "/" not in key[len(prefix) :])
        )
        begin = int(query.get("continuation-token", "0"))
        shown = keys[begin : begin + MAX_KEYS]
        end = begin + len(shown)
        is_cut = end < len(keys)
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(objects[key].content)}</Size>"
            f"<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"{self._etag_of(objects[key])}</Contents>"
            for key in shown
        )
        more = f"<NextContinuationToken>{end}</NextContinuationToken>" if is_cut else ""
        self._send(
            200,
            f"<ListBucketResult><IsTruncated>{str(is_cut).lower()}</IsTruncated>"
            f"{more}{contents}</ListBucketResult>",
        )

    def _etag_of(self, stored: Stored) -> str:
        return f"<ETag>&quot;{stored.shown_etag}&quot;</ETag>" if self.s3.has_etags else ""

    def _object(self, key: str, stored: Stored) -> None:
        wanted = self.headers["If-Match"]
        if wanted is not None and (not self.s3.has_etags or wanted.strip('"') != stored.shown_etag):
            self._refuse(412, "PreconditionFailed")
            return
        content = stored.content if stored.sent is None else stored.sent
        begin, end = 0, len(content)
        has_range = self.headers["Range"] is not None and not self.s3.ignores_ranges
        if has_range:
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last) + 1, end)
        body = content[begin:end]
        self.send_response(206 if has_range else 200)
        if self.s3.has_etags:
            self.send_header("ETag", f'"{stored.shown_etag}"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("Content-Length", str(len(body)))
        if has_range:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
        if stored.encryption is not None:
            self.send_header("x-amz-server-side-encryption", stored.encryption)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.s3.reads.append((key, begin, end))
        if self.s3.hangs_at is not None and begin >= self.s3.hangs_at:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.s3.is_hanging.set()
            self.s3.released.wait(60)
            self.close_connection = True
        elif self.s3.drops_after is not None and len(body) > self.s3.drops_after:
            self.wfile.write(body[: self.s3.drops_after])
            self.wfile.flush()
            self.close_connection = True
        else:
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, f"<Error><Code>{code}</Code><Message>{code}.</Message></Error>")

    def _send(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""
