"""Attention of a mixed batch over paged keys and values, one span after the other.

Attention is the only operation whose result for one token depends on other tokens (selective
batching, OSDI'22 §3.2). A batch consists of spans. A span of one token is a decode; a longer span
is a prompt, or a chunk of a prompt. The plan holds the position, length and block table of each
span. The version in this file gathers the keys and values of a span from its blocks and computes
the attention of the span in one call. It is used if neither the native library nor Triton is
available. The native version uses plans of this type, too.

The keys and values of the batch's tokens must have been written to storage before. With a soft cap
or sinks, attention is computed operation by operation; otherwise by PyTorch's fused function.
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

# Maximum number of scores that are in memory at once: 16 MiB of float32.
_MAX_SCORES = 1 << 22


@dataclass(frozen=True, slots=True)
class AttentionSpans(AttentionPlan):
    """The spans of one batch, in the order of the batch. All tensors are int64 and dense."""

    start_positions: Tensor  # [n_spans], the position of each span's first token; on the host
    n_tokens: Tensor  # [n_spans]; on the host
    block_tables: Tensor  # [n_spans, n_columns], blocks of each sequence in order; on the device

    @classmethod
    def of(cls, plan: AttentionPlan) -> AttentionSpans:
        """Returns `plan`. Raises TypeError if the plan is not of this class."""
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
    is_causal: bool = True,
    uploads: Uploads,
    has_fixed_shape: bool = False,
) -> AttentionSpans:
    """Makes the attention plan of a batch, as `kernels.ops.PlanAttention` describes. The plan can
    be used by layers with any window and any heads, causal or not.

    The plan may keep the arguments' arrays without a copy, so the caller must not write to the
    arrays before the last layer has run. `has_fixed_shape` has no effect: the shapes of the
    intermediate tensors depend on the batch.
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
    """Computes attention span by span, as `kernels.ops.ComputeAttention` describes. Raises
    TypeError for a plan of another type."""
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
    # Blocks that lie wholly before the window are skipped. From here on, positions are counted
    # from the first block that is left.
    first_block = 0 if form.window is None else max(start - form.window + 1, 0) // block_size
    start -= first_block * block_size
    n_keys = start + n_tokens
    blocks = table[first_block : first_block - (-n_keys // block_size)]
    keys, values = (_gather(cache, blocks, n_keys) for cache in (key_cache, value_cache))
    is_cut = form.window is not None and form.window < n_keys
    hides_later = n_tokens > 1 and form.is_causal
    is_causal = hides_later and start == 0 and not is_cut
    mask = None
    if is_cut or (hides_later and not is_causal):
        mask = _mask(start, n_keys, form.window, q.device)
    if n_tokens == 1:
        # The query heads that share a K/V head take the place of several queries of one head.
        grouped = q.view(1, n_kv_heads, -1, head_dim)
        sinks = None if sinks is None else sinks.view(1, n_kv_heads, 1, -1, 1)
        return _attend(grouped, keys, values, mask, form, sinks).reshape(1, n_heads, -1)
    several = q.transpose(0, 1)[None]  # [1, n_heads, n_tokens, head_dim]
    sinks = None if sinks is None else sinks.view(1, n_kv_heads, -1, 1, 1)
    attended = _attend(several, keys, values, mask, form, sinks, is_causal=is_causal)
    return attended[0].transpose(0, 1)


def _gather(cache: Tensor, blocks: Tensor, n_keys: int) -> Tensor:
    """Gathers the first `n_keys` entries of a sequence from its blocks in `cache`: [1, n_kv_heads,
    n_keys, size]."""
    return cache.index_select(0, blocks).flatten(0, 1)[:n_keys].transpose(0, 1)[None]


def _mask(start: int, n_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Returns a mask [n_queries, n_keys] that is True if a query may attend to a key.

    The queries are at the positions `start` to `n_keys - 1`, the keys at 0 to `n_keys - 1`.
    """
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
    is_causal: bool = False,  # apply a causal mask; there are as many queries as keys
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
    n_queries = max(1, _MAX_SCORES // (q.shape[1] * k.shape[2]))  # queries of one pass
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
    """Computes attention with one PyTorch operation for each step of the formula. Scores and
    weights are float32."""
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
