"""The gated MLPs of a mixture of experts on a GPU; the host does not wait for the device.

A choice is a pair of a token and an expert that was chosen for it. Only the device knows how many
tokens chose each expert, but the host knows the maximum number of tiles. All tiles of an expert are
full, except the last one. So n choices among n_experts make at most
`(n + min(n, n_experts) * (tile - 1)) / tile` tiles. Programs are launched for that many tiles, and
programs without a tile end at once. All shapes depend only on the number of tokens, so that the
launches can be captured in a CUDA graph. There are four launches, and a fifth for many tokens:

1. count (only for many tokens): counts how often each expert occurs in each chunk of choices.
2. sort: sorts the choices by expert, and writes the expert and the choices of each tile. The index
   of a choice is the number of choices before it: all choices of experts with smaller numbers, and
   the choices of its own expert in earlier chunks and earlier in its own chunk.
3. gate and up: gathers the tokens of a tile, multiplies them with both matrices, and applies the
   gate before the result is written.
4. down: multiplies the results with the second matrix. The rows of both products are stored in the
   order of tokens, not of experts, so that they need not be sorted back.
5. sum: adds up the outputs of each token's experts by weight, in a fixed order and in float32.

Bytes: with few tokens, time is limited by reading the matrices of the chosen experts, 3 * size *
hidden elements each. Tiles are then small, so that all multiprocessors take part in the reading.
With many tokens, time is limited by the matrix units: 6 * size * hidden FLOPs per choice. Between
the launches, 2 * (size + hidden) elements per choice are written and read.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.forms.experts import PLAIN_EXPERTS, ExpertForm
from kernels.triton.activations import clamped, gelu, silu

_CHUNK = 256  # choices that a program sorts
_SOME = 32  # choices of a chunk that a step compares with all choices of the chunk
_SUM_BLOCK = 1024  # elements of a token that a program of `_sum` computes


class _Tiles(NamedTuple):
    """The tile size of a product, and the number of warps and pipeline stages with which a program
    computes a tile."""

    choices: int
    outputs: int  # in the first product, number of outputs of each of the two matrices
    inputs: int  # inputs of one step
    n_warps: int
    n_stages: int  # stages of the software pipeline over steps


class _Launch(NamedTuple):
    """The tiles of the two products of an expert. Both must have an equal number of choices (see
    the module) per tile."""

    gate_up: _Tiles
    down: _Tiles


# Keys are the bytes of an element, and 0, 1 or 2 for few, some or many choices per expert. A stage
# takes shared memory for `(choices + outputs) * inputs` elements, or `(choices + 2 * outputs) *
# inputs` for gate and up. In float32, products do not use matrix units, and threads hold the
# operands in registers.
_LAUNCHES = {
    (2, 0): _Launch(_Tiles(16, 32, 128, 4, 4), _Tiles(16, 64, 128, 4, 4)),
    (2, 1): _Launch(_Tiles(64, 64, 64, 4, 3), _Tiles(64, 128, 64, 4, 3)),
    (2, 2): _Launch(_Tiles(128, 64, 64, 8, 3), _Tiles(128, 128, 64, 8, 3)),
    (4, 0): _Launch(_Tiles(16, 16, 32, 4, 3), _Tiles(16, 32, 32, 4, 3)),
    (4, 1): _Launch(_Tiles(32, 32, 32, 4, 3), _Tiles(32, 64, 32, 4, 3)),
    (4, 2): _Launch(_Tiles(32, 32, 32, 4, 3), _Tiles(32, 64, 32, 4, 3)),
}

# Maximum number of choices per expert that count as few, and as some.
_FEW, _SOME_CHOICES = 16, 96

# Number of neighbouring tiles that run at a time for each block of outputs, so that the weights of
# the block are read from the cache.
_GROUP = 8


@cache
def _launch(element_bytes: int, n_choices_per_expert: int) -> _Launch:
    size = (n_choices_per_expert > _FEW) + (n_choices_per_expert > _SOME_CHOICES)
    return _LAUNCHES[element_bytes, size]


@triton.jit(do_not_specialize=["n_choices"])
def _count(experts, counts, n_choices, BINS: tl.constexpr, CHUNK: tl.constexpr):
    chunk = tl.program_id(0)
    choice = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(experts + choice, choice < n_choices, BINS - 1).to(tl.int32)
    tl.store(counts + chunk * BINS + tl.arange(0, BINS), tl.histogram(expert, BINS))


@triton.jit(do_not_specialize=["n_choices", "n_chunks", "max_tiles"])
def _sort(
    experts,
    counts,
    begins,
    order,
    tiles,
    n_choices,
    n_chunks,
    max_tiles,
    N_EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    SOME: tl.constexpr,
    IS_ONE_CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    choice = chunk * CHUNK + tl.arange(0, CHUNK)
    is_there = choice < n_choices
    expert = tl.load(experts + choice, is_there, BINS - 1).to(tl.int32)
    bins = tl.arange(0, BINS)

    # The number of choices of each expert in all chunks, and in the chunks before this one.
    if IS_ONE_CHUNK:
        total = tl.histogram(expert, BINS)
        before = tl.zeros((BINS,), tl.int32)
    else:
        total = tl.zeros((BINS,), tl.int32)
        before = tl.zeros((BINS,), tl.int32)
        for first in range(0, n_chunks, 16):
            other = first + tl.arange(0, 16)[:, None]
            count = tl.load(counts + other * BINS + bins[None, :], other < n_chunks, 0)
            total += tl.sum(count, 0)
            before += tl.sum(tl.where(other < chunk, count, 0), 0)
    total = tl.where(bins < N_EXPERTS, total, 0)
    begin = tl.cumsum(total, 0) - total  # [BINS], index of each expert's first choice

    # The begins of experts are exchanged between threads through memory.
    mine = begins + chunk * BINS
    tl.store(mine + bins, begin + before)
    tl.debug_barrier()
    place = tl.load(mine + expert, is_there, 0)
    for first in range(0, CHUNK, SOME):
        other = chunk * CHUNK + first + tl.arange(0, SOME)
        of_other = tl.load(experts + other, other < n_choices, BINS - 1).to(tl.int32)
        is_before = (of_other[None, :] == expert[:, None]) & (other[None, :] < choice[:, None])
        place += tl.sum(is_before.to(tl.int32), 1)
    tl.store(order + place, choice, is_there)

    if chunk == 0:
        n_tiles = (total + TILE - 1) // TILE
        first_tile = tl.cumsum(n_tiles, 0) - n_tiles
        for i in range(tl.max(n_tiles, 0)):
            tile = tiles + 1 + first_tile + i
            is_tile = i < n_tiles
            tl.store(tile, bins, is_tile)
            tl.store(tile + max_tiles, begin + i * TILE, is_tile)
            tl.store(tile + 2 * max_tiles, begin + total, is_tile)
        tl.store(tiles, tl.sum(n_tiles, 0))


@triton.jit
def _gated(gate, up, slope, limit, IS_CLAMPED: tl.constexpr, IS_GELU: tl.constexpr):
    if IS_CLAMPED:
        return clamped(gate, up, slope, limit)
    elif IS_GELU:
        return gelu(gate) * up
    else:
        return silu(gate) * up


@triton.jit(do_not_specialize=["max_tiles"])
def _multiply(
    x,
    weight,
    bias,
    out,
    order,
    tiles,
    max_tiles,
    row_stride,
    slope,
    limit,
    N_IN: tl.constexpr,
    N_OUT: tl.constexpr,
    N_PER_ROW: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
    IS_GELU: tl.constexpr,
    CHOICES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Multiplies rows of `x` with the matrices of their experts. Each row of `x` belongs to
    N_PER_ROW choices (see the module), and the result has one row for each choice."""
    N_BLOCKS: tl.constexpr = (N_OUT + OUTPUTS - 1) // OUTPUTS
    program = tl.program_id(0)
    n_tiles = tl.load(tiles)
    group = program // (GROUP * N_BLOCKS)
    n_in_group = tl.minimum(n_tiles - group * GROUP, GROUP)
    if n_in_group <= 0:
        return
    tile = group * GROUP + program % (GROUP * N_BLOCKS) % n_in_group
    block = program % (GROUP * N_BLOCKS) // n_in_group
    if block >= N_BLOCKS:
        return

    expert = tl.load(tiles + 1 + tile).to(tl.int64)
    begin = tl.load(tiles + 1 + max_tiles + tile)
    end = tl.load(tiles + 1 + 2 * max_tiles + tile)
    place = begin + tl.arange(0, CHOICES)
    # Past the end the tile's first choice is computed again, and the result is not written.
    choice = tl.load(order + tl.where(place < end, place, begin)).to(tl.int64)
    output = block * OUTPUTS + tl.arange(0, OUTPUTS)
    known_output = tl.minimum(output, N_OUT - 1)
    step = tl.arange(0, INPUTS)
    left = x + (choice // N_PER_ROW * row_stride)[:, None] + step[None, :]
    matrix = weight + expert * ((2 if IS_GATED else 1) * N_OUT * N_IN)
    right = matrix + known_output[None, :] * N_IN + step[:, None]
    sums = tl.zeros((CHOICES, OUTPUTS), tl.float32)
    gated_sums = tl.zeros((CHOICES, OUTPUTS), tl.float32)
    for first in range(0, N_IN, INPUTS):
        if N_IN % INPUTS == 0:
            rows = tl.load(left + first)
            columns = tl.load(right + first)
        else:
            rows = tl.load(left + first, (first + step < N_IN)[None, :], 0.0)
            columns = tl.load(right + first, (first + step < N_IN)[:, None], 0.0)
        sums = tl.dot(rows, columns, sums, input_precision="ieee")
        if IS_GATED:
            if N_IN % INPUTS == 0:
                columns = tl.load(right + N_OUT * N_IN + first)
            else:
                columns = tl.load(right + N_OUT * N_IN + first, (first + step < N_IN)[:, None], 0.0)
            gated_sums = tl.dot(rows, columns, gated_sums, input_precision="ieee")
    biases = bias + expert * ((2 if IS_GATED else 1) * N_OUT) + known_output
    if HAS_BIAS:
        sums += tl.load(biases).to(tl.float32)[None, :]
    if IS_GATED:
        if HAS_BIAS:
            gated_sums += tl.load(biases + N_OUT).to(tl.float32)[None, :]
        sums = _gated(sums, gated_sums, slope, limit, IS_CLAMPED, IS_GELU)
    is_there = (place < end)[:, None] & (output < N_OUT)[None, :]
    tl.store(out + choice[:, None] * N_OUT + output[None, :], sums, is_there)


@triton.jit
def _sum(outer, weights, out, SIZE: tl.constexpr, N_CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < SIZE
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(N_CHOSEN):
        choice = token * N_CHOSEN + i
        share = tl.load(weights + choice).to(tl.float32)
        total += share * tl.load(outer + choice * SIZE + column, is_there, 0.0).to(tl.float32)
    tl.store(out + token * SIZE + column, total, is_there)


def expert_mlp(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    experts: Tensor,
    weights: Tensor,
    form: ExpertForm = PLAIN_EXPERTS,
) -> Tensor:
    """Runs the experts of a layer, as `Ops.expert_mlp` describes. `gate_up`, `down` and the biases
    must be contiguous."""
    if x.stride(1) != 1:
        x = x.contiguous()
    n_tokens, hidden_size = x.shape
    n_experts, _, size = down.shape
    n_chosen = experts.shape[1]
    n_choices = n_tokens * n_chosen
    launch = _launch(x.element_size(), triton.cdiv(n_choices, n_experts))
    order, tiles, max_tiles = _sorted(experts, n_experts, launch.gate_up.choices)
    clamp = form.clamp
    inner = torch.empty((n_choices, size), dtype=x.dtype, device=x.device)
    outer = torch.empty((n_choices, hidden_size), dtype=x.dtype, device=x.device)
    for rows, weight, bias, result, n_per_row, product in (
        (x, gate_up, form.gate_up_bias, inner, n_chosen, launch.gate_up),
        (inner, down, form.down_bias, outer, 1, launch.down),
    ):
        n_out = result.shape[1]
        n_groups = triton.cdiv(max_tiles, _GROUP)
        _multiply[(n_groups * _GROUP * triton.cdiv(n_out, product.outputs),)](
            rows,
            weight,
            weight if bias is None else bias,
            result,
            order,
            tiles,
            max_tiles,
            rows.stride(0),
            0.0 if clamp is None else clamp.slope,
            0.0 if clamp is None else clamp.limit,
            N_IN=rows.shape[1],
            N_OUT=n_out,
            N_PER_ROW=n_per_row,
            IS_GATED=weight is gate_up,
            HAS_BIAS=bias is not None,
            IS_CLAMPED=weight is gate_up and clamp is not None,
            IS_GELU=weight is gate_up and form.gate == "gelu_tanh",
            CHOICES=product.choices,
            OUTPUTS=product.outputs,
            INPUTS=product.inputs,
            GROUP=_GROUP,
            num_warps=product.n_warps,
            num_stages=product.n_stages,
        )
    out = torch.empty((n_tokens, hidden_size), dtype=x.dtype, device=x.device)
    _sum[(n_tokens, triton.cdiv(hidden_size, _SUM_BLOCK))](
        outer,
        weights.contiguous(),
        out,
        SIZE=hidden_size,
        N_CHOSEN=n_chosen,
        BLOCK=_SUM_BLOCK,
        num_warps=4,
    )
    return out


def _sorted(experts: Tensor, n_experts: int, tile: int) -> tuple[Tensor, Tensor, int]:
    """Returns the choices sorted by expert, the table of tiles, and the maximum number of tiles.

    A choice is an index into the flattened `experts` [n_tokens, n_chosen]. The table of tiles holds
    the number of tiles, then three columns of `max_tiles` elements: the expert of each tile, the
    index of its first choice among the sorted choices, and the end of its expert's choices.
    """
    n_choices = experts.numel()
    max_tiles = (n_choices + min(n_choices, n_experts) * (tile - 1)) // tile
    n_chunks = triton.cdiv(n_choices, _CHUNK)
    n_bins = triton.next_power_of_2(n_experts + 1)  # the last bin counts padding
    device, experts = experts.device, experts.contiguous()
    order = torch.empty(n_choices, dtype=torch.int32, device=device)
    tiles = torch.empty(1 + 3 * max_tiles, dtype=torch.int32, device=device)
    counts, begins = torch.empty((2, n_chunks, n_bins), dtype=torch.int32, device=device)
    if n_chunks > 1:
        _count[(n_chunks,)](experts, counts, n_choices, BINS=n_bins, CHUNK=_CHUNK, num_warps=4)
    _sort[(n_chunks,)](
        experts,
        counts,
        begins,
        order,
        tiles,
        n_choices,
        n_chunks,
        max_tiles,
        N_EXPERTS=n_experts,
        TILE=tile,
        BINS=n_bins,
        CHUNK=_CHUNK,
        SOME=_SOME,
        IS_ONE_CHUNK=n_chunks <= 1,
        num_warps=4,
    )
    return order, tiles, max_tiles
