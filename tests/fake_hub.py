"""A hub of checkpoints on this machine, to which the real library of the hub connects. It answers
listings and ranges of files, and refuses requests as the real hub does."""

import hashlib
import json
import re
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import services
from tests.fake_http import serving_http

ROOT = Path(services.__path__[0]).parent


@dataclass(slots=True)
class Repository:
    """A repository with a single commit."""

    files: dict[str, bytes]
    commit: str = "c0ffee" + "0" * 34
    is_gated: bool = False
    """Whether a token is needed to read the repository."""


@dataclass(slots=True)
class FakeHub:
    """The repositories of the hub, the faults that it simulates, and the requests that it got."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    token: str = "hf_secret"
    drops_after: int | None = None
    """Number of bytes of a large file after which each connection is dropped; None drops none."""
    hangs_after: int | None = None
    """Number of bytes of a large file after which the hub sends nothing more; None never hangs."""
    is_hanging: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    ranges: list[tuple[str, int]] = field(default_factory=list)
    """The path and the first byte of each read of a large file."""
    paths: list[str] = field(default_factory=list)
    """The path of each file that was read."""
    url: str = ""

    def environment(self, home: Path, **variables: str) -> dict[str, str]:
        """Returns the environment of a process that uses this hub and no other."""
        return {
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'protos' / 'gen'}",
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HOME": str(home),
            **variables,
        }

    @contextmanager
    def serving(self, tls: ssl.SSLContext | None = None) -> Iterator["FakeHub"]:
        """Serves until the end of the block, and yields the hub."""
        with serving_http(_Handler, released=self.released, tls=tls, hub=self) as self.url:
            yield self


def checkpoint(weights: bytes = b"w" * 100, **others: bytes) -> dict[str, bytes]:
    """Returns the files of a checkpoint that could be served, together with files that serving does
    not need."""
    return {
        "config.json": b"{}",
        "tokenizer.json": b'{"version": "1.0"}',
        "model.safetensors": weights,
        "pytorch_model.bin": b"a pickle",
        "README.md": b"words",
        "onnx/config.json": b"{}",
        **others,
    }


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/(.+)", path):
            repository = self._repository(found[1], found[3])
            if repository is not None:
                whole = "recursive=true" in self.path.lower()
                self._json(
                    _info(repository) if found[2] == "revision" else _tree(repository, whole)
                )
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            repository = self._repository(found[1], found[2])
            if repository is not None:
                self._file(repository, found[3])
        else:
            self._refuse(404, "EntryNotFound")

    def _repository(self, name: str, revision: str) -> Repository | None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            self._refuse(401, "RepoNotFound")
        elif repository.is_gated and self.headers["Authorization"] != f"Bearer {self.hub.token}":
            self._refuse(403, "GatedRepo")
        elif revision not in ("main", "v1", repository.commit):
            self._refuse(404, "RevisionNotFound")
        else:
            return repository
        return None

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, repository: Repository, path: str) -> None:
        content = repository.files[path]
        begin = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        body = content[begin:]
        self.send_response(206 if begin else 200)
        self.send_header("X-Repo-Commit", repository.commit)
        self.send_header("ETag", f'"{_digest(path, content)}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.hub.paths.append(path)
        if _is_large(path):
            self.hub.ranges.append((path, begin))
            limits = [it for it in (self.hub.drops_after, self.hub.hangs_after) if it is not None]
            if limits and len(body) > limits[0]:
                self.wfile.write(body[: limits[0]])
                self.wfile.flush()
                if self.hub.hangs_after is not None:
                    self.hub.is_hanging.set()
                    self.hub.released.wait(60)
                self.close_connection = True
                return
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


def _is_large(path: str) -> bool:
    return path.endswith((".safetensors", ".bin"))


def _digest(path: str, content: bytes) -> str:
    digest = hashlib.sha256 if _is_large(path) else hashlib.sha1
    return digest(content).hexdigest()


def _info(repository: Repository) -> Mapping[str, Any]:
    return {"_id": "1", "id": "x", "sha": repository.commit, "siblings": [], "private": False}


def _tree(repository: Repository, is_whole: bool) -> list[Mapping[str, Any]]:
    entries: list[Mapping[str, Any]] = []
    for path, content in repository.files.items():
        if "/" in path and not is_whole:
            entries.append({"type": "directory", "path": path.partition("/")[0], "oid": "0" * 40})
            continue
        entry = {"type": "file", "path": path, "size": len(content), "oid": "1" * 40}
        if _is_large(path):
            oid = _digest(path, content)
            entry["lfs"] = {"size": len(content), "oid": oid, "pointerSize": 130}
        entries.append(entry)
    return entries
