"""Linear layers on a GPU whose weights stay small numbers with a scale for each group of inputs.

A number becomes a weight in registers, `value * scale + offset` in float32, is rounded to the
element type of tokens and multiplied on the matrix units: the weight that a dequantised matrix
would have. Memory is read as it is stored, 4 or 8 bits a number and a scale for each group. Where
a step of the sum is within one group, each output has one scale in it; otherwise each number looks
up its own, from the first-level cache most of the time.

Two numbers of four bits share a byte. They are 16 inputs apart, so that those in the lower halves
of neighbouring bytes are neighbours, as are those in the upper halves: a step is two products.

All else, tiles and parts of inputs, is as in `linear_int8`, and so is the rule that calls with the
same weight must not run at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.groups import WHOLE, GroupedMatrix, GroupForm
from kernels.linear_weight import Gate
from kernels.triton.linear_int8 import GATES, GROUP, NO_GATE, gated_sums_of, sum_of_parts
from kernels.triton.product_tiles import MAX_DIVIDED, Cut, Product, cut_product
from kernels.triton.tuning import device_of

_APART = 16  # inputs between the two numbers of a byte
_ALIGNMENT = 32  # inputs of a row, whose bytes a thread loads at once


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
    """Returns weights [OUTPUTS, columns] in float32, of inputs that `columns` [1, columns] names;
    without columns of their own, all of one group's, [1, 1]."""
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
    """Returns the sums of a tile over inputs from `begin`, for the matrix rows `rows`."""
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
    """Multiplies a part of the inputs for a tile; gated, with both matrices one after the other."""
    N_BLOCKS: tl.constexpr = (N_OUT + OUTPUTS - 1) // OUTPUTS
    IS_GATED: tl.constexpr = GATE > 0
    N_ROWS: tl.constexpr = 2 * N_OUT if IS_GATED else N_OUT
    program, part = tl.program_id(0), tl.program_id(1)
    group = program // (GROUP * N_BLOCKS)
    n_in_group = tl.minimum(tl.cdiv(n_tokens, TOKENS) - group * GROUP, GROUP)
    tile = group * GROUP + program % (GROUP * N_BLOCKS) % n_in_group
    block = program % (GROUP * N_BLOCKS) // n_in_group

    token = (tile * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    output = block * OUTPUTS + tl.arange(0, OUTPUTS)
    is_token = token < n_tokens
    is_there = is_token[None, :] & (output < N_OUT)[:, None]
    # What is beyond the last is the last once more, and not written.
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
    if IS_GATED:
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

    is_last = True
    if N_PARTS > 1:
        place = parts + token[None, :] * N_ROWS + output[:, None]
        size = n_tokens.to(tl.int64) * N_ROWS
        tl.store(place + part * size, sums, is_there)
        if IS_GATED:
            tl.store(place + part * size + N_OUT, gated_sums, is_there)
        tl.debug_barrier()  # all threads have written when one of them counts
        is_last = tl.atomic_add(arrivals + program, 1, sem="acq_rel") == N_PARTS - 1
        if is_last:
            tl.store(arrivals + program, 0)
            sums = sum_of_parts(place, size, is_there, N_PARTS, OUTPUTS, TOKENS)
            if IS_GATED:
                gated_sums = sum_of_parts(place + N_OUT, size, is_there, N_PARTS, OUTPUTS, TOKENS)
    if is_last:
        if IS_GATED:
            sums = gated_sums_of(sums, gated_sums, GATE)
        if HAS_BIAS:
            sums += tl.load(bias + known_output).to(tl.float32)[:, None]
        result = out + token[None, :] * out_stride + output[:, None]
        if HAS_RESIDUAL:
            sums += tl.load(result, is_there, 0.0).to(tl.float32)
        tl.store(result, sums, is_there)


def can_take(matrix: GroupedMatrix, dtype: torch.dtype) -> bool:
    """Whether `TritonGroupsWeight` takes this matrix, for tokens of `dtype`."""
    return dtype.is_floating_point and dtype.itemsize <= 4 and min(matrix.shape) > 0


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """A matrix in groups as the kernel reads it, and counts of programs that share its tiles."""

    packed: Tensor  # [n_out, bytes of a row], uint8 of two numbers or int8 of one
    scales: Tensor  # [n_out, n_groups], float16 or float32
    offsets: Tensor | None  # of the same
    values: Tensor  # [16], int8
    arrivals: Tensor  # [MAX_DIVIDED], int32, zeros between calls
    form: GroupForm
    shape: tuple[int, int]

    @classmethod
    def of(cls, matrix: GroupedMatrix, dtype: torch.dtype) -> PackedGroups:
        """Packs a matrix for tokens of `dtype`, by which the type of scales is chosen."""
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
            torch.zeros(MAX_DIVIDED, dtype=torch.int32, device=device),
            matrix.form,
            matrix.shape,
        )

    @property
    def nbytes(self) -> int:
        n_offsets = 0 if self.offsets is None else self.offsets.nbytes
        own = self.packed.nbytes + self.scales.nbytes + n_offsets
        return own + self.values.nbytes + self.arrivals.nbytes

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns rows of the matrix, [n, n_in], in `dtype`."""
        n_in = self.shape[1]
        numbers = self.packed[indices]
        if self.form.bits == 4:
            halves = numbers.view(len(numbers), -1, 1, _APART)
            numbers = torch.cat((halves & 15, halves >> 4), 2).flatten(1)
        offsets = None if self.offsets is None else self.offsets[indices].float()
        scales = self.scales[indices].float()
        return GroupedMatrix(self.form, numbers[:, :n_in], scales, offsets).dequantised().to(dtype)


@dataclass(frozen=True, slots=True)
class TritonGroupsWeight:
    """A matrix in groups; implements `kernels.linear_weight.TableWeight`."""

    matrix: PackedGroups
    dtype: torch.dtype  # of rows

    @classmethod
    def of(cls, matrix: GroupedMatrix, dtype: torch.dtype) -> TritonGroupsWeight:
        """Packs a matrix that the kernel `can_take`, for tokens of `dtype`."""
        return cls(PackedGroups.of(matrix, dtype), dtype)

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    def __call__(
        self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        if residual is None:
            out = torch.empty((x.shape[0], self.shape[0]), dtype=x.dtype, device=x.device)
        else:
            out = residual if residual.stride(1) == 1 else residual.contiguous()
        _linear(self.matrix, x, bias, out, gate=NO_GATE, has_residual=residual is not None)
        return out  # [n_tokens, n_out]

    def rows(self, indices: Tensor) -> Tensor:
        """Returns rows of the matrix in `dtype`, [n, n_in]."""
        return self.matrix.rows(indices, self.dtype)


@dataclass(frozen=True, slots=True)
class TritonGroupsGatedWeight:
    """Two matrices in groups, the gate's and that of what it gates, multiplied with together."""

    matrix: PackedGroups  # of both, the gate's first
    gate: int

    @classmethod
    def of(cls, matrix: GroupedMatrix, dtype: torch.dtype, gate: Gate) -> TritonGroupsGatedWeight:
        """Packs a matrix [2 * n_out, n_in], the gate's rows first, for tokens of `dtype`."""
        return cls(PackedGroups.of(matrix, dtype), GATES[gate])

    @property
    def shape(self) -> tuple[int, int]:
        """The sizes n_out and n_in of both matrices together."""
        return self.matrix.shape

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty((x.shape[0], self.shape[0] // 2), dtype=x.dtype, device=x.device)
        _linear(self.matrix, x, None, out, gate=self.gate, has_residual=False)
        return out  # [n_tokens, n_out of each]


def _linear(
    matrix: PackedGroups,
    x: Tensor,
    bias: Tensor | None,
    out: Tensor,  # the residual where there is one
    *,
    gate: int,
    has_residual: bool,
) -> None:
    n_tokens, n_out = out.shape
    n_rows, n_in = matrix.shape
    if x.shape != (n_tokens, n_in) or n_out != (n_rows // 2 if gate else n_rows):
        raise ValueError(
            f"inputs {list(x.shape)} and results {list(out.shape)} for a weight {[n_rows, n_in]}"
        )
    for other in (out, bias):
        if other is not None and other.dtype != x.dtype:
            raise ValueError(f"{x.dtype} and {other.dtype} in one product")
    if n_tokens:
        x = x if x.stride(1) == 1 else x.contiguous()
        product = Product(n_out, n_in, is_gated=gate != NO_GATE, dtype=x.dtype)
        cut = cut_product(product, n_tokens, device_of(x.device))
        _launch(matrix, x, bias, out, cut, gate=gate, has_residual=has_residual)


def _launch(
    matrix: PackedGroups,
    x: Tensor,
    bias: Tensor | None,
    out: Tensor,
    cut: Cut,
    *,
    gate: int,
    has_residual: bool,
) -> None:
    """Fills `out` [n_tokens, n_out], or adds to the residual that it is, in one launch.

    The last dimension of `x` and of `out` lies in memory without gaps.
    """
    n_rows, n_in = matrix.shape
    n_tokens, n_out = out.shape
    parts = matrix.arrivals  # not written to, where there is only one
    if cut.n_parts > 1:
        size = (cut.n_parts, n_tokens, n_rows)
        parts = torch.empty(size, dtype=torch.float32, device=x.device)
    _multiply[(cut.n_tiles, cut.n_parts)](
        x,
        matrix.packed,
        matrix.scales,
        matrix.scales if matrix.offsets is None else matrix.offsets,
        matrix.values,
        matrix.scales if bias is None else bias,
        out,
        parts,
        matrix.arrivals,
        n_tokens,
        x.stride(0),
        out.stride(0),
        N_IN=n_in,
        N_OUT=n_out,
        ROW=matrix.packed.shape[1],
        BITS=matrix.form.bits,
        IS_WHOLE=matrix.form.values == WHOLE,
        HAS_OFFSETS=matrix.offsets is not None,
        SIZE=matrix.form.size,
        N_GROUPS=matrix.scales.shape[1],
        GATE=gate,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=has_residual,
        TOKENS=cut.tiles.tokens,
        OUTPUTS=cut.tiles.outputs,
        INPUTS=cut.tiles.inputs,
        N_PARTS=cut.n_parts,
        N_STEPS=cut.n_steps,
        GROUP=GROUP,
        num_warps=cut.tiles.n_warps,
        num_stages=cut.tiles.n_stages,
    )
