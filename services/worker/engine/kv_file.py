"""A file in memory with the keys and values of one rank, which outlive the rank's process.

When a rank starts, it takes over the file of an earlier process with the same stage, rank, model,
build and layout. A rank holds a lock on its file as long as the rank's process lives, so a file has
one writer. The file of a process that is stopped by a signal is not taken over, because the process
may continue. The files of ranks of other stages and models stay for later processes of these ranks,
and are removed only if there is too little memory for a new file.

All of the file's memory is allocated at the beginning. So a full file system is an error at the
start, and not a signal that ends the process in the middle of an iteration.

Prompts and outputs can be computed from keys and values, so only the user of the process may read
the file.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from services.worker.engine.kv_record import RECORD_BYTES, KVRecord, Stored

DYING_S = 0.5
"""Seconds to wait for a process that is being killed and still holds its file. Its threads must run
once more to end, which takes a while on a busy machine."""

POLL_S = 0.005
"""Seconds between two attempts to lock a file."""

_HEADER_BYTES = 4096  # the record, and then nothing up to the end of its page
_ALIGNMENT = 64
_OWN = re.compile(r"(?P<stage>[0-9a-f]{16})\.(?P<rank>\d+)\.[0-9a-f]{8}\.kv")
"""Pattern of the names of K/V files: a digest of everything that the ranks of one stage have in
common, the rank, and a random number."""

assert RECORD_BYTES <= _HEADER_BYTES


class KVFile:
    """The memory of one rank for keys and values: a file that the process has mapped and locked."""

    def __init__(self, fd: int, path: Path) -> None:
        """`fd` is locked and stays open until the process ends."""
        self.path = path
        self._fd = fd
        self._mapped = mmap.mmap(fd, 0)
        self._bytes = torch.frombuffer(self._mapped, dtype=torch.uint8)
        self._n_used = _HEADER_BYTES
        self.record = KVRecord(memoryview(self._mapped))
        """The record of the epoch that wrote to the memory last, and of the last iteration whose
        keys and values are complete."""

    @classmethod
    def open(cls, directory: Path, *, stage: str, rank: int, n_bytes: int) -> KVFile:
        """Takes over the newest file that an earlier process of this rank left in `directory`, or
        else makes a file for tensors of `n_bytes` bytes. If other processes have locked all files
        of this rank, one of these processes may be dying, so this method tries again for up to
        `DYING_S` seconds. `stage` is a digest of 16 hexadecimal digits of everything on which the
        content depends, except the number `rank` of the rank.

        Raises:
            OSError: the directory cannot be used, or has too little memory.
        """
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        n_bytes += _HEADER_BYTES
        deadline = time.monotonic() + DYING_S
        while True:
            newest = _newest_free(directory, stage, rank, n_bytes)
            if newest is not None:
                return cls(newest.fd, newest.path)
            is_there = any(directory.glob(f"{stage}.{rank}.*.kv"))
            if not is_there or time.monotonic() >= deadline:
                break
            time.sleep(POLL_S)
        path = directory / f"{stage}.{rank}.{secrets.token_hex(4)}.kv"
        try:
            return cls(_made(path, n_bytes), path)
        except OSError:
            if not _remove_others(directory, stage):
                raise
        return cls(_made(path, n_bytes), path)

    def begin(self, n_blocks: int) -> Stored:
        """Begins an epoch with `n_blocks` blocks. `allocate` then starts again at the beginning of
        the memory. Returns which keys and values the memory holds."""
        self._n_used = _HEADER_BYTES
        return self.record.begin(n_blocks)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns the next tensor in the memory. New memory is filled with zeros. A later process
        that takes over the file, and calls this method with the same arguments in the same order,
        gets the content that the earlier process left. Raises ValueError if the memory is too
        small."""
        start = -(-self._n_used // _ALIGNMENT) * _ALIGNMENT
        n_bytes = torch.Size(shape).numel() * dtype.itemsize
        if start + n_bytes > len(self._bytes):
            raise ValueError(f"{self.path} has no room for {n_bytes} bytes more")
        self._n_used = start + n_bytes
        return self._bytes[start : self._n_used].view(dtype).view(shape)


def padded(n_bytes: int, *, n_tensors: int) -> int:
    """Returns the number of bytes that `n_tensors` tensors take in a file if they have `n_bytes`
    bytes together: each tensor may need padding."""
    return n_bytes + n_tensors * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class _FreeFile:
    """A K/V file that no other process uses. This process holds its lock."""

    fd: int
    path: Path

    def has(self, n_bytes: int) -> bool:
        """Returns whether the size of the file is `n_bytes`."""
        return os.fstat(self.fd).st_size == n_bytes

    def age(self) -> tuple[int, int]:
        """Returns the epoch and the iteration in the file's record. The file with the largest pair
        is the newest one."""
        stored = KVRecord(memoryview(bytearray(os.pread(self.fd, RECORD_BYTES, 0)))).stored
        return stored.epoch, stored.iteration

    def remove(self) -> None:
        """Removes the file, and frees its memory."""
        with suppress(FileNotFoundError):
            self.path.unlink()
        self.leave()

    def leave(self) -> None:
        """Closes the file, which releases the lock. Other processes can then take the file."""
        os.close(self.fd)


def _newest_free(directory: Path, stage: str, rank: int, n_bytes: int) -> _FreeFile | None:
    """Returns the newest file that a rank can take over, or None. Removes files of this rank that
    have another size."""
    found = list(_free_files(directory, lambda *its: its == (stage, rank)))
    usable = [file for file in found if file.has(n_bytes)]
    newest = max(usable, key=_FreeFile.age, default=None)
    for file in found:
        if file not in usable:
            file.remove()
        elif file is not newest:
            file.leave()  # to another pipeline
    return newest


def _remove_others(directory: Path, stage: str) -> int:
    """Removes the files of other stages and models that no process uses, and returns the number of
    removed files."""
    others = list(_free_files(directory, lambda its_stage, its_rank: its_stage != stage))
    for file in others:
        file.remove()
    return len(others)


def _free_files(directory: Path, is_wanted: Callable[[str, int], bool]) -> Iterator[_FreeFile]:
    """Locks and yields the K/V files that no process has locked. `is_wanted` is called with the
    stage digest and the rank in a file's name, and returns whether to try this file."""
    for path in sorted(directory.iterdir()):
        name = _OWN.fullmatch(path.name)
        if name is None or not is_wanted(name["stage"], int(name["rank"])):
            continue
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # of another user, or removed by another rank
            continue
        if _is_mine(fd) and _lock(fd) and _is_at(path, fd):
            yield _FreeFile(fd, path)
        else:
            os.close(fd)


def _made(path: Path, n_bytes: int) -> int:
    """Makes a file of zeros and allocates all its memory. Returns the descriptor of the file,
    locked. The file gets its name when it is complete, so that a process that ends early leaves no
    incomplete file.

    Raises:
        OSError: there is too little memory, or the file system does not support files without
            names.
    """
    at = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fd = -1
    try:
        fd = os.open(".", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=at)
        os.fchmod(fd, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(fd, 0, n_bytes)
        # With a descriptor of a directory, Python calls linkat, which follows the link in /proc.
        os.link(f"/proc/self/fd/{fd}", path.name, dst_dir_fd=at, follow_symlinks=True)
    except OSError:
        if fd >= 0:
            os.close(fd)
        raise
    finally:
        os.close(at)
    return fd


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_mine(fd: int) -> bool:
    """Returns whether a file belongs to the user of this process and has no access rights for other
    users."""
    status = os.fstat(fd)
    return status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o600


def _is_at(path: Path, fd: int) -> bool:
    """Returns whether an open file is still at its path. Another rank may have removed the file
    just now."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False
