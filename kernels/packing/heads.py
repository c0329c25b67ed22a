"""Packs the matrices of heads in the form that is fastest on their device.

`pack_heads` picks the form by device and element type. On a CPU the native library computes the
products, if it is built. The result of a token then does not depend on the number of other tokens
in the batch (`docs/determinism.md`). Otherwise PyTorch's batched matrix product is used, with a
batch entry for each head.
"""

from __future__ import annotations

from torch import Tensor

from kernels.native.heads import NativeHeads, can_pack_heads
from kernels.pytorch.heads import PlainHeads
from kernels.weights.head_products import HeadProducts


def pack_heads(weight: Tensor) -> HeadProducts:
    """Returns `weight` [n_heads, n_out, n_in] in the form that is fastest on its device."""
    return NativeHeads.of(weight) if can_pack_heads(weight) else PlainHeads(weight)
