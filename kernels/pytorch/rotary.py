"""Rotary position embedding (Su et al., 2021), and storing of keys and values.

Element i of a head is paired with element i + head_dim / 2, as in Hugging Face checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.forms.head_norms import HeadNorms
from kernels.pytorch.norms import rms_norm


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns `x` [n_tokens, n_heads, head_dim] with each head rotated by the angles of its token's
    position.

    `cos` and `sin` are [n_tokens, 1, head_dim]. Their second half repeats the angles of the first
    half, and the first half of `sin` is negated. The rotation of every element is then
    `x * cos + swapped(x) * sin`, where `swapped` exchanges the two halves of a head.
    """
    swapped = x.roll(x.shape[-1] // 2, -1)  # [n_tokens, n_heads, head_dim]
    return torch.addcmul(x * cos, swapped, sin)  # [n_tokens, n_heads, head_dim]


def write_kv(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Stores `k` and `v` [n_tokens, n_kv_heads, head_dim] at `slots` [n_tokens], in place.

    The caches are [n_blocks, block_size, n_kv_heads, head_dim] and contiguous. Slot s is entry s %
    block_size of block s // block_size. Every token must have a slot of its own.
    """
    key_cache.flatten(0, 1).index_copy_(0, slots, k)
    value_cache.flatten(0, 1).index_copy_(0, slots, v)


def rotary_write_kv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    n_heads: int,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Rotates queries and keys, stores keys and values, and returns the queries [n_tokens, n_heads,
    head_dim].

    `qkv` [n_tokens, (n_heads + 2 * n_kv_heads) * head_dim] holds the queries, keys and values of
    each token in this order. `qkv` may be overwritten, and the result may be a view of `qkv`. With
    `norms`, each head of queries and keys is normalised before the rotation, and may be rounded in
    between. The other arguments are as in `Ops.rotary` and `Ops.write_kv`.
    """
    n_kv_heads, head_dim = key_cache.shape[2:]
    heads = qkv.view(len(qkv), -1, head_dim)
    # Queries and keys have equal angles, so that one call rotates both.
    q_and_k = heads[:, :-n_kv_heads]
    if norms is not None:
        q, k = q_and_k[:, :n_heads], q_and_k[:, n_heads:]
        normal = rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps)
        q_and_k = torch.cat(normal, 1)
    turned = rotary(q_and_k, cos, sin)
    write_kv(turned[:, n_heads:], heads[:, -n_kv_heads:], key_cache, value_cache, slots)
    return turned[:, :n_heads]
