"""Attention of a mixed batch over paged keys and values, in a few padded calls.

The one operation that is not token by token (selective batching, OSDI'22 §3.2): the flat batch is
split into the groups that `AttentionMetadata` has prepared, each group is one scaled dot-product
attention, and the results are merged into the flat batch again. The keys and values of the batch
must have been written to storage before.

Grouped-query attention of decodes lays the query heads that share a K/V head side by side as if
they were queries of one sequence: up to ten times faster in bfloat16 than a head at a time.
Storage beyond a sequence's end is read and weighted with zero, so it must hold finite numbers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention_metadata import AttentionMetadata, Chunks, Decodes, Prompts


def attention(
    q: Tensor, k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionMetadata
) -> Tensor:
    """Attends from `q` [n_tokens, n_heads, head_dim]; returns the same shape.

    `k`, `v` [n_tokens, n_kv_heads, head_dim] are the batch's own keys and values, the caches
    [n_blocks, block_size, n_kv_heads, head_dim] one layer's storage. Scores are divided by
    sqrt(head_dim).
    """
    out = torch.empty_like(q)  # [n_tokens, n_heads, head_dim]
    for decodes in plan.decodes:
        if decodes.tokens is None:
            return _decodes(q, key_cache, value_cache, decodes)
        attended = _decodes(q.index_select(0, decodes.tokens), key_cache, value_cache, decodes)
        out.index_copy_(0, decodes.tokens, attended)
    for prompts in plan.prompts:
        _merge(out, prompts, _prompts(q, k, v, prompts))
    for chunks in plan.chunks:
        _merge(out, chunks, _chunks(q, key_cache, value_cache, chunks))
    return out


def _decodes(q: Tensor, key_cache: Tensor, value_cache: Tensor, group: Decodes) -> Tensor:
    n_spans, n_heads, head_dim = q.shape
    n_kv_heads = key_cache.shape[2]
    keys = _gather(key_cache, group.blocks, n_spans, group.n_keys)
    values = _gather(value_cache, group.blocks, n_spans, group.n_keys)
    q = q.view(n_spans, n_kv_heads, n_heads // n_kv_heads, head_dim)
    attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=group.mask)
    return attended.reshape(n_spans, n_heads, head_dim)


def _prompts(q: Tensor, k: Tensor, v: Tensor, group: Prompts) -> Tensor:
    # Right padding needs no mask: what lies after the causal line are only other paddings' keys.
    return F.scaled_dot_product_attention(
        _spans(q, group.tokens),
        _spans(k, group.tokens),
        _spans(v, group.tokens),
        is_causal=True,
        enable_gqa=True,
    )  # [n_spans, n_heads, n_queries, head_dim]


def _chunks(q: Tensor, key_cache: Tensor, value_cache: Tensor, group: Chunks) -> Tensor:
    n_spans = group.tokens.shape[0]
    return F.scaled_dot_product_attention(
        _spans(q, group.tokens),
        _gather(key_cache, group.blocks, n_spans, group.n_keys),
        _gather(value_cache, group.blocks, n_spans, group.n_keys),
        attn_mask=group.mask,
        enable_gqa=True,
    )  # [n_spans, n_heads, n_queries, head_dim]


def _spans(x: Tensor, tokens: Tensor) -> Tensor:
    """Rows `tokens` [n_spans, n_queries] of x as [n_spans, n_heads, n_queries, head_dim]."""
    rows = x.index_select(0, tokens.view(-1))
    return rows.view(*tokens.shape, *x.shape[1:]).transpose(1, 2)


def _gather(cache: Tensor, blocks: Tensor, n_spans: int, n_keys: int) -> Tensor:
    """The stored sequences of a group as [n_spans, n_kv_heads, n_keys, head_dim]."""
    gathered = cache.index_select(0, blocks)  # [n_spans * blocks, block_size, n_kv_heads, head_dim]
    return gathered.view(n_spans, -1, *cache.shape[2:])[:, :n_keys].transpose(1, 2)


def _merge(out: Tensor, group: Prompts | Chunks, attended: Tensor) -> None:
    flat = attended.transpose(1, 2).flatten(0, 1)  # [n_spans * n_queries, n_heads, head_dim]
    out.index_copy_(0, group.places, flat.index_select(0, group.kept))
