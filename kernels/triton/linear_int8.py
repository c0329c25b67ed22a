"""Linear layers on a GPU whose weights are int8 with a scale for each output.

Weights are quantised as for a CPU (`kernels.weights.quantise`). Tokens are not quantised. In
registers a weight is converted to the element type of tokens, which is exact for seven bits and a
sign, and is multiplied by the matrix units. Sums are float32. They are scaled once, then gated, or
a bias and a residual are added, and then rounded.

Bytes: n_out * n_in for the weights, which is half of a bfloat16 matrix, and 2 * (n_in + n_out) for
each token, plus 2 * n_out if there is a residual. FLOPs: 2 * n_tokens * n_out * n_in. Up to about a
hundred tokens a product is limited by memory, above that by the matrix units, which are as fast as
with bfloat16 weights. `quantised_product` divides products into tiles and launches the kernel.
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
from kernels.weights.linear import Gate
from kernels.weights.quantise import quantised

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT_BYTES = 16  # rows are padded to a multiple of this, the bytes of one load of a thread


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
    """Returns the sums [OUTPUTS, TOKENS] over the inputs from `begin` on. If IS_GATED, also returns
    the sums for a second matrix, whose numbers begin BETWEEN elements after the first matrix."""
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
    """Computes the sums of a tile over a part of the inputs. If the product is gated, computes the
    sums for both matrices. The last program of a tile writes the result."""
    part = tl.program_id(1)
    token, output = tile_of(tl.program_id(0), n_tokens, N_OUT, TOKENS, OUTPUTS, GROUP)
    # Past the end the last output is computed again, and the result is not written.
    known_output = tl.minimum(output, N_OUT - 1).to(tl.int64)
    step = tl.arange(0, INPUTS)
    sums, gated_sums = _sums_of(
        weight + known_output[:, None] * ROW + step[None, :],
        x + token[None, :] * x_stride + step[:, None],
        token < n_tokens,
        part * (N_STEPS * INPUTS),
        N_IN=N_IN,
        BETWEEN=N_OUT * ROW,
        IS_GATED=GATE > 0,
        IS_WHOLE=N_IN == N_PARTS * N_STEPS * INPUTS,
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
        HAS_SCALES=True,
        GATE=GATE,
        HAS_BIAS=HAS_BIAS,
        HAS_RESIDUAL=HAS_RESIDUAL,
        TOKENS=TOKENS,
        OUTPUTS=OUTPUTS,
        N_PARTS=N_PARTS,
    )


def can_quantise(weight: Tensor) -> bool:
    """Returns whether `TritonInt8Weight` supports the matrix `weight`."""
    return weight.numel() > 0 and weight.dtype in _DTYPES


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """An int8 matrix with a scale for each output, and the counters (`arrivals`) that
    `KernelMatrix` requires."""

    whole: Tensor  # [n_out, n_in padded to _ALIGNMENT_BYTES], int8
    scales: Tensor  # [n_out], float32
    arrivals: Tensor  # see `KernelMatrix.arrivals`
    shape: tuple[int, int]  # n_out and n_in

    @classmethod
    def of(cls, weight: Tensor) -> Int8Matrix:
        """Quantises `weight` [n_out, n_in]. Raises ValueError if `can_quantise` is false."""
        if not can_quantise(weight):
            raise ValueError(f"no int8 for {weight.dtype} {list(weight.shape)} on {weight.device}")
        n_out, n_in = weight.shape
        whole, scales = quantised(weight)
        whole = F.pad(whole, (0, -n_in % _ALIGNMENT_BYTES))
        return cls(whole, scales, no_arrivals(weight.device), (n_out, n_in))

    @property
    def nbytes(self) -> int:
        return self.whole.nbytes + self.scales.nbytes + self.arrivals.nbytes

    def operand(self) -> Operand:
        return Operand(_multiply, (self.whole, self.scales), {"ROW": self.whole.shape[1]})


@dataclass(frozen=True, slots=True)
class TritonInt8Weight(QuantisedWeight[Int8Matrix]):
    """A matrix of int8; implements `kernels.weights.linear.LinearWeight`."""

    @classmethod
    def of(cls, weight: Tensor) -> TritonInt8Weight:
        """Quantises `weight` [n_out, n_in] with `Int8Matrix.of`."""
        return cls(Int8Matrix.of(weight))


@dataclass(frozen=True, slots=True)
class TritonInt8GatedWeight(QuantisedGatedWeight[Int8Matrix]):
    """The gate and up matrices of a gated MLP in int8, with the gate function."""

    @classmethod
    def of(cls, weight: Tensor, gate: Gate) -> TritonInt8GatedWeight:
        """Quantises `weight` [2 * n_out, n_in], which has the gate's rows first, with
        `Int8Matrix.of`."""
        return cls(Int8Matrix.of(weight), GATES[gate])
