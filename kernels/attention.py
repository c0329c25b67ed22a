"""Attention of a mixed batch over paged keys and values, in a few padded calls.

The one operation that is not token by token (selective batching, OSDI'22 §3.2): the flat batch is
split into the groups that `AttentionGroups` has prepared, each group is one scaled dot-product
attention, and the results are merged into the flat batch again. The keys and values of the batch
must have been written to storage before.

Grouped-query attention of decodes lays the query heads that share a K/V head side by side as if
they were queries of one sequence: up to ten times faster in bfloat16 than a head at a time.
Storage beyond a sequence's end is read and weighted with zero, so it must hold finite numbers.

Soft-capped scores are computed step by step; everything else is one fused call.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention_metadata import (
    AttentionForm,
    AttentionGroups,
    Chunks,
    Decodes,
    Prompts,
)

_PLAIN = AttentionForm()

# Capped scores that are in memory at once; in float32 these are 16 MiB.
_MAX_SCORES = 1 << 22


def attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionGroups,
    form: AttentionForm = _PLAIN,
) -> Tensor:
    """Attends from `q` [n_tokens, n_heads, head_dim]; returns the same shape.

    The caches [n_blocks, block_size, n_kv_heads, head_dim] are one layer's storage. The window of
    `form` must be among those that were planned.
    """
    plan = plan.of(form.window)
    out = torch.empty_like(q)  # [n_tokens, n_heads, head_dim]
    for decodes in plan.decodes:
        if decodes.tokens is None:
            return _decodes(q, key_cache, value_cache, decodes, form)
        queries = q.index_select(0, decodes.tokens)
        out.index_copy_(0, decodes.tokens, _decodes(queries, key_cache, value_cache, decodes, form))
    for prompts in plan.prompts:
        _merge(out, prompts, _prompts(q, key_cache, value_cache, prompts, form))
    for chunks in plan.chunks:
        _merge(out, chunks, _chunks(q, key_cache, value_cache, chunks, form))
    return out


def _decodes(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, group: Decodes, form: AttentionForm
) -> Tensor:
    n_spans, n_heads, head_dim = q.shape
    n_kv_heads = key_cache.shape[2]
    keys = _gather(key_cache, group.blocks, n_spans, group.n_keys)
    values = _gather(value_cache, group.blocks, n_spans, group.n_keys)
    q = q.view(n_spans, n_kv_heads, n_heads // n_kv_heads, head_dim)
    attended = _attend(q, keys, values, group.mask, form)
    return attended.reshape(n_spans, n_heads, head_dim)


def _prompts(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, group: Prompts, form: AttentionForm
) -> Tensor:
    n_spans = group.tokens.shape[0]
    # Right padding needs no mask: what lies after the causal line are only other paddings' keys.
    return _attend(
        _spans(q, group.tokens),
        _gather(key_cache, group.blocks, n_spans, group.n_keys),
        _gather(value_cache, group.blocks, n_spans, group.n_keys),
        group.mask,
        form,
        is_causal=group.mask is None,
    )  # [n_spans, n_heads, n_queries, head_dim]


def _chunks(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, group: Chunks, form: AttentionForm
) -> Tensor:
    n_spans = group.tokens.shape[0]
    return _attend(
        _spans(q, group.tokens),
        _gather(key_cache, group.blocks, n_spans, group.n_keys),
        _gather(value_cache, group.blocks, n_spans, group.n_keys),
        group.mask,
        form,
    )  # [n_spans, n_heads, n_queries, head_dim]


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    form: AttentionForm,
    *,
    is_causal: bool = False,
) -> Tensor:
    """Attention of padded sequences: q [n_spans, n_heads, n_queries, head_dim], or a decode's."""
    if form.soft_cap is not None:
        return _attend_capped(q, k, v, mask, form, soft_cap=form.soft_cap, is_causal=is_causal)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=is_causal,
        scale=form.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _attend_capped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    form: AttentionForm,
    *,
    soft_cap: float,
    is_causal: bool,
) -> Tensor:
    """The same with capped scores, some queries at a time."""
    n_spans, n_heads, n_queries, _ = q.shape
    n_keys = k.shape[2]
    scale = q.shape[-1] ** -0.5 if form.scale is None else form.scale
    if is_causal:
        is_future = torch.ones(n_queries, n_keys, dtype=torch.bool, device=q.device).triu_(1)
        mask = torch.zeros(1, 1, n_queries, n_keys, dtype=q.dtype, device=q.device)
        mask.masked_fill_(is_future, -torch.inf)
    size = max(1, _MAX_SCORES // (n_spans * n_heads * n_keys))
    attended = []
    for begin in range(0, n_queries, size):
        some = slice(begin, begin + size)
        # A decode's mask has one row, for all of its queries.
        some_mask = mask if mask is None or mask.shape[2] == 1 else mask[:, :, some]
        attended.append(_capped(q[:, :, some], k, v, some_mask, scale=scale, soft_cap=soft_cap))
    return attended[0] if len(attended) == 1 else torch.cat(attended, 2)


def _capped(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float, soft_cap: float
) -> Tensor:
    n_spans, n_heads, n_queries, head_dim = q.shape
    n_kv_heads, n_keys = k.shape[1:3]
    grouped = q.reshape(n_spans, n_kv_heads, -1, head_dim)  # heads of a group one under the other
    scores = (grouped @ k.transpose(-1, -2)).float().mul_(scale / soft_cap).tanh_().mul_(soft_cap)
    if mask is not None:
        scores.view(n_spans, n_kv_heads, -1, n_queries, n_keys).add_(mask.unsqueeze(2))
    # Weights in float32, as the fused call has them.
    return (scores.softmax(-1).to(v.dtype) @ v).view(n_spans, n_heads, n_queries, head_dim)


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
