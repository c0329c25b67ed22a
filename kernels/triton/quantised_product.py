"""Products of tokens with a quantised matrix on a GPU: launch, division, gate, bias and residual.

Each form of quantised matrices (`linear_int8`, `linear_groups`) has a kernel that sums one tile
over a part of the inputs. This file holds the code that all forms share.

A program computes a tile [outputs, tokens], not [tokens, outputs]. The converted weights are then
the left factor, which a matrix unit of Hopper reads from registers, and the side of the tile that
may be short belongs to the tokens, which are few in a decode.

If there are too few tiles to occupy the GPU, the inputs of a tile are divided among programs. Each
program writes its sums and increments a count. The program that completes the count adds up the
sums in the order of the inputs, so that results do not depend on timing. It then sets the count to
zero for the next call. Two calls with one weight must therefore not run at the same time on two
streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.activations import gelu, silu
from kernels.triton.product_tiles import MAX_DIVIDED, Product, ProductCut, cut_product
from kernels.triton.tuning import device_of
from kernels.weights.linear import Gate

NO_GATE = 0
GATES: dict[Gate, int] = {"silu": 1, "gelu_tanh": 2}

# Number of neighbouring tiles of tokens that run at a time for each block of outputs, so that the
# weights of the block are read from the cache.
GROUP = 16


@triton.jit
def tile_of(
    program,
    n_tokens,
    N_OUT: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Returns the tokens [TOKENS] and the outputs [OUTPUTS] of a program's tile."""
    N_BLOCKS: tl.constexpr = (N_OUT + OUTPUTS - 1) // OUTPUTS
    group = program // (GROUP * N_BLOCKS)
    n_in_group = tl.minimum(tl.cdiv(n_tokens, TOKENS) - group * GROUP, GROUP)
    tile = group * GROUP + program % (GROUP * N_BLOCKS) % n_in_group
    block = program % (GROUP * N_BLOCKS) // n_in_group
    token = (tile * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    return token, block * OUTPUTS + tl.arange(0, OUTPUTS)


@triton.jit
def _sum_of_parts(
    place, size, is_there, N_PARTS: tl.constexpr, OUTPUTS: tl.constexpr, TOKENS: tl.constexpr
):
    total = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    for part in range(N_PARTS):
        total += tl.load(place + part * size, is_there, 0.0, cache_modifier=".cg")
    return total


@triton.jit
def _gated(sums, gated_sums, GATE: tl.constexpr):
    if GATE == 1:
        return silu(sums) * gated_sums
    return gelu(sums) * gated_sums


@triton.jit
def _with_other_parts(
    sums,
    gated_sums,
    place,
    size,
    arrivals,
    is_there,
    IS_GATED: tl.constexpr,
    N_OUT: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    N_PARTS: tl.constexpr,
):
    """Writes the sums over this program's part of the inputs. Returns the sums, the gated sums and
    `is_last`.

    `is_last` is true in the program that is the last one of its tile to write. Only in that program
    are the returned sums totals over all parts.
    """
    program, part = tl.program_id(0), tl.program_id(1)
    tl.store(place + part * size, sums, is_there)
    if IS_GATED:
        tl.store(place + part * size + N_OUT, gated_sums, is_there)
    tl.debug_barrier()  # all threads must have written before one of them increments the count
    is_last = tl.atomic_add(arrivals + program, 1, sem="acq_rel") == N_PARTS - 1
    if is_last:
        tl.store(arrivals + program, 0)
        sums = _sum_of_parts(place, size, is_there, N_PARTS, OUTPUTS, TOKENS)
        if IS_GATED:
            gated_sums = _sum_of_parts(place + N_OUT, size, is_there, N_PARTS, OUTPUTS, TOKENS)
    return sums, gated_sums, is_last


@triton.jit
def finish(
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
    N_OUT: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    N_PARTS: tl.constexpr,
):
    """Completes a tile from a program's sums over its part of the inputs, [OUTPUTS, TOKENS].

    The last program of a tile adds up all parts, applies the scales of outputs if HAS_SCALES, then
    the gate, the bias and the residual, and writes the result. All other programs only write their
    sums.
    """
    IS_GATED: tl.constexpr = GATE > 0
    N_ROWS: tl.constexpr = 2 * N_OUT if IS_GATED else N_OUT
    is_there = (token < n_tokens)[None, :] & (output < N_OUT)[:, None]
    known_output = tl.minimum(output, N_OUT - 1).to(tl.int64)
    is_last = True
    if N_PARTS > 1:
        place = parts + token[None, :] * N_ROWS + output[:, None]
        size = n_tokens.to(tl.int64) * N_ROWS
        sums, gated_sums, is_last = _with_other_parts(
            sums,
            gated_sums,
            place,
            size,
            arrivals,
            is_there,
            IS_GATED=IS_GATED,
            N_OUT=N_OUT,
            TOKENS=TOKENS,
            OUTPUTS=OUTPUTS,
            N_PARTS=N_PARTS,
        )
    if is_last:
        if HAS_SCALES:
            sums *= tl.load(scales + known_output)[:, None]
            if IS_GATED:
                gated_sums *= tl.load(scales + N_OUT + known_output)[:, None]
        if IS_GATED:
            sums = _gated(sums, gated_sums, GATE)
        if HAS_BIAS:
            sums += tl.load(bias + known_output).to(tl.float32)[:, None]
        result = out + token[None, :] * out_stride + output[:, None]
        if HAS_RESIDUAL:
            sums += tl.load(result, is_there, 0.0).to(tl.float32)
        tl.store(result, sums, is_there)


class Operand(NamedTuple):
    """The kernel for a matrix, and the arguments of the kernel that depend on the matrix."""

    kernel: Any
    tensors: tuple[Tensor, ...]  # positional arguments between the tokens and the bias
    constants: Mapping[str, object]  # constexpr arguments


class KernelMatrix(Protocol):
    """A quantised matrix, packed for a kernel."""

    @property
    def shape(self) -> tuple[int, int]:
        """The sizes n_out and n_in."""

    @property
    def nbytes(self) -> int:
        """Number of bytes that the matrix takes in memory."""

    @property
    def arrivals(self) -> Tensor:
        """For each tile, the number of programs that have written their sums, [MAX_DIVIDED] int32.
        All numbers are 0 between calls."""

    def operand(self) -> Operand:
        """Returns the kernel for this matrix, and the kernel's arguments that depend on the
        matrix."""


AnyMatrix = TypeVar("AnyMatrix", bound=KernelMatrix)


def no_arrivals(device: torch.device) -> Tensor:
    """Returns the initial value of `KernelMatrix.arrivals`: zeros [MAX_DIVIDED] int32."""
    return torch.zeros(MAX_DIVIDED, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class QuantisedWeight(Generic[AnyMatrix]):
    """A quantised matrix; implements `kernels.weights.linear.LinearWeight`."""

    matrix: AnyMatrix

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
class QuantisedGatedWeight(Generic[AnyMatrix]):
    """The gate and up matrices of a gated MLP as one quantised matrix, with the gate function."""

    matrix: AnyMatrix  # [2 * n_out, n_in], the gate's rows first
    gate: int  # a value of GATES

    @property
    def shape(self) -> tuple[int, int]:
        """The sizes 2 * n_out and n_in of the gate and up matrices together."""
        return self.matrix.shape

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty((x.shape[0], self.shape[0] // 2), dtype=x.dtype, device=x.device)
        _linear(self.matrix, x, None, out, gate=self.gate, has_residual=False)
        return out  # [n_tokens, n_out of each]


def _linear(
    matrix: KernelMatrix,
    x: Tensor,
    bias: Tensor | None,
    out: Tensor,  # holds the residual if `has_residual`
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
    matrix: KernelMatrix,
    x: Tensor,
    bias: Tensor | None,
    out: Tensor,
    cut: ProductCut,
    *,
    gate: int,
    has_residual: bool,
) -> None:
    """Writes the product of `x` [n_tokens, n_in] and `matrix` to `out` [n_tokens, n_out], in one
    launch.

    With `has_residual` the product is added to `out`. The last dimensions of `x` and `out` must
    have a stride of 1.
    """
    n_rows, n_in = matrix.shape
    n_tokens, n_out = out.shape
    parts = matrix.arrivals  # a placeholder, unused if there is one part
    if cut.n_parts > 1:
        size = (cut.n_parts, n_tokens, n_rows)
        parts = torch.empty(size, dtype=torch.float32, device=x.device)
    kernel, tensors, constants = matrix.operand()
    kernel[(cut.n_tiles, cut.n_parts)](
        x,
        *tensors,
        out if bias is None else bias,
        out,
        parts,
        matrix.arrivals,
        n_tokens,
        x.stride(0),
        out.stride(0),
        N_IN=n_in,
        N_OUT=n_out,
        **constants,
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
