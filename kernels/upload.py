"""Copies arrays that the host has prepared to the device, without waiting for the device.

An iteration needs a dozen small arrays on the device. `Uploads` immediately returns a tensor for
each array, gathers the values of all arrays in one piece of pinned memory, and later copies this
piece in one call. If the memory were pageable, the host would have to wait until the device has
done all queued work. A copy from pinned memory is queued instead. One copy is made for all arrays,
because each copy costs the host more time than gathering the values.

On a CPU nothing is copied: a tensor shares the memory of its array.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16  # bytes; the widest load of a kernel

# Bytes that an iteration of a few hundred spans needs; more is allocated when it is needed.
_FIRST_SIZE = 1 << 18

# Number of pieces of pinned memory. One is filled while copies from the others are queued.
_N_STAGINGS = 3


class Uploads:
    """Copies arrays to a device. This base class is for a CPU, where no copy is needed."""

    def add(self, values: NDArray[Any]) -> Tensor:
        """Returns a tensor on the device with the shape and type of `values`. The values are in the
        tensor only after `flush`.

        The address of the tensor is a multiple of 16 on a GPU. The caller must not read or write
        the tensor, nor write to `values`, before `flush`.
        """
        return torch.from_numpy(values)

    def flush(self) -> None:
        """Queues the copy of all arrays that were added, on the current stream of the device."""

    def aim(self, buffer: Tensor) -> None:
        """Makes `buffer`, [bytes] uint8 on the device, the memory of all arrays that are added from
        now until the next `flush`.

        If arrays of equal shapes and types are added in the same order each time, each array gets
        the same address each time, as a recorded graph requires. Arrays that do not fit into
        `buffer` go to new memory.
        """

    @property
    def n_bytes(self) -> int:
        """Number of bytes of all arrays that the last `flush` copied. A buffer for `aim` needs this
        size to hold arrays of equal sizes."""
        return 0


class StagedUploads(Uploads):
    """Gathers arrays and copies them in one piece. Used for a GPU, and in tests for a CPU.

    Arrays are gathered in a piece of pinned memory, which is copied to a piece of device memory. If
    the next array does not fit, the piece is copied at once, because `add` has already returned
    tensors in the device memory, and a new piece is begun. After a flush, new pieces are large
    enough for all arrays of the last flush.
    """

    def __init__(self, device: torch.device, *, size: int = _FIRST_SIZE) -> None:
        """Allocates pieces of `size` bytes. Later pieces are larger if more bytes are added."""
        self._device = device
        self._size = size
        self._buffer: Tensor | None = None  # [bytes] uint8 on the device, that is being filled
        self._staging: _Staging | None = None  # the memory on the host that is being filled
        self._idle: deque[_Staging] = deque()  # in the order in which they were copied
        self._n_filled = 0
        self._n_copied = 0  # since the last flush
        self._n_bytes = 0

    @property
    def n_bytes(self) -> int:
        """Number of bytes of all arrays that the last `flush` copied. A buffer for `aim` needs this
        size to hold arrays of equal sizes."""
        return self._n_bytes

    def add(self, values: NDArray[Any]) -> Tensor:
        """Gathers an array, and returns the tensor that will have its values after `flush`."""
        buffer, staging = self._room_for(values.nbytes)
        start, end = self._n_filled, self._n_filled + values.nbytes
        self._n_filled = -(-end // _ALIGNMENT) * _ALIGNMENT
        staging.array[start:end].view(values.dtype).reshape(values.shape)[...] = values
        return buffer[start:end].view(_DTYPES[values.dtype]).view(values.shape)

    def flush(self) -> None:
        """Queues the copy of all gathered arrays, on the current stream of the device."""
        self._copy()
        self._n_bytes, self._n_copied = self._n_copied, 0
        self._size = max(self._size, _power_of_two(self._n_bytes))

    def aim(self, buffer: Tensor) -> None:
        """Makes `buffer` the memory of the next arrays, as `Uploads.aim` describes. Raises
        ValueError if arrays have been added after the last `flush`."""
        if self._n_filled:
            raise ValueError("what has been added must be flushed first")
        self._buffer = buffer

    def _room_for(self, n_bytes: int) -> tuple[Tensor, _Staging]:
        if self._buffer is not None and self._n_filled + n_bytes > len(self._buffer):
            self._copy()
        if self._buffer is None:
            size = max(self._size, _power_of_two(n_bytes))
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        if self._staging is None:
            self._staging = self._next_staging(len(self._buffer))
        return self._buffer, self._staging

    def _next_staging(self, size: int) -> _Staging:
        if len(self._idle) == _N_STAGINGS:
            staging = self._idle.popleft()
            if len(staging.array) >= size:
                staging.wait()
                return staging
        return _Staging(max(size, self._size), self._device)

    def _copy(self) -> None:
        if self._staging is not None and self._buffer is not None:
            self._staging.copy_to(self._buffer, min(self._n_filled, len(self._buffer)))
            self._idle.append(self._staging)
        self._n_copied += self._n_filled
        self._n_filled = 0
        self._buffer = self._staging = None


class _Staging:
    """A piece of host memory that is copied to the device. The memory is pinned if the device is a
    GPU."""

    def __init__(self, size: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=is_cuda)
        self.array: NDArray[np.uint8] = self._bytes.numpy()
        cuda: Any = torch.cuda  # its events have no type annotations
        self._copied = cuda.Event() if is_cuda else None

    def copy_to(self, buffer: Tensor, n_bytes: int) -> None:
        buffer[:n_bytes].copy_(self._bytes[:n_bytes], non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> None:
        """Waits until the last copy from this memory has finished."""
        if self._copied is not None:
            self._copied.synchronize()


_DTYPES = {
    np.dtype(kind): torch.from_numpy(np.zeros(0, kind)).dtype
    for kind in (np.bool_, np.uint8, np.int32, np.int64, np.float32, np.float64)
}


def uploads_for(device: torch.device) -> Uploads:
    """Returns an empty `Uploads` for `device`."""
    return StagedUploads(device) if device.type == "cuda" else Uploads()


def _power_of_two(n: int) -> int:
    return 1 << math.ceil(math.log2(max(n, 1)))
