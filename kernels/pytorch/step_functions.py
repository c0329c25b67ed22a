"""Computes one step of a program with any operations (`Ops`): a function for each kind of step.

A step that is described as in place either overwrites the rows of its buffer, or replaces the
buffer's tensor in the frame by a new one. Memory that two buffers share is never overwritten while
both are in use.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from kernels.ops import Ops
from kernels.pytorch.expert_mlp import mix_experts
from kernels.pytorch.frame import Frame, in_heads
from kernels.pytorch.row_parts import JoinParts, WritePart, join_parts, write_part
from kernels.steps import (
    ACTIVATIONS,
    GATES,
    Activate,
    Add,
    AddLowRank,
    AddPositions,
    AllGather,
    AllReduce,
    ApplyGate,
    Attend,
    Call,
    Embed,
    EmbedPacked,
    EmbedShare,
    GateForm,
    LayerNorm,
    LookUpAngles,
    Mul,
    Multiply,
    RMSNorm,
    RotaryWriteKV,
    Route,
    RouteInGroups,
    RunDeltaNet,
    RunExperts,
    RunStackedExperts,
    Scale,
    ScaleByPosition,
    Select,
    SigmoidAndMul,
    SoftCap,
    Widen,
    WriteKV,
    WriteLatents,
)
from kernels.weights.linear import Clamp, PlainWeight

Run = Callable[[Any, Frame], None]
"""A function that computes one step. It reads and writes the rows of buffers in the frame of the
run."""


def function_of(step: object) -> Run:
    """Returns the function that computes `step`. Raises TypeError if there is no such function."""
    function = run_step.dispatch(type(step))
    if function is run_step.dispatch(object):
        raise TypeError(f"a program has a step that cannot be run: {type(step).__name__}")
    return function


@singledispatch
def run_step(step: Any, at: Frame) -> None:
    """Computes a step. `at` is the frame of the run, which has the rows of all buffers and receives
    the results."""
    raise TypeError(f"a program has a step that cannot be run: {type(step).__name__}")


@run_step.register
def _(step: Embed, at: Frame) -> None:
    at.rows[step.out.index] = step.table.index_select(0, at.inputs)


@run_step.register
def _(step: EmbedPacked, at: Frame) -> None:
    at.rows[step.out.index] = step.table.rows(at.inputs)


@run_step.register
def _(step: EmbedShare, at: Frame) -> None:
    ids = at.inputs
    if step.is_open:
        ids = ids.masked_fill(ids >= step.vocab_size, 0)
    at.rows[step.out.index] = _own_rows(step, ids, at.ops)


def _own_rows(step: EmbedShare, ids: Tensor, ops: Ops) -> Tensor:
    """Looks up the rows of the tokens `ids` [n_tokens] in this rank's share of the table. Tokens
    whose rows are on other ranks get zeros."""
    if len(step.share) == step.vocab_size:
        return step.table.rows(ids)
    first = step.share.start
    if isinstance(step.table, PlainWeight):
        return ops.embedding(step.table.weight, ids, first)
    places = ids - first
    is_elsewhere = (places < 0) | (places >= len(step.share))
    rows = step.table.rows(places.masked_fill(is_elsewhere, 0))
    return rows.masked_fill_(is_elsewhere[:, None], 0)


@run_step.register
def _(step: AddPositions, at: Frame) -> None:
    at.rows[step.x.index].add_(F.embedding(at.positions, step.table))


@run_step.register
def _(step: LookUpAngles, at: Frame) -> None:
    cos, sin = at.program.rotaries[step.rotary](at.positions)
    at.rows[step.cos.index], at.rows[step.sin.index] = cos, sin  # [n_tokens, 1, head_dim]


@run_step.register
def _(step: Select, at: Frame) -> None:
    hidden = at.rows[step.x.index]
    is_all = len(at.sampled) == len(hidden)
    at.rows[step.out.index] = hidden if is_all else hidden.index_select(0, at.sampled)


@run_step.register
def _(step: WritePart, at: Frame) -> None:
    write_part(step, at)


@run_step.register
def _(step: JoinParts, at: Frame) -> None:
    join_parts(step, at)


@run_step.register
def _(step: RMSNorm, at: Frame) -> None:
    at.rows[step.out.index] = at.ops.rms_norm(at.rows[step.x.index], step.weight, step.eps)


@run_step.register
def _(step: LayerNorm, at: Frame) -> None:
    x = at.rows[step.x.index]
    at.rows[step.out.index] = at.ops.layer_norm(x, step.weight, step.bias, step.eps)


@run_step.register
def _(step: Multiply, at: Frame) -> None:
    x, bias = at.rows[step.x.index], step.bias
    weight: Any = step.weight  # accepts a bias and a residual if the step has them
    if step.residual is not None:
        product = weight(x, bias, at.rows[step.residual.index])
    elif bias is not None:
        product = weight(x, bias)
    else:
        product = weight(x)
    at.rows[step.out.index] = product


@run_step.register
def _(step: AddLowRank, at: Frame) -> None:
    if at.adapters is None:
        return
    groups = at.adapters.sampled if step.out.is_of_sampled else at.adapters.tokens
    x, out = at.rows[step.x.index], at.rows[step.out.index]
    for one in step.each:
        rows = groups.of(one.adapter, x.device)
        if len(rows):
            part = out[:, one.first : one.first + one.up.shape[0]]
            inner = one.down(x.index_select(0, rows))
            part.index_copy_(0, rows, one.up(inner, None, part.index_select(0, rows)))


@run_step.register
def _(step: Activate, at: Frame) -> None:
    functions = {"relu": F.relu, "gelu": at.ops.gelu, "gelu_tanh": at.ops.gelu_tanh}
    function = functions[ACTIVATIONS[step.function]]
    at.rows[step.x.index] = function(at.rows[step.x.index])


@run_step.register
def _(step: ApplyGate, at: Frame) -> None:
    at.rows[step.out.index] = _gate(step.form, at.ops)(at.rows[step.x.index])


def _gate(form: GateForm, ops: Ops) -> Callable[[Tensor], Tensor]:
    """Returns the operation that applies a gate to rows. Each row holds the gate, followed by the
    elements to which the gate is applied."""
    name = GATES[form.function]
    if name == "clamp":
        clamp = Clamp(form.slope, form.limit)
        return lambda x: ops.clamp_and_mul(x, clamp)
    return ops.silu_and_mul if name == "silu" else ops.gelu_and_mul


@run_step.register
def _(step: RotaryWriteKV, at: Frame) -> None:
    keys, values = at.kv[step.layer]
    turned = at.ops.rotary_write_kv(
        at.rows[step.qkv.index],
        at.rows[step.cos.index],
        at.rows[step.sin.index],
        keys,
        values,
        at.group(step.layer).slots,
        step.heads.n_heads,
        step.norms,
    )
    at.rows[step.qkv.index] = turned.flatten(1)  # the queries; keys and values are dropped


@run_step.register
def _(step: WriteKV, at: Frame) -> None:
    n_heads, n_kv_heads = step.heads.n_heads, step.heads.n_kv_heads
    qkv = at.rows[step.qkv.index]
    heads = in_heads(qkv, qkv.shape[1] // step.heads.head_dim)
    k, v = heads[:, n_heads : n_heads + n_kv_heads], heads[:, -n_kv_heads:]
    at.ops.write_kv(k, v, *at.kv[step.layer], at.group(step.layer).slots)


@run_step.register
def _(step: Attend, at: Frame) -> None:
    n_heads, head_dim = step.heads.n_heads, step.heads.head_dim
    q = in_heads(at.rows[step.qkv.index][:, : n_heads * head_dim], n_heads)
    keys, values = at.kv[step.layer]
    if step.n_shared:
        values = keys[..., : step.n_shared]
    plan = at.group(step.layer).attention
    attended = at.ops.attention(q, keys, values, plan, step.form, step.sinks)
    at.rows[step.out.index] = attended.flatten(1)


@run_step.register
def _(step: WriteLatents, at: Frame) -> None:
    keys, _ = at.kv[step.layer]
    keys.flatten(0, 1).index_copy_(0, at.group(step.layer).slots, at.rows[step.x.index][:, None])


@run_step.register
def _(step: RunDeltaNet, at: Frame) -> None:
    if at.states is None:
        raise ValueError("the batch does not say where the states of its requests are")
    projected = at.rows[step.projected.index]
    mixed = at.ops.delta_net(projected, *at.kv[step.layer], at.states, step.form)
    at.rows[step.out.index] = mixed


@run_step.register
def _(step: Add, at: Frame) -> None:
    x, y = at.rows[step.x.index], at.rows[step.y.index]
    at.rows[step.x.index] = at.ops.add_scaled(x, y, step.factor)


@run_step.register
def _(step: Scale, at: Frame) -> None:
    at.rows[step.x.index].mul_(step.factor)


@run_step.register
def _(step: ScaleByPosition, at: Frame) -> None:
    factors = step.factors  # [n_factors]
    if len(factors) > 1:
        factors = factors[at.positions // step.length][:, None]  # [n_tokens, 1]
    rows = at.rows[step.x.index]
    if rows.shape[1] == step.size:
        # The rows must be dense: PyTorch's attention may round differently for strided queries.
        at.rows[step.x.index] = rows * factors
    else:
        rows[:, : step.size].mul_(factors)


@run_step.register
def _(step: Widen, at: Frame) -> None:
    at.rows[step.out.index] = at.rows[step.x.index].float()


@run_step.register
def _(step: SoftCap, at: Frame) -> None:
    at.rows[step.out.index] = at.ops.soft_cap(at.rows[step.x.index], step.cap)


@run_step.register
def _(step: Route, at: Frame) -> None:
    scores, n_chosen = at.rows[step.scores.index], step.experts.width
    weights, experts = at.ops.route(scores, n_chosen, bool(step.normalises))
    at.rows[step.weights.index], at.rows[step.experts.index] = weights, experts


@run_step.register
def _(step: RouteInGroups, at: Frame) -> None:
    weights, experts = at.ops.route_in_groups(at.rows[step.logits.index], step.form)
    at.rows[step.weights.index], at.rows[step.experts.index] = weights, experts


@run_step.register
def _(step: RunExperts, at: Frame) -> None:
    def mlp(index: int, x: Tensor) -> Tensor:
        expert = step.each[index]
        first, down = expert.gate_up, expert.down
        weight: Any = first.weight  # accepts a bias if the expert has one
        both = weight(x) if first.bias is None else weight(x, first.bias)
        inner = both if first.form is None else _gate(first.form, at.ops)(both)
        return down(inner) if expert.down_bias is None else down(inner, expert.down_bias)

    x, experts, weights = (at.rows[each.index] for each in (step.x, step.experts, step.weights))
    mixed = mix_experts(x, experts, weights, n_experts=len(step.each), mlp=mlp)
    at.rows[step.out.index] = mixed


@run_step.register
def _(step: RunStackedExperts, at: Frame) -> None:
    x, experts, weights = (at.rows[each.index] for each in (step.x, step.experts, step.weights))
    gate_up, down, form = step.stacked.gate_up, step.stacked.down, step.stacked.form
    at.rows[step.out.index] = at.ops.expert_mlp(x, gate_up, down, experts, weights, form)


@run_step.register
def _(step: Mul, at: Frame) -> None:
    x, y = at.rows[step.x.index], at.rows[step.y.index]
    x.mul_(y[:, step.first : step.first + step.x.width])


@run_step.register
def _(step: SigmoidAndMul, at: Frame) -> None:
    gates, x = at.rows[step.gates.index][:, step.first :], at.rows[step.x.index]
    at.rows[step.x.index] = at.ops.sigmoid_and_mul(gates, x)


@run_step.register
def _(step: AllReduce, at: Frame) -> None:
    at.ranks.all_reduce(at.rows[step.x.index])


@run_step.register
def _(step: AllGather, at: Frame) -> None:
    x = at.rows[step.x.index]
    if x.shape[1] < step.size:
        x = F.pad(x, (0, step.size - x.shape[1]))
    at.rows[step.out.index] = at.ranks.all_gather(x)[:, : step.out.width]


@run_step.register
def _(step: Call, at: Frame) -> None:
    computed = step.function(*(at.rows[each.index] for each in step.inputs))
    if isinstance(computed, Tensor):
        computed = (computed,)
    for out, rows in zip(step.outputs, computed, strict=True):
        at.rows[out.index] = rows
