"""Checks whether the native library can run a program, and whether a program's tensors are valid.

The library uses addresses without checking them. So this module checks a whole program once, before
any address is taken. A program with matrices that are not packed for the library is run by the
interpreter. A program with tensors of contradictory shapes is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from kernels.native.call import ELEMENT
from kernels.native.groups import NativeGated, NativeLinear
from kernels.native.heads import NativeHeads
from kernels.native.linear import NativeGatedWeight, NativeWeight
from kernels.program import Program
from kernels.steps import (
    AddLowRank,
    AddPositions,
    Attend,
    Buffer,
    CopyPart,
    Embed,
    EmbedPacked,
    Expert,
    Gated,
    Heads,
    LayerNorm,
    Mul,
    Multiply,
    MultiplyHeads,
    RMSNorm,
    RMSNormPart,
    RotaryWriteKV,
    Route,
    RouteInGroups,
    RunDeltaNet,
    RunExperts,
    ScaleByPosition,
    SigmoidAndMul,
    TurnHeads,
    WriteKV,
)


def is_native(program: Program) -> bool:
    """Returns whether the library can run a program. The library must support the element type of
    hidden states, all matrices must be packed for the library, and all tables must be on the
    CPU."""
    tables = (step.table for step in program.steps if isinstance(step, Embed | AddPositions))
    matrices = (weight for step in program.steps for weight in _matrices(step))
    return (
        program.dtype in ELEMENT
        and all(table.device.type == "cpu" for table in tables)
        and all(isinstance(weight, NativeLinear | NativeGated) for weight in matrices)
        and all(
            isinstance(step.weight, NativeHeads)
            for step in program.steps
            if isinstance(step, MultiplyHeads)
        )
    )


def _matrices(step: object) -> Iterator[object]:
    if isinstance(step, Multiply):
        yield step.weight
    elif isinstance(step, EmbedPacked):
        yield step.table
    elif isinstance(step, RunExperts):
        for expert in step.each:
            yield from (expert.gate_up.weight, expert.down)
    elif isinstance(step, AddLowRank):
        for one in step.each:
            yield from (one.down, one.up)


def check(program: Program) -> None:
    """Raises ValueError if the library would misread the type or shape of a tensor. May be called
    only if `is_native` is true for the program."""
    for step in program.steps:
        _check(step, program)


@singledispatch
def _check(step: Any, program: Program) -> None:
    """Raises ValueError if the tensors of a step do not fit the buffers of the step.

    A step without tensors needs no check, because `Program` makes all buffers.
    """


@_check.register
def _(step: Embed, program: Program) -> None:
    _check_rows(step.table, step.out)


@_check.register
def _(step: EmbedPacked, program: Program) -> None:
    _check_product(step.table, program.dtype)


@_check.register
def _(step: AddPositions, program: Program) -> None:
    _check_rows(step.table, step.x)


@_check.register
def _(step: RMSNorm, program: Program) -> None:
    _check_norm(step.weight, step.x.width)


@_check.register
def _(step: RMSNormPart, program: Program) -> None:
    _check_norm(step.weight, step.size)
    _check_part(step.x, step.first, step.n * step.size)


@_check.register
def _(step: LayerNorm, program: Program) -> None:
    _check_norm(step.weight, step.x.width)
    _check_norm(step.bias, step.x.width)
    _check_same(step.weight, step.bias)


@_check.register
def _(step: Multiply, program: Program) -> None:
    n_out, n_in = step.weight.shape
    is_gated = isinstance(step.weight, NativeGated)
    if step.x.width != n_in:
        raise ValueError(f"a matrix of {n_in} inputs for {step.x.width}")
    if step.out.width != (n_out // 2 if is_gated else n_out):
        raise ValueError(f"a matrix of {n_out} outputs for {step.out.width}")
    _check_product(step.weight, step.x.dtype)
    _check_bias(step.bias, n_out, step.x.dtype)


@_check.register
def _(step: AddLowRank, program: Program) -> None:
    types = {b.dtype for b in (step.x, step.gathered, step.inner, step.outer, step.out)}
    if len(types) > 1 or step.gathered.width != step.x.width or step.outer.width != step.out.width:
        raise ValueError(f"buffers of {types} for an adapter, or of other widths than its rows")
    for one in step.each:
        rank = one.down.shape[0]
        if one.down.shape[1] != step.x.width or one.up.shape[1] != rank:
            raise ValueError(
                f"an adapter of {one.down.shape} and {one.up.shape} for {step.x.width} inputs"
            )
        _check_part(step.out, one.first, one.up.shape[0])
        if not 0 < rank <= step.inner.width or one.adapter < 0:
            raise ValueError(f"an adapter {one.adapter} of rank {rank} of {step.inner.width}")
        _check_product(one.down, step.x.dtype)
        _check_product(one.up, step.x.dtype)


@_check.register
def _(step: RotaryWriteKV, program: Program) -> None:
    _check_heads(step.heads, step.qkv)
    for angles in (step.cos, step.sin):
        if angles.width != step.heads.head_dim:
            raise ValueError(f"{angles.width} angles for heads of {step.heads.head_dim}")
    if step.norms is not None:
        _check_norm(step.norms.q, step.heads.head_dim)
        _check_norm(step.norms.k, step.heads.head_dim)
        _check_same(step.norms.q, step.norms.k)


@_check.register
def _(step: WriteKV, program: Program) -> None:
    _check_heads(step.heads, step.qkv)


@_check.register
def _(step: CopyPart, program: Program) -> None:
    for buffer, first in ((step.x, step.first), (step.out, step.out_first)):
        _check_part(buffer, first, step.size)
    if step.x.dtype != step.out.dtype:
        raise ValueError(f"{step.x.dtype} where rows are {step.out.dtype}")


@_check.register
def _(step: Mul, program: Program) -> None:
    _check_part(step.y, step.first, step.x.width)
    if step.x.dtype != step.y.dtype:
        raise ValueError(f"{step.x.dtype} and {step.y.dtype} in one product")


@_check.register
def _(step: ScaleByPosition, program: Program) -> None:
    factors = step.factors
    if factors.dtype != step.x.dtype or factors.dim() != 1 or not factors.is_contiguous():
        raise ValueError(
            f"factors {tuple(factors.shape)} of {factors.dtype} where rows are {step.x.dtype}"
        )
    if not 0 < step.size <= step.x.width or step.length < 1:
        raise ValueError(
            f"{step.size} elements of rows of {step.x.width}, scaled each {step.length} positions"
        )


@_check.register
def _(step: SigmoidAndMul, program: Program) -> None:
    if step.first < 0 or step.gates.width - step.first not in (1, step.x.width):
        raise ValueError(
            f"gates from {step.first} on in rows of {step.gates.width} for {step.x.width} elements"
        )


@_check.register
def _(step: TurnHeads, program: Program) -> None:
    for x in (step.x, step.out):
        size, rest = divmod(x.width, step.n_heads)
        if rest or size < step.cos.width or step.sin.width != step.cos.width:
            raise ValueError(
                f"{step.n_heads} heads in {x.width} elements, of which {step.cos.width} turn"
            )


@_check.register
def _(step: MultiplyHeads, program: Program) -> None:
    n_heads, n_out, n_in = step.weight.shape
    for x, n in ((step.x, n_in), (step.out, n_out)):
        if x.width % n_heads or x.width // n_heads < n:
            raise ValueError(f"matrices {step.weight.shape} of heads in {x.width} elements")
    if isinstance(step.weight, NativeHeads) and step.weight.packed.dtype != step.x.dtype:
        raise ValueError(f"a weight of {step.weight.packed.dtype} where layers are {step.x.dtype}")


@_check.register
def _(step: RunDeltaNet, program: Program) -> None:
    form = step.form
    width = form.n_channels + form.n_value_heads * (form.value_dim + 2)
    if step.projected.width != width:
        raise ValueError(f"{step.projected.width} elements for a form of {width}")
    shapes = {
        "conv": (form.kernel_size, form.n_channels),
        "decay_rate": (form.n_value_heads,),
        "step_bias": (form.n_value_heads,),
        "norm": (form.value_dim,),
    }
    for name, shape in shapes.items():
        _check_floats(getattr(form, name), shape, name)


@_check.register
def _(step: Attend, program: Program) -> None:
    if not 0 <= step.n_shared <= step.heads.head_dim:
        raise ValueError(f"values of {step.n_shared} elements in keys of {step.heads.head_dim}")
    if step.qkv.width < step.heads.n_heads * step.heads.head_dim:
        raise ValueError(f"{dataclasses.astuple(step.heads)} heads in {step.qkv.width} elements")
    if step.sinks is not None:
        _check_floats(step.sinks, (step.heads.n_heads,), "sinks")


@_check.register
def _(step: Route, program: Program) -> None:
    if not 0 < step.experts.width <= step.scores.width:
        raise ValueError(f"{step.experts.width} experts of {step.scores.width} are to be chosen")
    if step.scores.dtype not in ELEMENT:
        raise ValueError(f"scores of {step.scores.dtype}")
    _check_choice(step)


@_check.register
def _(step: RouteInGroups, program: Program) -> None:
    form, n_experts = step.form, step.logits.width
    size, rest = divmod(n_experts, form.n_groups)
    if rest or form.n_best > size or not 0 < form.n_chosen <= form.n_chosen_groups * size:
        raise ValueError(f"{n_experts} experts are to be chosen by {form}")
    if form.n_chosen_groups > form.n_groups or step.experts.width != form.n_chosen:
        raise ValueError(f"{step.experts.width} experts are to be chosen by {form}")
    if step.logits.dtype != torch.float32:
        raise ValueError(f"scores of {step.logits.dtype}")
    if form.bias is not None:
        _check_floats(form.bias, (n_experts,), "bias")
    _check_choice(step)


@_check.register
def _(step: RunExperts, program: Program) -> None:
    _check_choice(step)
    for other in program.steps:
        if not isinstance(other, Route | RouteInGroups) or other.experts != step.experts:
            continue
        scores = other.scores if isinstance(other, Route) else other.logits
        if scores.width > len(step.each):
            raise ValueError(f"{scores.width} scores for {len(step.each)} experts")
    for expert in step.each:
        _check_expert(expert, step)


def _check_choice(step: Route | RouteInGroups | RunExperts) -> None:
    """Raises ValueError if experts are not int64, if weights are not float32, or if the numbers of
    chosen experts and of weights per token differ."""
    experts, weights = step.experts, step.weights
    types = experts.dtype, weights.dtype
    if experts.width != weights.width or types != (torch.int64, torch.float32):
        raise ValueError(
            f"{experts.width} experts of {experts.dtype} with {weights.width} weights of "
            f"{weights.dtype}, where layers need as many of int64 and float32"
        )


def _check_expert(expert: Expert, step: RunExperts) -> None:
    gate_up = expert.gate_up
    size = step.inner.width
    if gate_up.weight.shape != (2 * size, step.x.width) or expert.down.shape != (
        step.x.width,
        size,
    ):
        raise ValueError(
            f"experts of {gate_up.weight.shape} and {expert.down.shape} where they need "
            f"{(2 * size, step.x.width)} and {(step.x.width, size)}"
        )
    _check_gates(gate_up)
    _check_product(gate_up.weight, step.x.dtype)
    _check_product(expert.down, step.x.dtype)
    _check_bias(gate_up.bias, 2 * size, step.x.dtype)
    _check_bias(expert.down_bias, step.x.width, step.x.dtype)


def _check_gates(gate_up: Gated) -> None:
    """Raises ValueError unless the gate is applied exactly once: by the product with the matrix, or
    by an operation after the product."""
    is_gated = isinstance(gate_up.weight, NativeGated)
    if is_gated == (gate_up.form is not None):
        raise ValueError("a matrix that gates twice, or never")


def _check_rows(table: Tensor, out: Buffer) -> None:
    """Raises ValueError if `table` is not dense, or if its rows have another size or element type
    than the rows of the buffer `out`."""
    if table.dtype != out.dtype or table.shape[1:] != (out.width,) or not table.is_contiguous():
        raise ValueError(
            f"a table of rows {tuple(table.shape[1:])} of {table.dtype} where layers need "
            f"{(out.width,)} of {out.dtype}"
        )


def _check_part(buffer: Buffer, first: int, size: int) -> None:
    """Raises ValueError if a row of `buffer` does not contain all of the elements `first : first +
    size`."""
    if first < 0 or size < 1 or first + size > buffer.width:
        raise ValueError(f"{size} elements from {first} on in rows of {buffer.width}")


def _check_heads(heads: Heads, qkv: Buffer) -> None:
    if qkv.width != (heads.n_heads + 2 * heads.n_kv_heads) * heads.head_dim:
        raise ValueError(f"{dataclasses.astuple(heads)} heads in {qkv.width} elements")


def _check_product(weight: object, dtype: torch.dtype) -> None:
    if not isinstance(weight, NativeWeight | NativeGatedWeight):
        return  # a quantised matrix, which multiplies tokens of every type
    if weight.packed.dtype != dtype:
        raise ValueError(f"a weight of {weight.packed.dtype} where layers are {dtype}")


def _check_bias(bias: Tensor | None, n_out: int, dtype: torch.dtype) -> None:
    if bias is None:
        return
    if bias.dtype != dtype or bias.shape != (n_out,) or not bias.is_contiguous():
        raise ValueError(
            f"a bias {tuple(bias.shape)} of {bias.dtype} where layers need {n_out} of {dtype}"
        )


def _check_floats(x: Tensor, shape: tuple[int, ...], what: str) -> None:
    if x.dtype != torch.float32 or x.shape != shape or not x.is_contiguous():
        raise ValueError(
            f"{what} {tuple(x.shape)} of {x.dtype} where layers need {shape} of float32"
        )


def _check_norm(norm: Tensor, size: int) -> None:
    if norm.shape != (size,) or norm.dtype not in ELEMENT or not norm.is_contiguous():
        raise ValueError(
            f"a norm {tuple(norm.shape)} of {norm.dtype} with strides {norm.stride()} where layers "
            f"need {size} elements"
        )


def _check_same(one: Tensor, other: Tensor) -> None:
    if one.dtype != other.dtype:
        raise ValueError(f"a norm of {one.dtype} and {other.dtype}")
