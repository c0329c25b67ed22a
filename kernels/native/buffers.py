"""The memory of the buffers of a program.

Buffers of equal width and type that are not in use at the same time share memory. So all layers use
the memory of a few buffers, which stays in the processor's caches.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from kernels.native.structs import BufferStruct
from kernels.program import Program
from kernels.steps import Buffer, buffers_of

_Form = tuple[int, torch.dtype, bool]


class Buffers:
    """The memory of a program's buffers. It grows to the largest batch that has been run."""

    def __init__(self, program: Program) -> None:
        self._buffers = program.buffers
        self._places, self._forms = _shared(program)
        self._memory: list[Tensor] = []
        # Views of buffers, kept from call to call, since creating a view costs more than a look-up.
        self._tensors: dict[int, Tensor] = {}
        self._n_tokens, self._n_sampled = -1, -1
        self._structs: Any = None

    def address(self, n_tokens: int, n_sampled: int) -> int:
        """Returns the address of an array with a `BufferStruct` for each buffer. First enlarges the
        buffers if they have fewer than `n_tokens` or `n_sampled` rows."""
        if n_tokens > self._n_tokens or n_sampled > self._n_sampled:
            self._allocate(max(n_tokens, self._n_tokens), max(n_sampled, self._n_sampled))
        return ctypes.addressof(self._structs)

    def tensor(self, buffer: Buffer, n_rows: int) -> Tensor:
        """Returns the first `n_rows` rows of a buffer, [n_rows, width]. The tensor shares the
        buffer's memory."""
        known = self._tensors.get(buffer.index)
        if known is None or known.shape[0] != n_rows:
            known = self._memory[self._places[buffer.index]][:n_rows]
            self._tensors[buffer.index] = known
        return known

    def _allocate(self, n_tokens: int, n_sampled: int) -> None:
        self._n_tokens, self._n_sampled = n_tokens, n_sampled
        self._tensors.clear()  # frees the old memory before the new memory is allocated
        self._memory.clear()
        # Tensors that are made in inference mode could not be written to outside of that mode.
        with torch.inference_mode(False):
            for width, dtype, is_of_sampled in self._forms:
                n_rows = n_sampled if is_of_sampled else n_tokens
                self._memory.append(torch.empty((n_rows, width), dtype=dtype))
        addresses = [memory.data_ptr() for memory in self._memory]
        structs = (
            BufferStruct.of(buffer, addresses[place])
            for buffer, place in zip(self._buffers, self._places, strict=True)
        )
        self._structs = (BufferStruct * len(self._buffers))(*structs)


def _shared(program: Program) -> tuple[list[int], list[_Form]]:
    """Assigns each buffer to a piece of memory, which several buffers may share. Returns the index
    of each buffer's piece, and the form of each piece: the width, the element type, and whether
    rows are sampled tokens."""
    last = _last_uses(program)
    places = [-1] * len(program.buffers)
    forms: list[_Form] = []
    free: dict[_Form, list[int]] = {}
    kept = {b.index for b in (program.inputs, program.hidden, program.logits) if b is not None}
    if program.inputs is not None:
        places[program.inputs.index] = 0
        forms.append(_form(program.inputs))
    for i, step in enumerate(program.steps):
        used = {buffer.index: buffer for buffer in buffers_of(step)}
        for index, buffer in used.items():
            if places[index] < 0:
                form = _form(buffer)
                if free.get(form):
                    places[index] = free[form].pop()
                else:
                    places[index] = len(forms)
                    forms.append(form)
        for index, buffer in used.items():
            if last[index] == i and index not in kept:
                free.setdefault(_form(buffer), []).append(places[index])
    return places, forms


def _last_uses(program: Program) -> dict[int, int]:
    """Returns, for each buffer by its index, the index of the last step that uses the buffer."""
    return {buffer.index: i for i, step in enumerate(program.steps) for buffer in buffers_of(step)}


def _form(buffer: Buffer) -> _Form:
    return buffer.width, buffer.dtype, buffer.is_of_sampled
