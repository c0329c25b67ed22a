"""Linear layers on a GPU with weights of 4 or 8 bits and a scale for each group of inputs.

Weights stay quantised in memory. In registers a number becomes the weight `value * scale + offset`
in float32, which is rounded to the element type of tokens and multiplied by the matrix units. The
result equals the product with the dequantised matrix. If a step of the sum lies within one group,
each output has one scale in the step. Otherwise each number looks up its scale, mostly in the
first-level cache.

Two numbers of four bits share a byte. They are 16 inputs apart, so that the lower halves of
neighbouring bytes belong to neighbouring inputs, and so do the upper halves. A step is therefore
two products, one for each half.

`quantised_product` divides products into tiles and launches the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.quantised_product import (
    GATES,
    Operand,
    QuantisedGatedWeight,
    QuantisedWeight,
    finish,
    no_arrivals,
    tile_of,
)
from kernels.weights.groups import WHOLE, GroupedMatrix, GroupForm
from kernels.weights.linear import Gate

_APART = 16  # inputs between the two numbers of a byte
_ALIGNMENT = 32  # rows are padded to a multiple of this number of inputs


@triton.jit
def _weights(
    bytes_,
    columns,
    rows,
    scales,
    offsets,
    values,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    SIZE: tl.constexpr,
    N_GROUPS: tl.constexpr,
):
    """Dequantises the numbers in `bytes_` [OUTPUTS, n] and returns the weights [OUTPUTS, n] in
    float32.

    `columns` has the index of each number's input, [1, n]. If all numbers belong to one group,
    `columns` may have the index of only one input of that group, [1, 1].
    """
    if BITS == 8:
        numbers = bytes_.to(tl.float32)
    elif IS_WHOLE:
        numbers = ((bytes_ >> SHIFT) & 15).to(tl.float32) - 8.0
    else:
        numbers = tl.load(values + ((bytes_ >> SHIFT) & 15).to(tl.int32)).to(tl.float32)
    place = rows[:, None] * N_GROUPS + tl.minimum(columns // SIZE, N_GROUPS - 1)
    weights = numbers * tl.load(scales + place).to(tl.float32)
    if HAS_OFFSETS:
        weights += tl.load(offsets + place).to(tl.float32)
    return weights


@triton.jit
def _sums_of(
    x,
    weight,
    scales,
    offsets,
    values,
    rows,
    token,
    is_token,
    x_stride,
    begin,
    N_IN: tl.constexpr,
    ROW: tl.constexpr,
    BITS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    SIZE: tl.constexpr,
    N_GROUPS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    N_STEPS: tl.constexpr,
):
    """Returns the sums [OUTPUTS, TOKENS] of a tile for the matrix rows `rows`. The sums are over
    N_STEPS * INPUTS inputs, beginning with the input `begin`."""
    N_BYTES: tl.constexpr = INPUTS * BITS // 8
    IS_ONE_GROUP: tl.constexpr = SIZE % INPUTS == 0
    byte = tl.arange(0, N_BYTES)
    column = byte
    if BITS == 4:
        column = byte // 16 * 32 + byte % 16
    sums = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    for step in range(N_STEPS):
        first = begin + step * INPUTS
        at = first * BITS // 8 + byte
        bytes_ = tl.load(weight + rows[:, None] * ROW + at[None, :], at[None, :] < ROW, 0)
        for half in tl.static_range(8 // BITS):
            inputs = first + column + 16 * half
            columns = tl.load(
                x + token[None, :] * x_stride + inputs[:, None],
                is_token[None, :] & (inputs < N_IN)[:, None],
                0.0,
            )
            of_group = inputs[None, :]
            if IS_ONE_GROUP:
                of_group = first + tl.zeros((1, 1), tl.int32)
            weights = _weights(
                bytes_,
                of_group,
                rows,
                scales,
                offsets,
                values,
                SHIFT=4 * half,
                BITS=BITS,
                IS_WHOLE=IS_WHOLE,
                HAS_OFFSETS=HAS_OFFSETS,
                SIZE=SIZE,
                N_GROUPS=N_GROUPS,
            )
            sums = tl.dot(weights.to(columns.dtype), columns, sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["n_tokens"])
def _multiply(
    x,
    weight,
    scales,
    offsets,
    values,
    bias,
    out,
    parts,
    arrivals,
    n_tokens,
    x_stride,
    out_stride,
    N_IN: tl.constexpr,
    N_OUT: tl.constexpr,
    ROW: tl.constexpr,
    BITS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    SIZE: tl.constexpr,
    N_GROUPS: tl.constexpr,
    GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    N_PARTS: tl.constexpr,
    N_STEPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Computes the sums of a tile over a part of the inputs. If the product is gated, computes them
    first for the gate's matrix and then for the up matrix. The last program of a tile writes the
    result."""
    part = tl.program_id(1)
    token, output = tile_of(tl.program_id(0), n_tokens, N_OUT, TOKENS, OUTPUTS, GROUP)
    is_token = token < n_tokens
    # Past the end the last output is computed again, and the result is not written.
    known_output = tl.minimum(output, N_OUT - 1).to(tl.int64)
    begin = part * (N_STEPS * INPUTS)
    sums = _sums_of(
        x,
        weight,
        scales,
        offsets,
        values,
        known_output,
        token,
        is_token,
        x_stride,
        begin,
        N_IN=N_IN,
        ROW=ROW,
        BITS=BITS,
        IS_WHOLE=IS_WHOLE,
        HAS_OFFSETS=HAS_OFFSETS,
        SIZE=SIZE,
        N_GROUPS=N_GROUPS,
        TOKENS=TOKENS,
        OUTPUTS=OUTPUTS,
        INPUTS=INPUTS,
        N_STEPS=N_STEPS,
    )
    gated_sums = sums
    if GATE > 0:
        gated_sums = _sums_of(
            x,
            weight,
            scales,
            offsets,
            values,
            known_output + N_OUT,
            token,
            is_token,
            x_stride,
            begin,
            N_IN=N_IN,
            ROW=ROW,
            BITS=BITS,
            IS_WHOLE=IS_WHOLE,
            HAS_OFFSETS=HAS_OFFSETS,
            SIZE=SIZE,
            N_GROUPS=N_GROUPS,
            TOKENS=TOKENS,
            OUTPUTS=OUTPUTS,
            INPUTS=INPUTS,
            N_STEPS=N_STEPS,
        )

    finish(
        sums,
        gated_sums,
        scales,
        bias,
        out,
        parts,
        arrivals,
        token,
        output,
        n_tokens,
        out_stride,
        N_OUT=N_OUT,
        HAS_SCALES=False,
        GATE=GATE,
        HAS_BIAS=HAS_BIAS,
        HAS_RESIDUAL=HAS_RESIDUAL,
        TOKENS=TOKENS,
        OUTPUTS=OUTPUTS,
        N_PARTS=N_PARTS,
    )


