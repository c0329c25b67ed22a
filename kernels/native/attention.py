"""Attention of a batch on the CPU: all spans of the batch in one call per layer.

The plan is an `AttentionSpans` (`kernels.pytorch.attention`), which holds only the spans of the
batch. In each call the library divides the work among threads, by the numbers of heads and of
threads. This takes a few microseconds.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.forms.attention import PLAIN, AttentionForm
from kernels.native.call import ELEMENT, declare, dense_heads
from kernels.ops import AttentionPlan
from kernels.pytorch.attention import AttentionSpans, attention


def span_addresses(spans: AttentionSpans) -> tuple[int, int, int]:
    """Returns the memory addresses of three tensors of `spans`: start positions, numbers of tokens,
    and block tables.

    These are tensors rather than arrays, because a tensor returns its address faster.
    """
    return (
        spans.start_positions.data_ptr(),
        spans.n_tokens.data_ptr(),
        spans.block_tables.data_ptr(),
    )


class NativeAttention:
    """Attention over paged K/V (`Ops.attention`) with one build of the library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attention = declare(
            library,
            "attention",
            "element queries query_stride keys values out starts n_tokens blocks n_spans "
            "n_columns n_kv_heads group_size head_dim value_dim block_size window scale soft_cap "
            "sinks is_causal",
        )

    def attention(
        self,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: AttentionPlan,
        form: AttentionForm = PLAIN,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Computes attention as `kernels.ops.ComputeAttention` describes. For tensors that the
        library does not support, calls PyTorch's version. Raises TypeError for a plan that other
        operations have made."""
        is_taken = q.dtype in ELEMENT and key_cache.dtype == q.dtype
        # The library needs equal strides: values have the layout of keys, or are a part of keys.
        if not is_taken or key_cache.stride() != value_cache.stride():
            return attention(q, key_cache, value_cache, plan, form, sinks)
        spans = AttentionSpans.of(plan)
        q = dense_heads(q)
        n_tokens, n_heads, head_dim = q.shape
        _, block_size, n_kv_heads, _ = key_cache.shape
        value_dim = value_cache.shape[3]
        out = torch.empty((n_tokens, n_heads, value_dim), dtype=q.dtype)
        n_spans, n_columns = spans.block_tables.shape
        self._attention(
            ELEMENT[q.dtype],
            q.data_ptr(),
            q.stride(0),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            out.data_ptr(),
            *span_addresses(spans),
            n_spans,
            n_columns,
            n_kv_heads,
            n_heads // n_kv_heads,
            head_dim,
            value_dim,
            block_size,
            form.window or 0,
            head_dim**-0.5 if form.scale is None else form.scale,
            form.soft_cap or 0.0,
            None if sinks is None else sinks.data_ptr(),
            form.is_causal,
        )
        return out
