"""The record beside a rank's keys and values: the epoch that wrote them, and how much is complete.

The record lies in memory that outlives the rank's process, so the process may end at any moment,
also while it writes the record. So there are two slots, which are written in turn, and each has a
checksum. A slot that was being written is not valid, and then the other slot counts. That slot says
less, never more: it is older by one iteration, or it names the epoch before the first iteration of
an epoch has begun to write keys and values.
"""

import secrets
import struct
import zlib
from typing import NamedTuple

NAME_BYTES = 16

_FIELDS = struct.Struct(f"<QQQQ{NAME_BYTES}s")  # sequence number, then the fields of `Stored`
_CHECKSUM = struct.Struct("<I")
_SLOT_BYTES = 64  # a cache line

RECORD_BYTES = 2 * _SLOT_BYTES
"""Size of a record in bytes."""


class Stored(NamedTuple):
    """The keys and values that a memory has."""

    memory: bytes
    """Random name of the memory and of the places of its blocks."""
    n_blocks: int
    """Number of blocks, on which the places of blocks depend."""
    epoch: int = 0
    """Epoch that wrote to the memory last; 0 if none has."""
    iteration: int = 0
    """Last iteration of this epoch whose keys and values are complete; 0 if none is."""


class KVRecord:
    """A record in the first `RECORD_BYTES` bytes of a buffer."""

    def __init__(self, buffer: memoryview) -> None:
        """The bytes of `buffer` must be writable."""
        self._buffer = buffer
        self._sequence, stored = self._newest()
        self._memory, self._n_blocks, self._epoch, self._iteration = stored

    @property
    def stored(self) -> Stored:
        """The keys and values that the memory has."""
        return Stored(self._memory, self._n_blocks, self._epoch, self._iteration)

    def begin(self, n_blocks: int) -> Stored:
        """Begins an epoch that uses `n_blocks` blocks, and returns what the memory has. If blocks
        had other places before, the memory gets a new name."""
        if self._n_blocks != n_blocks:
            self._memory, self._n_blocks = secrets.token_bytes(NAME_BYTES), n_blocks
            self._epoch = self._iteration = 0
            self._write()
        return self.stored

    def note_begun(self, epoch: int) -> None:
        """Notes that an epoch is about to write keys and values. Must be called before the epoch's
        first iteration."""
        self._epoch, self._iteration = epoch, 0
        self._write()

    def note_complete(self, iteration: int) -> None:
        """Notes that the keys and values of an iteration, and of all before, are complete."""
        self._iteration = iteration
        self._write()

    def _write(self) -> None:
        self._sequence = sequence = self._sequence + 1
        fields = _FIELDS.pack(sequence, self._n_blocks, self._epoch, self._iteration, self._memory)
        start = sequence % 2 * _SLOT_BYTES
        slot = fields + _CHECKSUM.pack(zlib.crc32(fields))
        self._buffer[start : start + len(slot)] = slot

    def _newest(self) -> tuple[int, Stored]:
        """Returns the sequence number and the fields of the newest valid slot, or those of a memory
        without content."""
        newest = 0, Stored(bytes(NAME_BYTES), 0)
        for start in (0, _SLOT_BYTES):
            fields = bytes(self._buffer[start : start + _FIELDS.size])
            end = start + _FIELDS.size
            (checksum,) = _CHECKSUM.unpack(bytes(self._buffer[end : end + _CHECKSUM.size]))
            if zlib.crc32(fields) != checksum:
                continue
            sequence, n_blocks, epoch, iteration, memory = _FIELDS.unpack(fields)
            if sequence > newest[0]:
                newest = sequence, Stored(memory, n_blocks, epoch, iteration)
        return newest
