"""Cuts the attention of one mixed batch into items of work.

An item is a tile of neighbouring queries of one span, with all keys to which these queries attend
or with a part of the keys. A decode or a very short prompt is one small tile. The keys of a tile
are divided among several items if one item would still run when the rest of the device is idle. To
decide this, the keys of all tiles are divided into equal shares, several for each multiprocessor;
an item has at most one share of keys. Parts have a minimum length, because combining shorter parts
would cost more than it saves. Items with more keys start first.

All layers with an equal number and size of K/V heads share a table of items; a layer with a sliding
window skips the keys before the window. Layers with other heads have another table.

A captured CUDA graph needs shapes that are independent of the lengths in a batch. If an item has at
most 1/n of all keys, then there are at most n more items than spans, for any lengths. The table has
that many rows, and unused items have no queries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from kernels.ops import AttentionPlan, Ints
from kernels.triton.tuning import Device, Kind, Tiles, device_of, tiles_for
from kernels.upload import Uploads


class Column(IntEnum):
    """The columns of the table of items of work."""

    ROW = 0  # row of q that holds the first query
    N_QUERIES = 1  # number of queries; 0 in an unused item
    POSITION = 2  # position from which the first query sees keys: its own, or the span's last
    KEY_BEGIN = 3  # position of the first key
    KEY_END = 4  # position after the last key
    SPAN = 5  # row of the block tables
    PART = 6  # row of the parts for the first query's result; -1 if the item has all keys


class DividedColumn(IntEnum):
    """The columns of the table of divided tokens: tokens whose keys are divided among several items
    of work."""

    ROW = 0  # row of q that holds the token's query
    PART = 1  # row of the token's first part in the table of parts
    STEP = 2  # number of rows from one part to the next
    N_PARTS = 3  # number of parts; 0 in an unused row


N_COLUMNS = 8  # the last one is unused, so that a row has 32 bytes
N_DIVIDED_COLUMNS = len(DividedColumn)

# Shares of keys per multiprocessor. Small tiles wait for memory, so many of them at once are faster
# than few. Parts of large tiles are costly, so a tile is divided only if it is far above the rest.
_SMALL_SHARES = 6
_LARGE_SHARES = 2

# Keys of the shortest part. The result of a small tile takes as much memory as a few dozen keys.
# Writing and combining the result of a large tile takes as long as some hundred keys.
_MIN_SMALL_PART = 256
_MIN_LARGE_PART = 1024

# Parts begin at multiples of this number of keys, so that few blocks are divided between two parts.
_PART_STEP = 64


@dataclass(frozen=True, slots=True)
class Cut:
    """The parameters by which a batch is divided into items of work."""

    small: Tiles  # for decodes
    large: Tiles  # for longer spans
    group_size: int  # number of query heads of a program; the heads share a K/V head
    small_shares: float  # an item of a small tile has at most 1 / small_shares of all keys
    large_shares: float  # an item of a large tile has at most 1 / large_shares of all keys
    min_small_part: int = _MIN_SMALL_PART  # number of keys; at least _PART_STEP
    min_large_part: int = _MIN_LARGE_PART

    @property
    def small_tokens(self) -> int:
        """Number of queries in a small tile."""
        return self.small.rows // self.group_size

    @property
    def large_tokens(self) -> int:
        """Number of queries in a large tile."""
        return self.large.rows // self.group_size


@dataclass(frozen=True, slots=True)
class AttentionItems(AttentionPlan):
    """The table of the items of work of one batch, and the table of the tokens whose keys are
    divided among several items."""

    items: Tensor  # [n_items, N_COLUMNS] int32
    block_tables: Tensor  # [n_spans, n_columns] int32
    divided: Tensor | None  # [n_divided, N_DIVIDED_COLUMNS] int32; None if no keys are divided
    n_part_rows: int  # rows of the table of parts: the number of parts of all divided tokens
    group_size: int  # number of query heads of a program
    small: Tiles
    large: Tiles | None  # None if the batch has only small tiles
    is_causal: bool = True


@dataclass(frozen=True, slots=True)
class ItemsOfKinds(AttentionPlan):
    """The items of work of one batch for a model with several kinds of K/V heads: one table of
    items for each kind."""

    of_kind: Mapping[tuple[int, int], AttentionItems]  # by number of K/V heads and head size


@dataclass(frozen=True, slots=True)
class _Tables:
    """The tables of a plan in host memory."""

    items: NDArray[np.int32]
    divided: NDArray[np.int32]
    n_part_rows: int
    has_large: bool


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
) -> AttentionPlan:
    """Makes the attention plan of a batch, as `kernels.ops.PlanAttention` describes. The plan suits
    every window up to the widest of `windows`.

    With `has_fixed_shape` every span must be one token. All shapes and launches then depend only on
    the number of spans and the width of `block_tables`.
    """
    of_kind = {}
    for key_cache in key_caches:
        _, block_size, n_kv_heads, head_dim = key_cache.shape
        device = device_of(key_cache.device)
        cut = cut_for(n_heads // n_kv_heads, n_kv_heads, head_dim, key_cache.dtype, device)
        of_kind[n_kv_heads, head_dim] = cut_batch(
            start_positions,
            n_tokens,
            block_tables=block_tables,
            block_size=block_size,
            windows=windows,
            is_causal=is_causal,
            cut=cut,
            uploads=uploads,
            has_fixed_shape=has_fixed_shape,
        )
    return next(iter(of_kind.values())) if len(of_kind) == 1 else ItemsOfKinds(of_kind)


def items_for(plan: AttentionPlan, key_cache: Tensor) -> AttentionItems:
    """Returns the items of work of `plan` for a layer with the given `key_cache`.

    Raises:
        TypeError: the plan is of another type.
        ValueError: the plan is for several kinds of K/V heads, and lacks the kind of `key_cache`.
    """
    if isinstance(plan, ItemsOfKinds):
        n_kv_heads, head_dim = key_cache.shape[2:]
        items = plan.of_kind.get((n_kv_heads, head_dim))
        if items is None:
            kinds = ", ".join(f"{number} of size {size}" for number, size in plan.of_kind)
            raise ValueError(
                f"a layer has {n_kv_heads} K/V heads of size {head_dim}, the plan is for {kinds}"
            )
        return items
    if not isinstance(plan, AttentionItems):
        raise TypeError(f"the batch was planned with other operations: {type(plan).__name__}")
    return plan


def cut_for(
    n_sharing: int, n_kv_heads: int, head_dim: int, dtype: torch.dtype, device: Device
) -> Cut:
    """Returns the parameters for dividing batches into items of work. They depend on the device and
    on the model, in which `n_sharing` query heads share a K/V head."""
    large = tiles_for(Kind.SPANS, head_dim, dtype, device)
    group_size = max(n for n in range(1, large.rows + 1) if n_sharing % n == 0)
    shares = device.n_multiprocessors / (n_kv_heads * (n_sharing // group_size))
    return Cut(
        _holding(group_size, tiles_for(Kind.DECODES, head_dim, dtype, device)),
        large,
        group_size,
        small_shares=_SMALL_SHARES * shares,
        large_shares=_LARGE_SHARES * shares,
    )


def _holding(group_size: int, tiles: Tiles) -> Tiles:
    """Returns `tiles`, enlarged to at least `group_size` rows if necessary. A tile needs one row
    for each of the query heads that share a K/V head, even for a single token."""
    if tiles.rows >= group_size:
        return tiles
    return replace(tiles, rows=triton.next_power_of_2(group_size))


def cut_batch(
    start_positions: Ints,
    n_tokens: Ints,
    *,
    block_tables: Ints,
    block_size: int,
    windows: Sequence[int | None],
    is_causal: bool = True,
    cut: Cut,
    uploads: Uploads,
    has_fixed_shape: bool,
) -> AttentionItems:
    """Divides a batch into items of work by the parameters `cut`. `plan_attention` describes the
    other arguments."""
    widest = None if None in windows else max(w for w in windows if w is not None)
    n_columns = block_tables.shape[1]
    if not has_fixed_shape:
        n_columns = -(-int((start_positions + n_tokens).max()) // block_size)
    tables = _tables(start_positions, n_tokens, widest, cut, is_causal=is_causal)
    if has_fixed_shape:
        tables = _with_fixed_shape(tables, len(n_tokens), n_columns * block_size, cut)
    return AttentionItems(
        items=uploads.add(tables.items),
        block_tables=uploads.add(block_tables[:, :n_columns].astype(np.int32)),
        divided=uploads.add(tables.divided) if len(tables.divided) else None,
        n_part_rows=tables.n_part_rows,
        group_size=cut.group_size,
        small=cut.small,
        large=cut.large if tables.has_large else None,
        is_causal=is_causal,
    )


def _tables(
    starts: Ints, n_tokens: Ints, widest: int | None, cut: Cut, *, is_causal: bool
) -> _Tables:
    tiles, is_large = _tiles(starts, n_tokens, cut)
    if not is_causal:
        ends = (starts + n_tokens)[tiles[:, Column.SPAN]]
        tiles[:, Column.POSITION], tiles[:, Column.KEY_END] = ends - 1, ends
    if widest is not None:
        first_seen = np.maximum(tiles[:, Column.POSITION] - (widest - 1), 0)
        tiles[:, Column.KEY_BEGIN] = first_seen // _PART_STEP * _PART_STEP
    n_keys = tiles[:, Column.KEY_END] - tiles[:, Column.KEY_BEGIN]
    part_keys = _part_keys(n_keys, is_large, cut)
    n_parts = -(-n_keys // part_keys)
    divided, n_part_rows = np.empty((0, N_DIVIDED_COLUMNS), np.int32), 0
    if n_parts.max() > 1:
        part_keys = -(-n_keys // (n_parts * _PART_STEP)) * _PART_STEP  # parts of equal length
        n_parts = -(-n_keys // part_keys)
        divided, n_part_rows = _divide(tiles, n_parts)
        tiles, n_keys = _parts(tiles, part_keys, n_parts)
    longest_first = np.argsort(-n_keys, kind="stable")
    return _Tables(
        tiles[longest_first].astype(np.int32), divided, n_part_rows, bool(is_large.any())
    )


def _tiles(starts: Ints, n_tokens: Ints, cut: Cut) -> tuple[Ints, NDArray[np.bool_]]:
    """Returns the tiles of a batch, and a mask that is true for large tiles. The keys of a tile are
    all keys up to its last query."""
    n_spans = len(n_tokens)
    is_large = n_tokens > cut.small_tokens
    first_rows = np.cumsum(n_tokens) - n_tokens
    if is_large.any():
        n_tiles = np.where(is_large, -(-n_tokens // cut.large_tokens), 1)
        spans = np.repeat(np.arange(n_spans), n_tiles)
        places = np.arange(len(spans)) - np.repeat(np.cumsum(n_tiles) - n_tiles, n_tiles)
        skipped = places * cut.large_tokens  # tokens of the span before the tile
        n_queries = np.minimum(n_tokens[spans] - skipped, cut.large_tokens)
        rows, positions = first_rows[spans] + skipped, starts[spans] + skipped
        is_large = is_large[spans]
    else:
        spans, n_queries, rows, positions = np.arange(n_spans), n_tokens, first_rows, starts
    tiles = np.zeros((len(spans), N_COLUMNS), np.int64)
    tiles[:, Column.ROW] = rows
    tiles[:, Column.N_QUERIES] = n_queries
    tiles[:, Column.POSITION] = positions
    tiles[:, Column.KEY_END] = positions + n_queries
    tiles[:, Column.SPAN] = spans
    tiles[:, Column.PART] = -1
    return tiles, is_large


def _part_keys(n_keys: Ints, is_large: NDArray[np.bool_], cut: Cut) -> Ints:
    """Returns, for each tile, the largest number of keys that one item of work may have."""
    n_all = int(n_keys.sum())
    small = max(cut.min_small_part, math.ceil(n_all / cut.small_shares))
    large = max(cut.min_large_part, math.ceil(n_all / cut.large_shares))
    return np.where(is_large, large, small)


def _divide(tiles: Ints, n_parts: Ints) -> tuple[NDArray[np.int32], int]:
    """Numbers the parts of every tile that is divided into several items of work. The number of a
    tile's first part is written to the column PART of `tiles`.

    Returns the table of divided tokens, and the number of rows that all parts need for their
    results.
    """
    several = np.flatnonzero(n_parts > 1)
    n_queries = tiles[several, Column.N_QUERIES]
    ends = np.cumsum(n_queries * n_parts[several])
    tiles[several, Column.PART] = ends - n_queries * n_parts[several]
    of_token = np.repeat(several, n_queries)  # the tile of each divided token
    places = np.arange(len(of_token)) - np.repeat(np.cumsum(n_queries) - n_queries, n_queries)
    divided = np.empty((len(of_token), N_DIVIDED_COLUMNS), np.int32)
    divided[:, DividedColumn.ROW] = tiles[of_token, Column.ROW] + places
    divided[:, DividedColumn.PART] = tiles[of_token, Column.PART] + places
    divided[:, DividedColumn.STEP] = tiles[of_token, Column.N_QUERIES]
    divided[:, DividedColumn.N_PARTS] = n_parts[of_token]
    return divided, int(ends[-1])


def _parts(tiles: Ints, part_keys: Ints, n_parts: Ints) -> tuple[Ints, Ints]:
    """Returns the items of work of all tiles, and the number of keys of each item.

    An item of a tile has `part_keys` keys. The last item of a tile may have fewer.
    """
    of_part = np.repeat(np.arange(len(tiles)), n_parts)  # the tile of each part
    places = np.arange(len(of_part)) - np.repeat(np.cumsum(n_parts) - n_parts, n_parts)
    parts = tiles[of_part]
    begins, ends = parts[:, Column.KEY_BEGIN], parts[:, Column.KEY_END]
    begins += places * part_keys[of_part]
    np.minimum(ends, begins + part_keys[of_part], out=ends)
    is_divided = parts[:, Column.PART] >= 0
    parts[:, Column.PART] += is_divided * places * parts[:, Column.N_QUERIES]
    return parts, ends - begins


def _with_fixed_shape(tables: _Tables, n_spans: int, n_keys: int, cut: Cut) -> _Tables:
    """Pads `tables` to a size that suffices for any `n_spans` decodes of up to `n_keys` keys
    each."""
    most_parts = -(-n_keys // cut.min_small_part)
    n_more = min(math.floor(cut.small_shares), n_spans * (most_parts - 1))
    n_divided = min(n_spans, n_more)  # each divided span has at least one additional item
    return _Tables(
        _padded(tables.items, n_spans + n_more),
        _padded(tables.divided, n_divided),
        n_part_rows=n_divided + n_more,
        has_large=False,
    )


def _padded(table: NDArray[np.int32], n_rows: int) -> NDArray[np.int32]:
    room = np.zeros((n_rows, table.shape[1]), np.int32)
    room[: len(table)] = table
    return room
