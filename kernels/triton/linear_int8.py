"""Linear layers on a GPU whose weights are int8 with a scale for each output.

The numbers are those of the CPU's int8 (`kernels.native.linear.quantised`). Tokens stay what they
are: a weight becomes their element type in registers, exactly, since it has seven bits and a sign,
and is multiplied on the matrix units. Sums are float32 and are scaled once, then gated, or bias and
residual are added, before they are rounded.

Bytes: n_out * n_in for the weights, half of bfloat16's, and for each token 2 * (n_in + n_out), with
a residual 2 * n_out more. FLOPs: 2 * n_tokens * n_out * n_in. So up to about a hundred tokens
memory is what a product waits for, and above it the matrix units, which are as fast as for
bfloat16's weights.

A program computes outputs times tokens and not tokens times outputs. What it converts is then the
left factor, which a matrix unit of Hopper takes from registers, and the few tokens of a decode are
the side of the tile that may be short. Tokens that are not there are not read.

Where there are fewer tiles than multiprocessors, inputs are divided among programs. Each writes its
sums, and the one that is last, by a count of those that have, adds them up, always in the order of
the inputs: results are the same each time. It leaves the count at zero for the next call. So calls
with the same weight must not run at the same time, on two streams.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear_weight import Gate
from kernels.quantise import quantised
from kernels.triton.gates import gelu, silu
from kernels.triton.product_tiles import MAX_DIVIDED, Cut, Product, cut_product
from kernels.triton.tuning import device_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NO_GATE = 0
GATES: dict[Gate, int] = {"silu": 1, "gelu_tanh": 2}
_ALIGNMENT_BYTES = 16  # of a row, what a thread loads at once

# Tiles of tokens that go over the outputs side by side, so that weights are read from the cache.
GROUP = 16


@triton.jit
def _sums_of(
    left,
    right,
    is_token,
    begin,
    N_IN: tl.constexpr,
    BETWEEN: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    N_STEPS: tl.constexpr,
):
    """Returns the sums over inputs from `begin` of a matrix and of the one `BETWEEN` numbers on."""
    sums = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    gated_sums = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    for first in range(begin, begin + N_STEPS * INPUTS, INPUTS):
        if IS_WHOLE:
            columns = tl.load(right + first, is_token[None, :], 0.0)
            rows = tl.load(left + first)
        else:
            is_input = first + tl.arange(0, INPUTS) < N_IN
            columns = tl.load(right + first, is_token[None, :] & is_input[:, None], 0.0)
            rows = tl.load(left + first, is_input[None, :], 0)
        sums = tl.dot(rows.to(columns.dtype), columns, sums, input_precision="ieee")
        if IS_GATED:
            if IS_WHOLE:
                rows = tl.load(left + BETWEEN + first)
            else:
                rows = tl.load(left + BETWEEN + first, is_input[None, :], 0)
            gated_sums = tl.dot(rows.to(columns.dtype), columns, gated_sums, input_precision="ieee")
    return sums, gated_sums


@triton.jit
def sum_of_parts(
    place, size, is_there, N_PARTS: tl.constexpr, OUTPUTS: tl.constexpr, TOKENS: tl.constexpr
):
    total = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    for part in range(N_PARTS):
        total += tl.load(place + part * size, is_there, 0.0, cache_modifier=".cg")
    return total


@triton.jit
def gated_sums_of(sums, gated_sums, GATE: tl.constexpr):
    if GATE == 1:
        return silu(sums) * gated_sums
    return gelu(sums) * gated_sums


@triton.jit(do_not_specialize=["n_tokens"])
def _multiply(
    x,
    weight,
    scales,
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
    """Multiplies a part of the inputs for a tile; gated, with both matrices in their order."""
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
    step = tl.arange(0, INPUTS)
    sums, gated_sums = _sums_of(
        weight + known_output[:, None] * ROW + step[None, :],
        x + token[None, :] * x_stride + step[:, None],
        is_token,
        part * (N_STEPS * INPUTS),
        N_IN=N_IN,
        BETWEEN=N_OUT * ROW,
        IS_GATED=IS_GATED,
        IS_WHOLE=N_IN == N_PARTS * N_STEPS * INPUTS,
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
        sums *= tl.load(scales + known_output)[:, None]
        if IS_GATED:
            gated_sums *= tl.load(scales + N_OUT + known_output)[:, None]
            sums = gated_sums_of(sums, gated_sums, GATE)
        if HAS_BIAS:
            sums += tl.load(bias + known_output).to(tl.float32)[:, None]
        result = out + token[None, :] * out_stride + output[:, None]
        if HAS_RESIDUAL:
            sums += tl.load(result, is_there, 0.0).to(tl.float32)
        tl.store(result, sums, is_there)


def can_quantise(weight: Tensor) -> bool:
    """Whether `TritonInt8Weight` takes this matrix."""
    return weight.numel() > 0 and weight.dtype in _DTYPES


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """A quantised matrix, and the counts of programs that share its tiles."""

    whole: Tensor  # [n_out, n_in and what rows are longer], int8
    scales: Tensor  # [n_out], float32
    arrivals: Tensor  # [MAX_DIVIDED], int32, zeros between calls
    shape: tuple[int, int]

    @classmethod
    def of(cls, weight: Tensor) -> Int8Matrix:
        """Quantises a matrix; raises ValueError if it is none that `can_quantise`."""
        if not can_quantise(weight):
            raise ValueError(f"no int8 for {weight.dtype} {list(weight.shape)} on {weight.device}")
        n_out, n_in = weight.shape
        whole, scales = quantised(weight)
        whole = F.pad(whole, (0, -n_in % _ALIGNMENT_BYTES))
        arrivals = torch.zeros(MAX_DIVIDED, dtype=torch.int32, device=weight.device)
        return cls(whole, scales, arrivals, (n_out, n_in))

    @property
    def nbytes(self) -> int:
        return self.whole.nbytes + self.scales.nbytes + self.arrivals.nbytes


@dataclass(frozen=True, slots=True)
class TritonInt8Weight:
    """A matrix of int8; implements `kernels.linear_weight.LinearWeight`."""

    matrix: Int8Matrix

    @classmethod
    def of(cls, weight: Tensor) -> TritonInt8Weight:
        """Quantises a matrix; see `Int8Matrix.of`."""
        return cls(Int8Matrix.of(weight))

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


@dataclass(frozen=True, slots=True)
class TritonInt8GatedWeight:
    """Two matrices of int8, the gate's and that of what it gates, multiplied with together."""

    matrix: Int8Matrix  # of both, the gate's first
    gate: int

    @classmethod
    def of(cls, weight: Tensor, gate: Gate) -> TritonInt8GatedWeight:
        """Quantises a matrix [2 * n_out, n_in], the gate's rows first; see `Int8Matrix.of`."""
        return cls(Int8Matrix.of(weight), GATES[gate])

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
    matrix: Int8Matrix,
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
        multiply(matrix, x, bias, out, cut, gate=gate, has_residual=has_residual)


def multiply(
    matrix: Int8Matrix,
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
    parts = matrix.scales  # not written to, where there is only one
    if cut.n_parts > 1:
        size = (cut.n_parts, n_tokens, n_rows)
        parts = torch.empty(size, dtype=torch.float32, device=x.device)
    _multiply[(cut.n_tiles, cut.n_parts)](
        x,
        matrix.whole,
        matrix.scales,
        matrix.scales if bias is None else bias,
        out,
        parts,
        matrix.arrivals,
        n_tokens,
        x.stride(0),
        out.stride(0),
        N_IN=n_in,
        N_OUT=n_out,
        ROW=matrix.whole.shape[1],
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