def can_take(matrix: GroupedMatrix, dtype: torch.dtype) -> bool:
    """Returns whether `TritonGroupsWeight` supports `matrix` with tokens of `dtype`."""
    return dtype.is_floating_point and dtype.itemsize <= 4 and min(matrix.shape) > 0


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """A matrix quantised in groups and packed for the kernel, with the counters (`arrivals`) that
    `KernelMatrix` requires."""

    packed: Tensor  # [n_out, bytes of a row], uint8 with two numbers each or int8 with one
    scales: Tensor  # [n_out, n_groups], float16 or float32
    offsets: Tensor | None  # of the shape and type of `scales`
    values: Tensor  # [16] int8, the value of each number of four bits
    arrivals: Tensor  # see `KernelMatrix.arrivals`
    form: GroupForm
    shape: tuple[int, int]  # n_out and n_in

    @classmethod
    def of(cls, matrix: GroupedMatrix, dtype: torch.dtype) -> PackedGroups:
        """Packs `matrix` for tokens of `dtype`, which also determines the type of the scales."""
        matrix = matrix.without_zeros()
        scale_type, device = matrix.scale_type(dtype), matrix.numbers.device
        packed = F.pad(matrix.numbers, (0, -matrix.shape[1] % _ALIGNMENT))
        if matrix.form.bits == 4:
            lower, upper = packed.view(len(packed), -1, 2, _APART).unbind(2)
            packed = (lower | upper << 4).flatten(1)
        return cls(
            packed,
            matrix.scales.to(scale_type).contiguous(),
            None if matrix.offsets is None else matrix.offsets.to(scale_type).contiguous(),
            torch.tensor(matrix.form.values, dtype=torch.int8, device=device),
            no_arrivals(device),
            matrix.form,
            matrix.shape,
        )

    @property
    def nbytes(self) -> int:
        n_offsets = 0 if self.offsets is None else self.offsets.nbytes
        own = self.packed.nbytes + self.scales.nbytes + n_offsets
        return own + self.values.nbytes + self.arrivals.nbytes

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the dequantised rows `indices` [n] of the matrix in `dtype`: [n, n_in]."""
        n_in = self.shape[1]
        numbers = self.packed[indices]
        if self.form.bits == 4:
            halves = numbers.view(len(numbers), -1, 1, _APART)
            numbers = torch.cat((halves & 15, halves >> 4), 2).flatten(1)
        offsets = None if self.offsets is None else self.offsets[indices].float()
        scales = self.scales[indices].float()
        return GroupedMatrix(self.form, numbers[:, :n_in], scales, offsets).dequantised().to(dtype)

    def operand(self) -> Operand:
        offsets = self.scales if self.offsets is None else self.offsets
        return Operand(
            _multiply,
            (self.packed, self.scales, offsets, self.values),
            {
                "ROW": self.packed.shape[1],
                "BITS": self.form.bits,
                "IS_WHOLE": self.form.values == WHOLE,
                "HAS_OFFSETS": self.offsets is not None,
                "SIZE": self.form.size,
                "N_GROUPS": self.scales.shape[1],
            },
        )


@dataclass(frozen=True, slots=True)
class TritonGroupsWeight(QuantisedWeight[PackedGroups]):
    """A matrix quantised in groups; implements `kernels.weights.linear.TableWeight`."""

    dtype: torch.dtype  # the type of dequantised rows

    @classmethod
    def of(cls, matrix: GroupedMatrix, dtype: torch.dtype) -> TritonGroupsWeight:
        """Packs `matrix` for tokens of `dtype`. `can_take(matrix, dtype)` must be true."""
        return cls(PackedGroups.of(matrix, dtype), dtype)

    def rows(self, indices: Tensor) -> Tensor:
        """Returns the dequantised rows `indices` [n] of the matrix: [n, n_in]."""
        return self.matrix.rows(indices, self.dtype)


@dataclass(frozen=True, slots=True)
class TritonGroupsGatedWeight(QuantisedGatedWeight[PackedGroups]):
    """The gate and up matrices of a gated MLP, quantised in groups, with the gate function."""

    @classmethod
    def of(cls, matrix: GroupedMatrix, dtype: torch.dtype, gate: Gate) -> TritonGroupsGatedWeight:
        """Packs `matrix` [2 * n_out, n_in], the gate's rows first, for tokens of `dtype`."""
        return cls(PackedGroups.of(matrix, dtype), GATES[gate])
