"""S3-compatible storage as a source of checkpoints: `s3://bucket/prefix`, or
`s3://bucket/key.gguf` for one file.

    s3--BUCKET--DIGEST/objects/     contents, each under a digest of its key, size and ETag
    s3--BUCKET--DIGEST/states/…/    one state of the prefix, as links to contents
    s3--BUCKET--DIGEST/current      the name of the state that was fetched last

list the prefix → find missing pieces → fetch them, resumably → check the contents → link the state
in one step
"""

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from services.common import bounded_file
from services.common.gguf.header import model_files
from services.hub.object_file import ObjectFile
from services.hub.s3_storage import Bucket, StoredObject
from services.hub.source import Fetched, Say, SourceError, SourceUnreachable
from services.hub.transfer import TransferProgress, check_space, transfer
from services.hub.turn import turn_of
from services.hub.wanted_files import MODULES, POOLING_FOLDER, trouble_with, wanted

SCHEME = "s3://"
GGUF = ".gguf"
N_CONNECTIONS = 8
"""Number of pieces that are fetched at the same time."""
_BUCKET = re.compile(r"[A-Za-z0-9][\w.-]{0,254}", re.ASCII)
_PART = re.compile(r"(?!\.{1,2}$)[^/\\\x00-\x1f]+")
_MAX_KEY_BYTES = 1024
_STATE = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class S3Source:
    """A checkpoint in a bucket: the objects below a prefix, or a single GGUF file."""

    bucket: str
    key: str
    """The prefix without a slash at its end, or the key of a GGUF file. Empty for the top of the
    bucket."""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Returns the source that a text names. Returns None if the text does not begin with
        `s3://`.

        Raises:
            ValueError: the text begins with `s3://` but is invalid.
        """
        if not text.startswith(SCHEME):
            return None
        bucket, _, key = text.removeprefix(SCHEME).partition("/")
        if not _BUCKET.fullmatch(bucket):
            raise ValueError(f"{text!r} names no bucket: it must be like s3://bucket/prefix")
        key = key.removesuffix("/")
        if key and not all(_PART.fullmatch(part) for part in key.split("/")):
            raise ValueError(f"{text!r}: no part of a prefix may be empty, '.' or '..'")
        if len(key.encode()) > _MAX_KEY_BYTES:
            raise ValueError(f"{text!r}: the prefix has more than {_MAX_KEY_BYTES} bytes")
        return cls(bucket, key)

    @property
    def model_name(self) -> str:
        return self.key.rpartition("/")[2].removesuffix(GGUF) or self.bucket

    def fetched_in(self, cache: Path) -> Fetched | None:
        try:
            content = bounded_file.read_bytes(self._folder(cache) / "current", max_bytes=100)
        except (OSError, ValueError):
            return None
        state = content.decode(errors="replace")
        return self._complete(cache, state) if _STATE.fullmatch(state) else None

    def fetch(self, *, say: Say, cache: Path | None = None) -> Fetched:
        cache = _users_cache() if cache is None else cache
        bucket = Bucket(self.bucket)
        found = self.fetched_in(cache)
        try:
            files = self._listing(bucket)
        except SourceUnreachable as error:
            if found is None:
                raise
            say(f"{error}; this is what the cache has")
            return found
        state = _state_of(files)
        with self._disk_explained(), turn_of(self._folder(cache), say=say):
            if self._complete(cache, state) is None:
                self._fetch(bucket, files, state, cache)
            _write(self._folder(cache) / "current", state)
        found = self._complete(cache, state)
        if found is None:
            raise SourceError(f"{self}: what has been fetched into {cache} is gone again")
        return found

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.key}".rstrip("/")

    def _folder(self, cache: Path) -> Path:
        digest = hashlib.sha256(str(self).encode()).hexdigest()[:16]
        return cache / f"s3--{self.bucket[:100]}--{digest}"

    def _complete(self, cache: Path, state: str) -> Fetched | None:
        directory = self._folder(cache) / "states" / state
        if not directory.is_dir():
            return None
        if not all(path.is_file() or path.is_dir() for path in directory.rglob("*")):
            return None
        path = directory / self.key.rpartition("/")[2] if self._is_file else directory
        return Fetched(path, f"state {state[:12]}")

    @property
    def _is_file(self) -> bool:
        return self.key.endswith(GGUF)

    def _listing(self, bucket: Bucket) -> dict[str, StoredObject]:
        """Returns the objects that must be fetched, by the names of the files in the checkpoint's
        directory."""
        if self._is_file:
            if len(model_files(Path(self.key))) > 1:
                raise SourceError(
                    f"{self} is one of several files of a model: copy all of them to a directory, "
                    "and name the first one there"
                )
            return {self.key.rpartition("/")[2]: bucket.object_at(self.key)}
        found = {it.key.rpartition("/")[2]: it for it in bucket.objects_in(self.key)}
        if not found:
            raise SourceError(f"{self}: nothing lies below this prefix")
        if MODULES in found:
            for it in bucket.objects_in(f"{self.key}/{POOLING_FOLDER}".removeprefix("/")):
                found[f"{POOLING_FOLDER}/{it.key.rpartition('/')[2]}"] = it
        files = {
            name: found[name] for name in wanted({name: it.size for name, it in found.items()})
        }
        if trouble := trouble_with({name: it.size for name, it in files.items()}):
            single = next((name for name in sorted(found) if name.endswith(GGUF)), None)
            hint = f"; its GGUF file is {self}/{single}" if single else ""
            raise SourceError(f"{self}: {trouble}{hint}")
        return files

    def _fetch(
        self, bucket: Bucket, files: dict[str, StoredObject], state: str, cache: Path
    ) -> None:
        folder = self._folder(cache)
        objects = folder / "objects"
        every = {name: ObjectFile(bucket, it, objects) for name, it in files.items()}
        needed = {file.path: file for file in every.values() if not file.path.exists()}
        pieces = [(file, begin) for file in needed.values() for begin in file.missing()]
        n_bytes = sum(file.n_bytes(begin) for file, begin in pieces)
        _forget_others(objects, list(needed.values()))
        check_space(str(self), objects, n_bytes)
        for file in needed.values():
            file.prepare()
        transfer(
            (partial(file.fetch_piece, begin) for file, begin in pieces),
            n_connections=N_CONNECTIONS,
            n_bytes=n_bytes,
        )
        transfer(
            (partial(_finish, file) for file in needed.values()),
            n_connections=N_CONNECTIONS,
            n_bytes=0,
        )
        _link(folder / "states" / state, {name: file.path for name, file in every.items()})

    @contextmanager
    def _disk_explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SourceError(
                f"{self}: {error}; what has been fetched stays, and the next call goes on"
            ) from error


def _finish(file: ObjectFile, on_progress: TransferProgress) -> None:
    file.finish()
    on_progress(0)


def _users_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "orcinus"


def _state_of(files: dict[str, StoredObject]) -> str:
    """Returns a digest of the files of a checkpoint: of their names, keys, sizes and ETags."""
    lines = (f"{name}\n{it.key}\n{it.size}\n{it.etag}\n" for name, it in sorted(files.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:40]


def _forget_others(objects: Path, needed: list[ObjectFile]) -> None:
    """Removes the incomplete files of objects that are not in `needed`. Such objects have changed
    or were deleted since an earlier fetch."""
    kept = {path for file in needed for path in (file.part, file.notes)}
    for path in [*objects.glob("*.part"), *objects.glob("*.pieces-*")]:
        if path not in kept:
            path.unlink()


def _link(directory: Path, targets: dict[str, Path]) -> None:
    """Creates a directory with links to files in one atomic step, unless the directory exists."""
    if directory.exists():
        return
    new = directory.with_name(f".{directory.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    for name, target in targets.items():
        (new / name).parent.mkdir(exist_ok=True)
        (new / name).symlink_to(os.path.relpath(target, (directory / name).parent))
    os.replace(new, directory)


def _write(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    os.replace(new, path)
