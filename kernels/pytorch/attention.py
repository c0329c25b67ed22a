"""Attention of a mixed batch over paged keys and values, one span after the other.

Attention is the one operation that is not token by token (selective batching, OSDI'22 §3.2). A
batch is a row of spans: a span of one token is a decode, a longer one is a prompt, or a chunk of
one that goes on with a sequence. The plan says where each span lies. PyTorch's version here gathers
the keys and values of a span from its blocks and attends to them in one call; it runs where neither
the native library nor Triton is. The native version takes the same plan.

The keys and values of the batch must have been written to storage before. Soft-capped scores and
sinks are computed step by step; everything else is one fused call of PyTorch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.forms.attention import PLAIN, AttentionForm
from kernels.ops import AttentionPlan, Ints
from kernels.upload import Uploads

# Scores that are in memory at once; in float32 these are 16 MiB.
_MAX_SCORES = 1 << 22


@dataclass(frozen=True, slots=True)
class AttentionSpans(AttentionPlan):
    """The spans of one batch, in its order. All columns are int64 and dense."""

    start_positions: Tensor  # [n_spans], of first tokens in their sequences; on the host
    n_tokens: Tensor  # [n_spans]; on the host
    block_tables: Tensor  # [n_spans, n_columns], blocks of each sequence in order; on the device

    @classmethod
    def of(cls, plan: AttentionPlan) -> AttentionSpans:
        """Returns `plan`; raises TypeError if other operations have made it."""
        if not isinstance(plan, cls):
            raise TypeError(f"the batch was planned with other operations: {type(plan).__name__}")
        return plan


def plan_attention(
    start_positions: Ints,
    n_tokens: Ints,
    *,
    block_tables: Ints,
    key_caches: Sequence[Tensor],
    n_heads: int,
    windows: Sequence[int | None] = (None,),
    uploads: Uploads,
    has_fixed_shape: bool = False,
) -> AttentionSpans:
    """Implements `kernels.ops.PlanAttention`; layers of any window and heads can attend
    with the result.

    The columns are kept and not copied, so they must not be written to before the last layer has
    run. Shapes of what is computed depend on the batch, whatever `has_fixed_shape` says.
    """
    starts, counts = (
        torch.from_numpy(np.ascontiguousarray(column, np.int64))
        for column in (start_positions, n_tokens)
    )
    return AttentionSpans(starts, counts, uploads.add(np.ascontiguousarray(block_tables, np.int64)))


def attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    form: AttentionForm = PLAIN,
    sinks: Tensor | None = None,
) -> Tensor:
    """Implements `ComputeAttention`; raises TypeError for a plan of other operations."""
    spans = AttentionSpans.of(plan)
    out = q.new_empty(*q.shape[:2], value_cache.shape[3])  # [n_tokens, n_heads, value_dim]
    starts, counts = spans.start_positions.tolist(), spans.n_tokens.tolist()
    first = 0
    for start, n_tokens, table in zip(starts, counts, spans.block_tables, strict=True):
        here = slice(first, first + n_tokens)
        out[here] = _attend_span(
            q[here], key_cache, value_cache, table, start=start, form=form, sinks=sinks
        )
        first += n_tokens
    return out


def _attend_span(
    q: Tensor,  # [n_tokens, n_heads, head_dim]
    key_cache: Tensor,
    value_cache: Tensor,
    table: Tensor,  # [n_columns]
    *,
    start: int,
    form: AttentionForm,
    sinks: Tensor | None,  # [n_heads]
) -> Tensor:
    """Returns the attention of one span whose first token is at position `start`.

    The result is [n_tokens, n_heads, value_dim].
    """
    n_tokens, n_heads, head_dim = q.shape
    block_size, n_kv_heads = key_cache.shape[1:3]
    # Blocks that lie wholly before the window are left out, and positions counted from the rest.
    first_block = 0 if form.window is None else max(start - form.window + 1, 0) // block_size
    start -= first_block * block_size
    n_keys = start + n_tokens
    blocks = table[first_block : first_block - (-n_keys // block_size)]
    keys, values = (_gather(cache, blocks, n_keys) for cache in (key_cache, value_cache))
    is_cut = form.window is not None and form.window < n_keys
    is_causal = n_tokens > 1 and start == 0 and not is_cut
    mask = None
    if is_cut or (n_tokens > 1 and not is_causal):
        mask = _mask(start, n_keys, form.window, q.device)
    if n_tokens == 1:
        # Heads that share a K/V head lie side by side as if they were queries of one sequence.
        grouped = q.view(1, n_kv_heads, -1, head_dim)
        sinks = None if sinks is None else sinks.view(1, n_kv_heads, 1, -1, 1)
        return _attend(grouped, keys, values, mask, form, sinks).reshape(1, n_heads, -1)
    several = q.transpose(0, 1)[None]  # [1, n_heads, n_tokens, head_dim]
    sinks = None if sinks is None else sinks.view(1, n_kv_heads, -1, 1, 1)
    attended = _attend(several, keys, values, mask, form, sinks, is_causal=is_causal)
    return attended[0].transpose(0, 1)


def _gather(cache: Tensor, blocks: Tensor, n_keys: int) -> Tensor:
    """Returns what is stored of one sequence in `blocks`, [1, n_kv_heads, n_keys, its size]."""
    return cache.index_select(0, blocks).flatten(0, 1)[:n_keys].transpose(0, 1)[None]


def _mask(start: int, n_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Returns which keys the queries from position `start` on see, [n_queries, n_keys] bool."""
    queries = torch.arange(start, n_keys, device=device)[:, None]
    keys = torch.arange(n_keys, device=device)
    is_seen = keys <= queries
    return is_seen if window is None else is_seen & (keys > queries - window)


