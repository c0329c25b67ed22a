"""How the attention of one mixed batch is cut into items of work.

An item is a tile of neighbouring queries of one span with the keys that they see, or a part of
these. Spans that fit the small tile are one tile each: decodes, and little more. Keys are divided
where a tile would still be at work when the rest of the device has nothing left to do: an item has
at most a fair share of the keys of all tiles, several shares per multiprocessor, but no part is
shorter than what it costs to combine it. Long items come first.

One table serves all layers with heads of one kind: a layer with a sliding window skips the keys
before it. Layers of several kinds have a table for each.

A captured graph needs shapes that do not depend on what is in a batch. Where an item has at most
the n-th part of all keys, there are at most n items more than spans, however the lengths are
distributed; so the table has that much room, and items that are not needed have no queries.
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
    """The columns of the table of items; all but SPAN are numbers of tokens."""

    ROW = 0  # of q, where the first query is
    N_QUERIES = 1  # 0: nothing is to be done
    POSITION = 2  # of the first query in its sequence
    KEY_BEGIN = 3
    KEY_END = 4
    SPAN = 5  # row of the block tables
    PART = 6  # row of the parts, where the first query's result goes; -1: the result is whole


class DividedColumn(IntEnum):
    """The columns of the table of tokens whose keys are divided."""

    ROW = 0  # of q
    PART = 1  # row of the first part
    STEP = 2  # from a part to the next
    N_PARTS = 3  # 0: nothing is to be done


N_COLUMNS = 8  # of which the last is unused: rows of 32 bytes
N_DIVIDED_COLUMNS = len(DividedColumn)

# Fair shares per multiprocessor. Small tiles wait for memory, and many wait better than few; parts
# of large tiles are costly, so that a tile is divided only if it would be the last by far.
_SMALL_SHARES = 6
_LARGE_SHARES = 2

# Keys of the shortest part. A small tile's result is as much memory as a few dozen keys; to write
# and combine a large one's takes as long as attending to some hundred keys.
_MIN_SMALL_PART = 256
_MIN_LARGE_PART = 1024

# Parts begin at multiples of this many keys, so that few blocks belong to two of them.
_PART_STEP = 64


@dataclass(frozen=True, slots=True)
class Cut:
    """The settings by which batches are cut."""

    small: Tiles
    large: Tiles
    group_size: int  # query heads of a program, which share a K/V head
    small_shares: float  # shares of all keys, for each group of heads
    large_shares: float
    min_small_part: int = _MIN_SMALL_PART  # keys; _PART_STEP or more
    min_large_part: int = _MIN_LARGE_PART

    @property
    def small_tokens(self) -> int:
        """The number of queries that fit a small tile."""
        return self.small.rows // self.group_size

    @property
    def large_tokens(self) -> int:
        """The number of queries that fit a large tile."""
        return self.large.rows // self.group_size


@dataclass(frozen=True, slots=True)
class AttentionItems(AttentionPlan):
    """The items of one batch, and which parts make up its divided tokens."""

    items: Tensor  # [n_items, N_COLUMNS] int32
    block_tables: Tensor  # [n_spans, n_columns] int32
    divided: Tensor | None  # [n_divided, N_DIVIDED_COLUMNS] int32; None: no token is
    n_part_rows: int
    group_size: int  # query heads of a program
    small: Tiles
    large: Tiles | None  # None: every tile is a small one


@dataclass(frozen=True, slots=True)
class ItemsOfKinds(AttentionPlan):
    """The items of one batch for layers of several kinds of heads, each of which is cut its way."""

    of_kind: Mapping[tuple[int, int], AttentionItems]  # by K/V heads and their size


@dataclass(frozen=True, slots=True)
class _Tables:
    """The tables of a plan, on the host."""

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
    uploads: Uploads,
    has_fixed_shape: bool = False,
) -> AttentionPlan:
    """Implements `kernels.ops.PlanAttention`; any window up to the widest can be used.

    With `has_fixed_shape` every span is one token; all shapes, and with them the launches, then
    depend on nothing but the number of spans and the width of `block_tables`.
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
            cut=cut,
            uploads=uploads,
            has_fixed_shape=has_fixed_shape,
        )
    return next(iter(of_kind.values())) if len(of_kind) == 1 else ItemsOfKinds(of_kind)


