"""The Triton kernels as `Ops`, with PyTorch for operations that have no Triton kernel."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from kernels.ops import Ops
from kernels.pytorch.operations import TORCH


@cache
def triton_ops() -> Ops | None:
    """Returns the operations for CUDA devices, or None if Triton is not installed."""
    if find_spec("triton") is None:
        return None
    # Imported here because Triton may be absent, and because loading it costs a rank on a CPU
    # 0.3 s.
    from triton import knobs

    from kernels.triton import (
        attention,
        attention_plan,
        delta_net,
        embedding,
        expert_mlp,
        gates,
        greedy,
        norms,
        rotary,
        sample,
    )

    # Allows fused multiply-add. Without this setting, Triton 3.9 warns that its default changes.
    knobs.language.default_fp_fusion = True
    return Ops.of(
        attention,
        attention_plan,
        delta_net,
        embedding,
        expert_mlp,
        gates,
        greedy,
        norms,
        rotary,
        sample,
        has_fixed_shapes=True,
        otherwise=TORCH,
    )
