"""Attention of a mixed batch on the CPU: all of its spans in one call per layer.

There is nothing to plan but where the spans are: the library divides the work itself, by the heads
that it finds and the threads that there are (a few microseconds a call).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.attention import attention
from kernels.attention_metadata import AttentionForm, AttentionGroups, Ints, plan_attention
from kernels.native.call import ELEMENT, declare, dense_heads
from kernels.upload import Uploads

_PLAIN = AttentionForm()


@dataclass(frozen=True, slots=True)
class AttentionSpans:
    """The spans of one batch, in its order; the library reads the columns where they lie.

    They are tensors because these say faster than arrays where that is. All are int64.
    """

    start_positions: Tensor  # [n_spans]
    n_tokens: Tensor  # [n_spans]
    block_tables: Tensor  # [n_spans, n_columns]

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Of the three."""
        columns = self.start_positions, self.n_tokens, self.block_tables
        return columns[0].data_ptr(), columns[1].data_ptr(), columns[2].data_ptr()


def plan_spans(
    start_positions: Ints,
    n_tokens: Ints,
    *,
    block_tables: Ints,
    key_cache: Tensor,
    n_heads: int,
    windows: Sequence[int | None] = (None,),
    uploads: Uploads,
    has_fixed_shape: bool = False,
) -> AttentionGroups | AttentionSpans:
    """The same as `kernels.attention_metadata.plan_attention`; all windows can be attended with.

    The columns are kept and not copied: they must not be written to before the last layer has run.
    """
    if key_cache.dtype not in ELEMENT:
        return plan_attention(
            start_positions,
            n_tokens,
            block_tables=block_tables,
            key_cache=key_cache,
            n_heads=n_heads,
            windows=windows,
            uploads=uploads,
            has_fixed_shape=has_fixed_shape,
        )
    starts, counts, tables = (
        torch.from_numpy(np.ascontiguousarray(column, np.int64))
        for column in (start_positions, n_tokens, block_tables)
    )
    return AttentionSpans(starts, counts, tables)


class Attention:
    """As `kernels.attention` says."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attention = declare(library, "attention", "ipippppppiiiiiiiff")

    def attention(
        self,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: AttentionGroups | AttentionSpans,
        form: AttentionForm = _PLAIN,
    ) -> Tensor:
        if isinstance(plan, AttentionGroups):
            return attention(q, key_cache, value_cache, plan, form)
        q = dense_heads(q)
        n_tokens, n_heads, head_dim = q.shape
        _, block_size, n_kv_heads, _ = key_cache.shape
        out = torch.empty((n_tokens, n_heads, head_dim), dtype=q.dtype)
        n_spans, n_columns = plan.block_tables.shape
        self._attention(
            ELEMENT[q.dtype],
            q.data_ptr(),
            q.stride(0),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            out.data_ptr(),
            *plan.addresses,
            n_spans,
            n_columns,
            n_kv_heads,
            n_heads // n_kv_heads,
            head_dim,
            block_size,
            form.window or 0,
            head_dim**-0.5 if form.scale is None else form.scale,
            form.soft_cap or 0.0,
        )
        return out
