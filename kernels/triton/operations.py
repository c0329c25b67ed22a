"""The operations that are Triton kernels as `Ops`; PyTorch has what is none."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from kernels.ops import Ops
from kernels.pytorch.operations import TORCH


@cache
def triton_ops() -> Ops | None:
    """Returns the operations that are Triton kernels; None where Triton is not installed."""
    if find_spec("triton") is None:
        return None
    # Not above: without Triton there is nothing to import, and loading it for nothing takes a rank
    # on a CPU 0.3 s.
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

    # A product may be added before it is rounded. Unsaid, Triton 3.9 warns of another default.
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
