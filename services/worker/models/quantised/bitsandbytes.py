"""The layouts of bitsandbytes: matrices of numbers of four bits (NF4 or FP4), and matrices of int8.

With four bits, `weight` holds the numbers of the matrix [n_out, n_in], row after row. Each byte has
two numbers, the first one in the upper half. A number is an index into `weight.quant_map`, a table
of 16 values. A weight is its value in the table times the scale of its block. A block is a run of
consecutive numbers, counted over all rows, so it may begin anywhere in a row. The scales of the
blocks are in `weight.absmax`.

With double quantisation, the scales are quantised too. `weight.absmax` then has, for each block, an
index into `weight.nested_quant_map`. Blocks of scales share an outer scale in
`weight.nested_absmax`. A scale is its value in that table times the outer scale, plus an offset.

The bytes of `weight.quant_state.bitsandbytes__nf4`, or of `…__fp4`, are JSON with the shape of the
matrix, the sizes of the blocks and the offset.

With int8, a weight is its number in `weight` [n_out, n_in] times the scale of its output in `SCB`
[n_out], divided by 127.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kernels.weights.groups import MULTIPLE, GroupForm
from services.worker.models.directory_files import ELEMENT_SIZES
from services.worker.models.quantised.matrix import QuantisedMatrix
from services.worker.models.quantised.scaled import ScaledMatrix
from services.worker.models.stored_tensor import Spans
from services.worker.models.tensor_files import CheckpointError

MARK = ".absmax"
"""End of the name of the tensor of scales. Only matrices with numbers of four bits have such a
tensor."""

_LARGEST = 127  # of the values of int8
_MAX_STATE_BYTES = 1 << 16
_MAX_BLOCK = 1 << 20
_F32 = frozenset(("F32",))
_STATES = ("nf4", "fp4")


class BlockwiseMatrix(QuantisedMatrix):
    """A matrix of numbers of four bits. The numbers of each block share a scale."""

    is_rounded = True  # values of float32 become values of int8, by 1/127

    def problems(self, shape: tuple[int, ...]) -> Iterator[str]:
        yield from self._wrong_sizes(shape)
        yield from self.wrong("weight.quant_map", (16,), _F32)
        header = self._header("weight")
        stored = 0
        if header is not None:
            stored = ELEMENT_SIZES.get(header.element, 0) * math.prod(header.shape)
        if stored != -(-self.n_out * self.n_in // 2):
            yield f"{self._module}.weight has {stored} bytes, not two numbers in each"
        if self._nested is None:
            yield from self.wrong("weight.absmax", (self._n_blocks,), _F32)
            return
        yield from self.wrong("weight.absmax", (self._n_blocks,), frozenset(("U8",)))
        yield from self.wrong("weight.nested_quant_map", (256,), _F32)
        n_nested = -(-self._n_blocks // self._nested[0])
        yield from self.wrong("weight.nested_absmax", (n_nested,), _F32)

    def read(self, spans: Spans) -> Tensor:
        rows, columns = spans
        numbers = self._numbers(rows)
        block = self._size("blocksize")
        first = rows.start * self.n_in
        blocks = range(first // block, -(-(first + len(numbers)) // block))
        places = torch.arange(first, first + len(numbers)) // block - blocks.start
        values = self.tensor("weight.quant_map", range(16))[numbers.int()]
        weights = values.mul_(self._scales(blocks)[places])
        return weights.view(len(rows), self.n_in)[:, columns.start : columns.stop]

    def group_form(self, spans: Spans) -> GroupForm | None:
        block = self._size("blocksize")
        size = math.gcd(block, self.n_in, spans[1].start)
        values = self.tensor("weight.quant_map", range(16))
        if self.n_in % block or size % MULTIPLE or not (values.abs() <= 1).all():
            return None
        rounded = (values * _LARGEST).round().tolist()
        return GroupForm(4, size, tuple(int(value) for value in rounded))

    def read_numbers(self, spans: Spans) -> Tensor:
        rows, columns = spans
        numbers = self._numbers(rows).view(len(rows), self.n_in)
        return numbers[:, columns.start : columns.stop]

    def read_scales(self, spans: Spans, form: GroupForm) -> tuple[Tensor, Tensor | None]:
        rows, columns = spans
        per_row = self.n_in // self._size("blocksize")
        blocks = range(rows.start * per_row, rows.stop * per_row)
        places = torch.arange(columns.start, columns.stop, form.size) // self._size("blocksize")
        return self._scales(blocks).view(len(rows), per_row)[:, places] / _LARGEST, None

    def _numbers(self, rows: range) -> Tensor:
        """Returns the quantised numbers of whole rows, one row after the other."""
        begin, end = rows.start * self.n_in, rows.stop * self.n_in
        header = self._header("weight")
        unit = 2 * ELEMENT_SIZES[header.element] if header is not None else 2  # numbers of a row
        stored = range(begin // unit, -(-end // unit))
        others = [range(size) for size in header.shape[1:]] if header is not None else []
        found = self.tensor("weight", stored, *others).contiguous().view(torch.uint8).flatten()
        numbers = torch.stack((found >> 4, found & 15), -1).flatten()
        return numbers[begin - stored.start * unit :][: end - begin]

    def _scales(self, blocks: range) -> Tensor:
        """Returns the scales of a range of blocks, in float32."""
        scales = self.tensor("weight.absmax", blocks)
        if self._nested is None:
            return scales.float()
        size, offset = self._nested
        outer = range(blocks.start // size, -(-blocks.stop // size))
        places = torch.arange(blocks.start, blocks.stop) // size - outer.start
        values = self.tensor("weight.nested_quant_map", range(256))[scales.int()]
        return values * self.tensor("weight.nested_absmax", outer)[places] + offset

    def _broken(self, what: str) -> CheckpointError:
        """Returns the error for a tensor of this module that the format does not allow. `what` has
        the end of the tensor's name and what is wrong with the tensor."""
        return CheckpointError(f"{self._files}: {self._module}.{what}")

    @property
    def _n_blocks(self) -> int:
        return -(-self.n_out * self.n_in // self._size("blocksize"))

    @cached_property
    def _nested(self) -> tuple[int, float] | None:
        """The number of scales that share an outer scale, and the offset that is added to all
        scales. None without double quantisation."""
        if not self.has("weight.nested_absmax"):
            return None
        offset = self._state.get("nested_offset")
        if not isinstance(offset, float | int) or not math.isfinite(offset):
            raise self._broken(f"weight: nested_offset {repr(offset)[:80]}")
        return self._size("nested_blocksize"), float(offset)

    def _size(self, key: str) -> int:
        """Returns the block size that the matrix's JSON has under `key`. Raises CheckpointError if
        it has none."""
        size = self._state.get(key)
        if not isinstance(size, int) or not 0 < size <= _MAX_BLOCK:
            raise self._broken(f"weight: {key} {repr(size)[:80]} is no size")
        return size

    def _wrong_sizes(self, shape: tuple[int, ...]) -> Iterator[str]:
        said = self._state.get("shape")
        if said != list(shape):
            yield f"{self._module}.weight is a matrix {repr(said)[:80]}, not {list(shape)}"

    @cached_property
    def _state(self) -> dict[str, Any]:
        """The parsed JSON that is stored with the matrix. Raises CheckpointError if it is
        invalid."""
        for kind in _STATES:
            suffix = f"weight.quant_state.bitsandbytes__{kind}"
            header = self._header(suffix)
            if header is None:
                continue
            if header.element != "U8" or len(header.shape) != 1:
                raise self._broken(f"{suffix} is not a row of bytes")
            n_bytes = header.shape[0]
            if n_bytes > _MAX_STATE_BYTES:
                raise self._broken(f"{suffix} has {n_bytes} bytes")
            content = bytes(self.tensor(suffix, range(n_bytes)).tolist())
            try:
                state = json.loads(content)
            except (ValueError, RecursionError) as error:
                raise self._broken(f"{suffix} is no JSON: {error}") from error
            if isinstance(state, dict):
                return state
        raise self._broken("weight lacks the quant_state of NF4 or FP4")


class RowsMatrix(ScaledMatrix):
    """A matrix of int8, with a scale for each output."""

    def problems(self, shape: tuple[int, ...]) -> Iterator[str]:
        yield from self.wrong("weight", shape, frozenset(("I8",)))
        yield from self.wrong("SCB", (self.n_out,), _F32)
        header = self._header("weight_format")
        is_one = header is not None and header.shape in ((), (1,))
        if header is not None and not (is_one and int(self.tensor("weight_format")) == 0):
            yield f"{self._module}.weight_format is not 0, rows in order"

    def _scales(self, rows: range, columns: range) -> Tensor:
        return self.tensor("SCB", rows)[:, None].float() / _LARGEST
