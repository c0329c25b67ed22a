"""From the fused projection to turned queries, and keys and values in their slots."""

import torch
from torch import Tensor

from kernels.forms.head_norms import HeadNorms
from kernels.pytorch.rms_norm import rms_norm
from kernels.pytorch.rotary import rotary
from kernels.pytorch.write_kv import write_kv


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
    """Turns queries and keys, stores keys and values; returns q [n_tokens, n_heads, head_dim].

    `qkv` [n_tokens, (n_heads + 2 * n_kv_heads) * head_dim] holds a token's queries, keys and values
    one after the other, and is used up: the queries may be a part of it. With `norms`, each head of
    queries and keys is normalised before it turns, and may be rounded in between. The other
    arguments are as in `Ops.rotary` and `Ops.write_kv`.
    """
    n_kv_heads, head_dim = key_cache.shape[2:]
    heads = qkv.view(len(qkv), -1, head_dim)
    # Queries and keys turn by the same angles, so they turn together.
    q_and_k = heads[:, :-n_kv_heads]
    if norms is not None:
        q, k = q_and_k[:, :n_heads], q_and_k[:, n_heads:]
        normal = rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps)
        q_and_k = torch.cat(normal, 1)
    turned = rotary(q_and_k, cos, sin)
    write_kv(turned[:, n_heads:], heads[:, -n_kv_heads:], key_cache, value_cache, slots)
    return turned[:, :n_heads]
