"""Matrices of heads, in the form that is fastest where they lie.

`pack_heads` picks it by device and element type. On a CPU the native library computes products;
its sums of a token do not depend on how many others there are (`docs/determinism.md`). Elsewhere
they are PyTorch's product of batches, a head for each of them.
"""

from __future__ import annotations

from torch import Tensor

from kernels.native.heads import NativeHeads, can_pack_heads
from kernels.pytorch.heads import PlainHeads
from kernels.weights.head_products import HeadProducts


def pack_heads(weight: Tensor) -> HeadProducts:
    """Returns `weight` [n_heads, n_out, n_in] in the form that is fastest where it lies."""
    return NativeHeads.of(weight) if can_pack_heads(weight) else PlainHeads(weight)
