"""The record that is stored with a rank's keys and values: their epoch, and how much is complete.

The record lies in memory that outlives the rank's process, so the process may end at any moment,
also while it writes the record. So the record has two slots, which are written in turn, and each
slot has a checksum. If a slot was only partly written, its checksum is wrong, and the other slot is
used. That slot is older by one write: it names the previous iteration, or the previous epoch if the
new epoch has not written any keys and values yet. So a record never claims more than is complete.
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
    """Describes which keys and values a memory holds."""

    memory: bytes
    """Random id of the memory. A new id is chosen when the number of blocks changes, so an equal id
    means that blocks lie at the same places."""
    n_blocks: int
    """Number of blocks. It determines where in the memory a block lies."""
    epoch: int = 0
    """Epoch that last wrote to the memory; 0 if no epoch has."""
    iteration: int = 0
    """Last iteration of `epoch` whose keys and values are complete; 0 if there is none."""


class KVRecord:
    """A record in the first `RECORD_BYTES` bytes of a buffer."""

    def __init__(self, buffer: memoryview) -> None:
        """Reads the record in `buffer`, which must be writable."""
        self._buffer = buffer
        self._sequence, stored = self._newest()
        self._memory, self._n_blocks, self._epoch, self._iteration = stored

    @property
    def stored(self) -> Stored:
        """Which keys and values the memory holds."""
        return Stored(self._memory, self._n_blocks, self._epoch, self._iteration)

    def begin(self, n_blocks: int) -> Stored:
        """Begins an epoch that uses `n_blocks` blocks, and returns which keys and values the memory
        holds. If the number of blocks has changed, blocks lie at other places, so the memory gets a
        new id and counts as empty."""
        if self._n_blocks != n_blocks:
            self._memory, self._n_blocks = secrets.token_bytes(NAME_BYTES), n_blocks
            self._epoch = self._iteration = 0
            self._write()
        return self.stored

    def note_begun(self, epoch: int) -> None:
        """Records that an epoch is about to write keys and values. Must be called before the
        epoch's first iteration."""
        self._epoch, self._iteration = epoch, 0
        self._write()

    def note_complete(self, iteration: int) -> None:
        """Records that the keys and values of this iteration, and of all iterations before it, are
        complete."""
        self._iteration = iteration
        self._write()

    def _write(self) -> None:
        self._sequence = sequence = self._sequence + 1
        fields = _FIELDS.pack(sequence, self._n_blocks, self._epoch, self._iteration, self._memory)
        start = sequence % 2 * _SLOT_BYTES
        slot = fields + _CHECKSUM.pack(zlib.crc32(fields))
        self._buffer[start : start + len(slot)] = slot

    def _newest(self) -> tuple[int, Stored]:
        """Returns the sequence number and the fields of the newest valid slot. If no slot is valid,
        returns the number 0 and the fields of an empty memory."""
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
