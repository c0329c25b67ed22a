"""The tensor operations of a stage, one per file, picked by device.

`ops_for(device)` is the public face. Every operation has an obvious version in `kernels.reference`
that says what it computes; the files beside it hold the versions that run. Today the PyTorch ones
serve every device. A Triton kernel comes as its own file (`triton_rms_norm.py`, ...) and takes its
place in a second `Ops` below, under "cuda"; nothing outside this package changes.

Knows tensors only: no requests, no models, no processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention import attention
from kernels.attention_metadata import AttentionForm, AttentionMetadata, plan_attention
from kernels.expert_mlp import expert_mlp
from kernels.gelu_and_mul import gelu_and_mul
from kernels.layer_norm import layer_norm
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from kernels.silu_and_mul import silu_and_mul
from kernels.upload import upload
from kernels.write_kv import write_kv

__all__ = ["AttentionForm", "AttentionMetadata", "Ops", "ops_for", "upload"]


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation of every operation, for one kind of device; arguments as in its file."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor]
    silu_and_mul: Callable[[Tensor], Tensor]
    gelu_and_mul: Callable[[Tensor], Tensor]
    expert_mlp: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    plan_attention: Callable[..., AttentionMetadata]
    attention: Callable[..., Tensor]


_TORCH = Ops(
    rms_norm=rms_norm,
    layer_norm=layer_norm,
    rotary=rotary,
    silu_and_mul=silu_and_mul,
    gelu_and_mul=gelu_and_mul,
    expert_mlp=expert_mlp,
    write_kv=write_kv,
    plan_attention=plan_attention,
    attention=attention,
)

_BY_DEVICE = {"cpu": _TORCH, "cuda": _TORCH}


def ops_for(device: torch.device) -> Ops:
    """The operations for `device`; a kind of device that nobody has tried is refused."""
    if device.type not in _BY_DEVICE:
        raise ValueError(f"no kernels for device type {device.type!r}; have {sorted(_BY_DEVICE)}")
    return _BY_DEVICE[device.type]
