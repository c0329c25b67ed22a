"""Puts the keys and values of new tokens into their slots of the paged K/V storage."""

from torch import Tensor


def write_kv(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Stores `k` and `v` [n_tokens, n_kv_heads, head_dim] at `slots` [n_tokens], in place.

    The caches are [n_blocks, block_size, n_kv_heads, head_dim] and contiguous; slot s is place
    s % block_size of block s // block_size. No two tokens share a slot.
    """
    key_cache.flatten(0, 1).index_copy_(0, slots, k)
    value_cache.flatten(0, 1).index_copy_(0, slots, v)
