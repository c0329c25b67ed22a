"""Linear layers on a GPU whose weights are int8 with a scale for each output.

Weights are quantised as for a CPU (`kernels.weights.quantise`). Tokens stay what they are: a weight
becomes their element type in registers, exactly, since it has seven bits and a sign, and is
multiplied on the matrix units. Sums are float32 and are scaled once, then gated, or bias and
residual are added, before they are rounded.

Bytes: n_out * n_in for the weights, half of bfloat16's, and for each token 2 * (n_in + n_out), with
a residual 2 * n_out more. FLOPs: 2 * n_tokens * n_out * n_in. So up to about a hundred tokens
memory is what a product waits for, and above it the matrix units, which are as fast as for
bfloat16's weights. `quantised_product` cuts and launches products.
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
_ALIGNMENT_BYTES = 16  # of a row, what a thread loads at once


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
    part = tl.program_id(1)
    token, output = tile_of(tl.program_id(0), n_tokens, N_OUT, TOKENS, OUTPUTS, GROUP)
    # What is beyond the last is the last once more, and not written.
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
    """Whether `TritonInt8Weight` takes this matrix."""
    return weight.numel() > 0 and weight.dtype in _DTYPES


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """A quantised matrix, and the counts of programs that share its tiles."""

    whole: Tensor  # [n_out, n_in and what rows are longer], int8
    scales: Tensor  # [n_out], float32
    arrivals: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, weight: Tensor) -> Int8Matrix:
        """Quantises a matrix; raises ValueError if it is none that `can_quantise`."""
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
    """A matrix of int8."""

    @classmethod
    def of(cls, weight: Tensor) -> TritonInt8Weight:
        """Quantises a matrix; see `Int8Matrix.of`."""
        return cls(Int8Matrix.of(weight))


@dataclass(frozen=True, slots=True)
class TritonInt8GatedWeight(QuantisedGatedWeight[Int8Matrix]):
    """Two matrices of int8 and a gate."""

    @classmethod
    def of(cls, weight: Tensor, gate: Gate) -> TritonInt8GatedWeight:
        """Quantises a matrix [2 * n_out, n_in], the gate's rows first; see `Int8Matrix.of`."""
        return cls(Int8Matrix.of(weight), GATES[gate])
