"""From the fused projection to turned queries, and keys and values in their slots."""

from torch import Tensor

from kernels.rotary import rotary
from kernels.write_kv import write_kv


def rotary_write_kv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    n_heads: int,
) -> Tensor:
    """Turns queries and keys, stores keys and values; returns q [n_tokens, n_heads, head_dim].

    `qkv` [n_tokens, (n_heads + 2 * n_kv_heads) * head_dim] holds a token's queries, keys and values
    one after the other, and is used up: the queries may be a part of it. The other arguments are as
    in `kernels.rotary` and `kernels.write_kv`.
    """
    n_kv_heads, head_dim = key_cache.shape[2:]
    heads = qkv.view(len(qkv), -1, head_dim)
    # Queries and keys turn by the same angles, so they turn together.
    turned = rotary(heads[:, :-n_kv_heads], cos, sin)
    write_kv(turned[:, n_heads:], heads[:, -n_kv_heads:], key_cache, value_cache, slots)
    return turned[:, :n_heads]
