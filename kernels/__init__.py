"""The tensor operations of a stage, one per file, picked by device.

`ops_for(device)` is the public face, and `kernels.packing.linear.pack` the same for matrices. Every
operation has an obvious version in `kernels.reference.operations` that says what it computes; the files beside
it hold the versions that run. PyTorch's serve every device. On a CPU the native ones
(`kernels.native`) take their place where they are built, on a GPU Triton's (`kernels.triton`) where
it is installed; both are the package's own business. A kernel for another device comes as another
`Ops`, and another form of matrices where it has one. Nothing outside this package changes.

Knows tensors only: no requests, no models, no processes.
"""

from __future__ import annotations

import torch

from kernels.forms.attention import AttentionForm
from kernels.forms.delta_net import DeltaNetForm
from kernels.forms.head_norms import HeadNorms
from kernels.forms.state_spans import StateSpans
from kernels.native.operations import native_ops
from kernels.ops import AttentionPlan, Ops
from kernels.pytorch.add_scaled import add_scaled
from kernels.pytorch.attention import attention, plan_attention
from kernels.pytorch.clamp_and_mul import clamp_and_mul
from kernels.pytorch.delta_net import delta_net
from kernels.pytorch.embedding import embedding
from kernels.pytorch.expert_mlp import expert_mlp
from kernels.pytorch.gelu import gelu
from kernels.pytorch.gelu_and_mul import gelu_and_mul
from kernels.pytorch.gelu_tanh import gelu_tanh
from kernels.pytorch.greedy import greedy
from kernels.pytorch.interpreter import Interpreter
from kernels.pytorch.layer_norm import layer_norm
from kernels.pytorch.rms_norm import rms_norm
from kernels.pytorch.rotary import rotary
from kernels.pytorch.rotary_write_kv import rotary_write_kv
from kernels.pytorch.route import route
from kernels.pytorch.route_in_groups import route_in_groups
from kernels.pytorch.sample import sample
from kernels.pytorch.sigmoid_and_mul import sigmoid_and_mul
from kernels.pytorch.silu_and_mul import silu_and_mul
from kernels.pytorch.soft_cap import soft_cap
from kernels.pytorch.write_kv import write_kv
from kernels.triton.operations import triton_ops

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
