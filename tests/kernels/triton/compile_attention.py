"""Calls of attention that compile its kernels in the forms that matter."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kernels import AttentionForm
from kernels.triton.attention import attention
from kernels.triton.attention_plan import plan_attention
from kernels.upload import Uploads

DECODES = [(900, 1), (8000, 1)]
MIXED = [(0, 300), (500, 1), (4000, 200)]


def call(
    spans: list[tuple[int, int]],
    *,
    head_dim: int,
    group_size: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    form: AttentionForm | None = None,
    has_sinks: bool = False,
    n_kv_heads: int = 2,
    value_dim: int | None = None,
) -> None:
    """Computes attention as a rank does. With `value_dim`, the values are the first `value_dim`
    elements of the keys."""
    form = AttentionForm() if form is None else form
    starts, n_tokens = np.array(spans).T
    n_heads, block_size = n_kv_heads * group_size, 16
    n_columns = -(-int((starts + n_tokens).max()) // block_size)
    cache = torch.zeros((4, block_size, n_kv_heads, head_dim), dtype=dtype)
    # Cut out of one row per token, as from the fused projection.
    qkv = torch.zeros((int(n_tokens.sum()), n_heads + 2 * n_kv_heads, head_dim), dtype=dtype)
    plan = plan_attention(
        starts,
        n_tokens,
        block_tables=np.zeros((len(spans), n_columns), np.int64),
        key_caches=[cache],
        n_heads=n_heads,
        windows=(form.window,),
        uploads=Uploads(),
    )
    sinks = torch.zeros(n_heads) if has_sinks else None
    attention(qkv[:, :n_heads], cache, cache[..., :value_dim], plan, form, sinks)


def case(spans: list[tuple[int, int]], **how: Any) -> Callable[[], None]:
    return lambda: call(spans, **how)


KINDS = {"decodes": DECODES, "mixed": MIXED}

FORMS: dict[str, dict[str, Any]] = {
    "a group of 8": {"group_size": 8},
    "no group in float16": {"group_size": 1, "dtype": torch.float16},
    "a window": {"form": AttentionForm(window=1000)},
    "sinks and a window": {"form": AttentionForm(window=1000), "has_sinks": True},
    "a soft cap and a window": {"form": AttentionForm(window=1000, soft_cap=50.0)},
}

CASES = {
    **{
        f"attention: {kind}, heads of {head_dim}, {dtype}": case(
            spans, head_dim=head_dim, dtype=dtype
        )
        for kind, spans in KINDS.items()
        for dtype, sizes in ((torch.bfloat16, (64, 80, 128, 256)), (torch.float32, (64, 128)))
        for head_dim in sizes
    },
    **{
        f"attention: {kind}, heads of 128, {name}": case(spans, head_dim=128, **how)
        for kind, spans in KINDS.items()
        for name, how in FORMS.items()
    },
    **{
        f"attention: {kind}, {group_size} heads to latents of 512, {dtype}": case(
            spans,
            head_dim=576,
            value_dim=512,
            n_kv_heads=1,
            group_size=group_size,
            dtype=dtype,
            form=AttentionForm(scale=0.1),
        )
        for kind, spans in KINDS.items()
        for group_size, dtype in (
            (16, torch.bfloat16),
            (128, torch.bfloat16),
            (16, torch.float32),
        )
    },
    # Gemma's.
    "attention: mixed, heads of 256, a soft cap and a window": case(
        MIXED, head_dim=256, **FORMS["a soft cap and a window"]
    ),
    **{
        f"attention: {kind}, heads of 512": case(spans, head_dim=512)
        for kind, spans in KINDS.items()
    },
}
