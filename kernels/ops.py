"""What an implementation of the operations offers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from kernels.attention_metadata import AttentionGroups
from kernels.native.attention import AttentionSpans
from kernels.native.layers import NativeLayers
from kernels.native.stage import NativeStage
from kernels.sampling_columns import SamplingColumns

if TYPE_CHECKING:  # Triton need not be installed
    from kernels.triton.attention_plan import AttentionItems

# What `plan_attention` makes of a batch; only the `attention` of the same operations reads it.
AttentionMetadata: TypeAlias = "AttentionGroups | AttentionSpans | AttentionItems"


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation of every operation, for one kind of device.

    Arguments are as in the file of each operation's name.
    """

    embedding: Callable[[Tensor, Tensor, int], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor]
    silu_and_mul: Callable[[Tensor], Tensor]
    gelu_and_mul: Callable[[Tensor], Tensor]
    expert_mlp: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    rotary_write_kv: Callable[..., Tensor]
    plan_attention: Callable[..., AttentionMetadata]
    attention: Callable[..., Tensor]
    greedy: Callable[[Tensor], Tensor]
    sample: Callable[[Tensor, SamplingColumns], Tensor]
    layers: Callable[[NativeStage, torch.dtype], NativeLayers] | None = None
    """Several layers in one call, where there is such a thing."""
