"""The files of the page that shows the pipeline. The files are read once at start; files that are
added later are not served.

The content security policy of the files lets a browser load only these files, and connect to no
other server.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.responses import Response

from services.frontend.http.transport.media_types import HTML

DIRECTORY = Path(__file__).parents[2] / "page"
INDEX = "index.html"

MEDIA_TYPES = {
    ".html": HTML,
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".jsonl": "application/jsonl",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".txt": "text/plain; charset=utf-8",
}
"""Media type for each suffix of a file name."""

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
"""HTTP headers of all files. With `no-cache` a browser asks each time whether its copy is still
valid."""


@dataclass(frozen=True, slots=True)
class PageFile:
    """The content and the headers of a served file."""

    content: bytes
    media_type: str
    etag: str

    @classmethod
    def read(cls, path: Path) -> "PageFile":
        """Reads a file.

        Raises:
            OSError: the file cannot be read.
            ValueError: the media type of the file is not known.
        """
        if path.suffix not in MEDIA_TYPES:
            raise ValueError(f"no media type is known for {path}")
        content = path.read_bytes()
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        return cls(content, MEDIA_TYPES[path.suffix], etag)

    def answer(self, if_none_match: str | None) -> Response:
        """Returns an answer with the file, or a 304 without content if the client's copy is still
        valid. `if_none_match` is the value of the header `if-none-match`."""
        headers = {**HEADERS, "etag": self.etag}
        if if_none_match is not None and self._is_among(if_none_match):
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)

    def _is_among(self, etags: str) -> bool:
        listed = {etag.strip().removeprefix("W/") for etag in etags.split(",")}
        return self.etag in listed or "*" in listed


@cache
def page_files() -> Mapping[str, PageFile]:
    """Returns the files of the page. The files are read at the first call and cached.

    Raises:
        OSError: a file cannot be read.
        ValueError: there is no index, or the media type of a file is not known.
    """
    return read_files(DIRECTORY)


def read_files(directory: Path) -> Mapping[str, PageFile]:
    """Reads all files below a directory. Returns the files keyed by path relative to the directory.

    Raises:
        OSError: a file cannot be read.
        ValueError: there is no index, or the media type of a file is not known.
    """
    files = {
        path.relative_to(directory).as_posix(): PageFile.read(path)
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }
    if INDEX not in files:
        raise ValueError(f"there is no {INDEX} in {directory}")
    return files
