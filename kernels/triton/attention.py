"""Attention of a mixed batch over paged keys and values, in one launch.

`kernels.triton.attention_plan` cuts prompts, chunks and decodes into items. An item is a tile of
queries of one span with the keys that the tile attends to, or with a part of these keys. A program
computes one item for one group of query heads that share a K/V head. Each token of a tile has one
row for each head of the group, so that a decode of a model with grouped queries fills the 16 rows
of the matrix unit. If the heads are too many for one tile, they form several groups. The program
loops over the keys (`attention_walk`). Tiles have two sizes, one for decodes and one for longer
spans. Both sizes run in one launch, so that neither waits for the other.

Bytes: each tile reads 2 * n_kv_heads * head_dim elements per token of context, which limits
decodes. FLOPs: 4 * n_heads * head_dim per pair of a query and a key, which limits prompts.

Only keys to which a query of the tile attends are read, so unused storage may contain any bits.
Large tiles compute masks only in steps that contain the causal diagonal, the edge of the window or
the last key.

If an item has only a part of a tile's keys, the program writes its float32 result and the log of
its sum of weights. A second small launch combines the parts (`attention_parts`).

The sink of a head is added to the sum of weights after all keys of a row: at the end of an item
with all keys, or when parts are combined.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.forms.attention import PLAIN, AttentionForm
from kernels.ops import AttentionPlan
from kernels.triton.attention_parts import NO_PEAK, combine_parts, sink_weights
from kernels.triton.attention_plan import N_COLUMNS, Column, items_for
from kernels.triton.attention_walk import walk

# The columns of the table of items, as constants for kernels.
_ROW = tl.constexpr(Column.ROW.value)
_N_QUERIES = tl.constexpr(Column.N_QUERIES.value)
_POSITION = tl.constexpr(Column.POSITION.value)
_KEY_BEGIN = tl.constexpr(Column.KEY_BEGIN.value)
_KEY_END = tl.constexpr(Column.KEY_END.value)
_SPAN = tl.constexpr(Column.SPAN.value)
_PART = tl.constexpr(Column.PART.value)
_ITEM_STRIDE = tl.constexpr(N_COLUMNS)


@triton.jit
def _attend(
    out,
    parts,
    log_sums,
    q,
    sinks,
    keys_of_head,
    values_of_head,
    item,
    block_tables,
    head,
    q_stride,
    table_stride,
    window,
    scale,
    soft_cap,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    N_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    REST_DIM: tl.constexpr,
    REST_DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_LARGE: tl.constexpr,
):
    """Computes one item of work (see the module) for the group of query heads with the index
    `head`."""
    first_row = tl.load(item + _ROW)
    n_queries = tl.load(item + _N_QUERIES)
    position = tl.load(item + _POSITION)
    begin = tl.load(item + _KEY_BEGIN)
    end = tl.load(item + _KEY_END)
    table = block_tables + tl.load(item + _SPAN).to(tl.int64) * table_stride
    part = tl.load(item + _PART)

    rows = tl.arange(0, ROWS)
    tokens = rows // GROUP_SIZE
    heads = head * GROUP_SIZE + rows % GROUP_SIZE
    dims = tl.arange(0, DIMS)
    is_query = tokens < n_queries
    is_element = is_query[:, None] & (dims < VALUE_DIM)[None, :]
    q_places = (first_row + tokens).to(tl.int64) * q_stride + heads * (VALUE_DIM + REST_DIM)
    tile = tl.load(q + q_places[:, None] + dims[None, :], mask=is_element, other=0.0)
    rest = tile  # a placeholder, unused if REST_DIM is 0
    if REST_DIM > 0:
        rest_dims = tl.arange(0, REST_DIMS)
        is_rest = is_query[:, None] & (rest_dims < REST_DIM)[None, :]
        rest_places = q_places[:, None] + VALUE_DIM + rest_dims[None, :]
        rest = tl.load(q + rest_places, mask=is_rest, other=0.0)

    positions = position + tokens
    last_key = tl.maximum(end - 1, 0)
    totals = tl.zeros((ROWS, DIMS), tl.float32)
    sums = tl.zeros((ROWS,), tl.float32)
    peaks = tl.full((ROWS,), NO_PEAK, tl.float32)
    if HAS_WINDOW:
        begin = tl.maximum(begin, position - window + 1)
    # All rows see the keys in [inner_begin, inner_end), so these need no mask.
    inner_begin = begin
    inner_end = tl.minimum(position + 1, end)
    if HAS_WINDOW:
        inner_begin = position + n_queries - window
    # fmt: off
    totals, sums, peaks = walk(
        totals, sums, peaks, tile, rest, positions, begin, end, inner_begin, inner_end, last_key,
        keys_of_head, values_of_head, table, window, scale, soft_cap,
        HAS_WINDOW, HAS_SOFT_CAP, IS_LARGE,
        BLOCK_SIZE, TOKEN_STRIDE, VALUE_DIM, DIMS, REST_DIM, REST_DIMS, KEYS, STAGES,
    )
    # fmt: on

    # A sum is 0 if the row has no query, or sees no key of this part.
    safe_sums = tl.where(sums == 0.0, 1.0, sums)
    totals /= safe_sums[:, None]
    row = tl.where(part < 0, first_row, part)
    places = ((row + tokens) * (N_GROUPS * GROUP_SIZE) + heads).to(tl.int64)
    if part < 0:
        if HAS_SINKS:
            totals *= (safe_sums / (safe_sums + sink_weights(sinks + heads, peaks)))[:, None]
        where = out + places[:, None] * VALUE_DIM + dims[None, :]
        tl.store(where, totals.to(out.dtype.element_ty), mask=is_element)
    else:
        tl.store(parts + places[:, None] * VALUE_DIM + dims[None, :], totals, mask=is_element)
        logs = tl.where(sums == 0.0, float("-inf"), peaks + tl.log2(safe_sums))
        tl.store(log_sums + places, logs, mask=is_query)


@triton.jit(do_not_specialize=["table_stride", "window"])
def _attention_kernel(
    out,
    parts,
    log_sums,
    q,
    sinks,
    key_cache,
    value_cache,
    items,
    block_tables,
    q_stride,
    table_stride,
    window,
    scale,
    soft_cap,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    N_KV_HEADS: tl.constexpr,
    N_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    REST_DIM: tl.constexpr,
    REST_DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SMALL_ROWS: tl.constexpr,
    SMALL_KEYS: tl.constexpr,
    SMALL_STAGES: tl.constexpr,
    LARGE_ROWS: tl.constexpr,
    LARGE_KEYS: tl.constexpr,
    LARGE_STAGES: tl.constexpr,
):
    """A program computes one item of work (see the module) for one group of query heads. The
    programs for the groups of an item are adjacent.

    LARGE_ROWS is 0 if the batch has no large tiles.
    """
    HEAD_DIM: tl.constexpr = VALUE_DIM + REST_DIM
    TOKEN_STRIDE: tl.constexpr = N_KV_HEADS * HEAD_DIM
    program = tl.program_id(0)
    head = program % N_GROUPS
    item = items + (program // N_GROUPS) * _ITEM_STRIDE
    kv_head = head // (N_GROUPS // N_KV_HEADS)
    keys_of_head = key_cache + kv_head * HEAD_DIM
    values_of_head = value_cache + kv_head * HEAD_DIM
    n_rows = tl.load(item + _N_QUERIES) * GROUP_SIZE
    # fmt: off
    if LARGE_ROWS > 0:
        if n_rows > SMALL_ROWS:
            _attend(
                out, parts, log_sums, q, sinks, keys_of_head, values_of_head, item, block_tables,
                head, q_stride, table_stride, window, scale, soft_cap,
                HAS_WINDOW, HAS_SOFT_CAP, HAS_SINKS,
                N_GROUPS, GROUP_SIZE, TOKEN_STRIDE, VALUE_DIM, DIMS, REST_DIM, REST_DIMS,
                BLOCK_SIZE,
                LARGE_ROWS, LARGE_KEYS, LARGE_STAGES, True,
            )
        else:
            _attend(
                out, parts, log_sums, q, sinks, keys_of_head, values_of_head, item, block_tables,
                head, q_stride, table_stride, window, scale, soft_cap,
                HAS_WINDOW, HAS_SOFT_CAP, HAS_SINKS,
                N_GROUPS, GROUP_SIZE, TOKEN_STRIDE, VALUE_DIM, DIMS, REST_DIM, REST_DIMS,
                BLOCK_SIZE,
                SMALL_ROWS, SMALL_KEYS, SMALL_STAGES, False,
            )
    else:
        _attend(
            out, parts, log_sums, q, sinks, keys_of_head, values_of_head, item, block_tables,
            head, q_stride, table_stride, window, scale, soft_cap,
            HAS_WINDOW, HAS_SOFT_CAP, HAS_SINKS,
            N_GROUPS, GROUP_SIZE, TOKEN_STRIDE, VALUE_DIM, DIMS, REST_DIM, REST_DIMS,
            BLOCK_SIZE,
            SMALL_ROWS, SMALL_KEYS, SMALL_STAGES, False,
        )
    # fmt: on


def attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    form: AttentionForm = PLAIN,
    sinks: Tensor | None = None,
) -> Tensor:
    """Launches attention for a batch, as `kernels.ops.ComputeAttention` describes.

    Raises:
        TypeError: `plan` is of another type.
        ValueError: the strides of the two caches differ, so that `value_cache` neither has the
            layout of `key_cache` nor is a part of it; or only one of the plan and `form` is causal;
            or the plan is for several kinds of K/V heads without the kind of `key_cache`.
    """
    items = items_for(plan, key_cache)
    if items.is_causal != form.is_causal:
        raise ValueError(f"is_causal is {items.is_causal} in the plan, {form.is_causal} in a layer")
    n_tokens, n_heads, head_dim = q.shape
    if q.stride()[1:] != (head_dim, 1):
        q = q.contiguous()  # only the stride of tokens is free
    _, block_size, n_kv_heads, value_dim = value_cache.shape
    if value_cache.stride() != key_cache.stride():
        raise ValueError(f"values {tuple(value_cache.shape)} of keys {tuple(key_cache.shape)}")
    n_rest = head_dim - value_dim
    n_dims, n_rest_dims = (max(16, triton.next_power_of_2(n)) for n in (value_dim, n_rest))
    scale = head_dim**-0.5 if form.scale is None else form.scale
    soft_cap = 0.0
    if form.soft_cap is None:
        scale *= math.log2(math.e)
    else:
        scale *= 2 * math.log2(math.e) / form.soft_cap
        soft_cap = form.soft_cap * math.log2(math.e)
    out = torch.empty((n_tokens, n_heads, value_dim), dtype=q.dtype, device=q.device)
    # Without divided tokens these have no rows; kernels are compiled for their types all the same.
    rows = (items.n_part_rows, n_heads)
    parts = torch.empty((*rows, value_dim), dtype=torch.float32, device=q.device)
    log_sums = torch.empty(rows, dtype=torch.float32, device=q.device)
    small, large = items.small, items.large
    n_groups = n_heads // items.group_size
    _attention_kernel[(len(items.items) * n_groups,)](
        out,
        parts,
        log_sums,
        q,
        log_sums if sinks is None else sinks,
        key_cache,
        value_cache,
        items.items,
        items.block_tables,
        q.stride(0),
        items.block_tables.stride(0),
        form.window or 0,
        scale,
        soft_cap,
        HAS_WINDOW=form.window is not None,
        HAS_SOFT_CAP=form.soft_cap is not None,
        HAS_SINKS=sinks is not None,
        N_KV_HEADS=n_kv_heads,
        N_GROUPS=n_groups,
        GROUP_SIZE=items.group_size,
        VALUE_DIM=value_dim,
        DIMS=n_dims,
        REST_DIM=n_rest,
        REST_DIMS=n_rest_dims,
        BLOCK_SIZE=block_size,
        SMALL_ROWS=small.rows,
        SMALL_KEYS=small.keys,
        SMALL_STAGES=small.n_stages,
        LARGE_ROWS=0 if large is None else large.rows,
        LARGE_KEYS=0 if large is None else large.keys,
        LARGE_STAGES=0 if large is None else large.n_stages,
        num_warps=small.n_warps if large is None else large.n_warps,
    )
    if items.divided is not None:
        combine_parts(out, parts, log_sums, sinks, items.divided)
    return out