def items_for(plan: AttentionPlan, key_cache: Tensor) -> AttentionItems:
    """Returns the items of a layer with these keys; raises TypeError for a plan of other
    operations."""
    if isinstance(plan, ItemsOfKinds):
        n_kv_heads, head_dim = key_cache.shape[2:]
        return plan.of_kind[n_kv_heads, head_dim]
    if not isinstance(plan, AttentionItems):
        raise TypeError(f"the batch was planned with other operations: {type(plan).__name__}")
    return plan


def cut_for(
    n_sharing: int, n_kv_heads: int, head_dim: int, dtype: torch.dtype, device: Device
) -> Cut:
    """Returns how batches of a model, of which `n_sharing` query heads share a K/V head, are cut on
    `device`."""
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
    """Returns `tiles`, with as many rows as a token needs at least."""
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
    cut: Cut,
    uploads: Uploads,
    has_fixed_shape: bool,
) -> AttentionItems:
    """Returns the plan of a batch that is cut by `cut`; see `plan_attention`."""
    widest = None if None in windows else max(w for w in windows if w is not None)
    n_columns = block_tables.shape[1]
    if not has_fixed_shape:
        n_columns = -(-int((start_positions + n_tokens).max()) // block_size)
    tables = _tables(start_positions, n_tokens, widest, cut)
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
    )


def _tables(starts: Ints, n_tokens: Ints, widest: int | None, cut: Cut) -> _Tables:
    tiles, is_large = _tiles(starts, n_tokens, cut)
    if widest is not None:
        first_seen = np.maximum(tiles[:, Column.POSITION] - (widest - 1), 0)
        tiles[:, Column.KEY_BEGIN] = first_seen // _PART_STEP * _PART_STEP
    n_keys = tiles[:, Column.KEY_END] - tiles[:, Column.KEY_BEGIN]
    part_keys = _part_keys(n_keys, is_large, cut)
    n_parts = -(-n_keys // part_keys)
    divided, n_part_rows = np.empty((0, N_DIVIDED_COLUMNS), np.int32), 0
    if n_parts.max() > 1:
        part_keys = -(-n_keys // (n_parts * _PART_STEP)) * _PART_STEP  # equal ones
        n_parts = -(-n_keys // part_keys)
        divided, n_part_rows = _divide(tiles, n_parts)
        tiles, n_keys = _parts(tiles, part_keys, n_parts)
    longest_first = np.argsort(-n_keys, kind="stable")
    return _Tables(
        tiles[longest_first].astype(np.int32), divided, n_part_rows, bool(is_large.any())
    )


def _tiles(starts: Ints, n_tokens: Ints, cut: Cut) -> tuple[Ints, NDArray[np.bool_]]:
    """Returns all tiles, each with all keys up to its last query, and which of them are large."""
    n_spans = len(n_tokens)
    is_large = n_tokens > cut.small_tokens
    first_rows = np.cumsum(n_tokens) - n_tokens
    if is_large.any():
        n_tiles = np.where(is_large, -(-n_tokens // cut.large_tokens), 1)
        spans = np.repeat(np.arange(n_spans), n_tiles)
        places = np.arange(len(spans)) - np.repeat(np.cumsum(n_tiles) - n_tiles, n_tiles)
        skipped = places * cut.large_tokens  # of the span's tokens, by the tile
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
    """Returns the most keys of an item of each tile."""
    n_all = int(n_keys.sum())
    small = max(cut.min_small_part, math.ceil(n_all / cut.small_shares))
    large = max(cut.min_large_part, math.ceil(n_all / cut.large_shares))
    return np.where(is_large, large, small)


def _divide(tiles: Ints, n_parts: Ints) -> tuple[NDArray[np.int32], int]:
    """Gives the tiles of several parts their first rows.

    Returns the table of divided tokens and the number of rows of all parts.
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
    """Returns the parts of all tiles, of `part_keys` each or less for the last, and their keys."""
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
    """Returns `tables` with the room that any `n_spans` decodes of up to `n_keys` keys need."""
    most_parts = -(-n_keys // cut.min_small_part)
    n_more = min(math.floor(cut.small_shares), n_spans * (most_parts - 1))
    n_divided = min(n_spans, n_more)  # who is divided has one item more at least
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