def _attend(
    q: Tensor,  # [1, n_heads, n_queries, head_dim]
    k: Tensor,  # [1, n_kv_heads, n_keys, head_dim]
    v: Tensor,  # [1, n_kv_heads, n_keys, value_dim]
    mask: Tensor | None,  # [n_queries, n_keys]; one row may stand for all queries
    form: AttentionForm,
    sinks: Tensor | None,  # [1, n_kv_heads, group_size, 1 or n_queries, 1]
    *,
    is_causal: bool = False,  # the mask is the causal one of as many queries as keys
) -> Tensor:
    """Returns the attention of one sequence, [1, n_heads, n_queries, value_dim]."""
    if form.soft_cap is None and sinks is None:
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=is_causal,
            scale=form.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    if is_causal:
        mask = _mask(0, k.shape[2], None, q.device)
    n_queries = max(1, _MAX_SCORES // (q.shape[1] * k.shape[2]))  # at once
    attended = []
    for begin in range(0, q.shape[2], n_queries):
        some = slice(begin, begin + n_queries)
        some_mask = mask if mask is None or len(mask) == 1 else mask[some]
        some_sinks = sinks if sinks is None or sinks.shape[3] == 1 else sinks[:, :, :, some]
        attended.append(_attend_in_steps(q[:, :, some], k, v, some_mask, form, some_sinks))
    return torch.cat(attended, 2)


def _attend_in_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    form: AttentionForm,
    sinks: Tensor | None,
) -> Tensor:
    """Returns `_attend`, one operation after the other; scores and weights are float32."""
    scale = q.shape[-1] ** -0.5 if form.scale is None else form.scale
    # [1, n_kv_heads, group_size, n_queries, head_dim]
    grouped = q.reshape(1, k.shape[1], -1, *q.shape[2:])
    k, v = k.unsqueeze(2), v.unsqueeze(2)
    scores = (grouped @ k.transpose(-1, -2)).float()  # [..., n_queries, n_keys]
    if form.soft_cap is None:
        scores.mul_(scale)
    else:
        scores.mul_(scale / form.soft_cap).tanh_().mul_(form.soft_cap)
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
    weights = scores.softmax(-1)[..., : k.shape[3]].to(v.dtype)
    return (weights @ v).flatten(1, 2)
