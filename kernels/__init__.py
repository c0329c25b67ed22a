"""The tensor operations of a stage, one per file, picked by device.

`ops_for(device)` is the public face, and `kernels.packed_linear.pack` the same for matrices. Every
operation has an obvious version in `kernels.reference` that says what it computes; the files beside
it hold the versions that run. PyTorch's serve every device. On a CPU the native ones
(`kernels.native`) take their place where they are built, on a GPU Triton's (`kernels.triton`) where
it is installed; both are the package's own business. A kernel for another device comes as another
`Ops`, and another form of matrices where it has one. Nothing outside this package changes.

Knows tensors only: no requests, no models, no processes.
"""

from __future__ import annotations

import torch

from kernels.add_scaled import add_scaled
from kernels.attention import attention, plan_attention
from kernels.attention_form import AttentionForm
from kernels.clamp_and_mul import clamp_and_mul
from kernels.delta_net import delta_net
from kernels.delta_net_form import DeltaNetForm
from kernels.embedding import embedding
from kernels.expert_mlp import expert_mlp
from kernels.gelu import gelu
from kernels.gelu_and_mul import gelu_and_mul
from kernels.gelu_tanh import gelu_tanh
from kernels.greedy import greedy
from kernels.head_norms import HeadNorms
from kernels.interpreter import Interpreter
from kernels.layer_norm import layer_norm
from kernels.native.operations import native_ops
from kernels.ops import AttentionPlan, Ops
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from kernels.rotary_write_kv import rotary_write_kv
from kernels.route import route
from kernels.route_in_groups import route_in_groups
from kernels.sample import sample
from kernels.sigmoid_and_mul import sigmoid_and_mul
from kernels.silu_and_mul import silu_and_mul
from kernels.soft_cap import soft_cap
from kernels.state_spans import StateSpans
from kernels.triton.operations import triton_ops
from kernels.write_kv import write_kv

__all__ = [
    "TORCH",
    "AttentionForm",
    "AttentionPlan",
    "DeltaNetForm",
    "HeadNorms",
    "Ops",
    "StateSpans",
    "native_ops",
    "ops_for",
    "triton_ops",
]

TORCH = Ops(
    embedding=embedding,
    rms_norm=rms_norm,
    layer_norm=layer_norm,
    rotary=rotary,
    silu_and_mul=silu_and_mul,
    gelu=gelu,
    gelu_tanh=gelu_tanh,
    gelu_and_mul=gelu_and_mul,
    clamp_and_mul=clamp_and_mul,
    sigmoid_and_mul=sigmoid_and_mul,
    add_scaled=add_scaled,
    soft_cap=soft_cap,
    route=route,
    route_in_groups=route_in_groups,
    expert_mlp=expert_mlp,
    write_kv=write_kv,
    rotary_write_kv=rotary_write_kv,
    plan_attention=plan_attention,
    attention=attention,
    delta_net=delta_net,
    greedy=greedy,
    sample=sample,
    run_program=Interpreter,
)


def ops_for(device: torch.device) -> Ops:
    """Returns the fastest operations for `device`; raises ValueError for another kind than cpu and
    cuda."""
    if device.type == "cpu":
        return native_ops() or TORCH
    if device.type == "cuda":
        return triton_ops() or TORCH
    raise ValueError(f"no kernels for device type {device.type!r}; have cpu and cuda")
