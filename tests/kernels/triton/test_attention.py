"""Triton's attention against one request and one formula at a time, and its plan against counting.

Where there is no CUDA device the kernels are interpreted, so shapes are as small as the cases need.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels import AttentionForm
from kernels.reference import operations as reference
from kernels.upload import uploads_for
from tests.kernels.implementations import CPU, CUDA, moved

pytest.importorskip("triton")

from kernels.triton.attention import attention
from kernels.triton.attention_plan import (
    AttentionItems,
    Column,
    Cut,
    DividedColumn,
    cut_batch,
    cut_for,
    items_for,
    plan_attention,
)
from kernels.triton.tuning import Device, Kind, Tiles, entry, save, tiles_for

DEVICE = CUDA if torch.cuda.is_available() else CPU
pytestmark = pytest.mark.gpu if torch.cuda.is_available() else pytest.mark.triton

# Tiles so small that a few dozen tokens have several of each kind, and steps of each kind.
CUT = Cut(
    small=Tiles(rows=16, keys=16, n_warps=4, n_stages=2),
    large=Tiles(rows=32, keys=16, n_warps=4, n_stages=2),
    group_size=2,
    small_shares=4,
    large_shares=4,
)
# Whatever is longer than a part's least length is divided.
DIVIDING = replace(CUT, small_shares=1e9, large_shares=1e9, min_small_part=64, min_large_part=64)

Spans = Sequence[tuple[int, int]]


class Batch:
    """Random spans; every slot that none of their queries sees holds NaN."""

    def __init__(
        self,
        spans: Spans,
        *,
        form: AttentionForm | None = None,
        sinks: Sequence[float] | None = None,
        cut: Cut = CUT,
        n_kv_heads: int = 1,
        head_dim: int = 16,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        more_columns: int = 0,
        value_dim: int | None = None,
        n_groups: int = 1,
    ) -> None:
        """`spans` are (tokens stored before, tokens in the batch).

        With `value_dim` values are as many first elements of keys. The heads that share a K/V head
        are `n_groups` of those that `cut` says.
        """
        self.form = AttentionForm() if form is None else form
        self.cut = cut
        self.starts, self.n_tokens = np.array(spans).T
        n_heads = n_kv_heads * n_groups * cut.group_size
        self.sinks: Tensor | None = None
        if sinks is not None:
            self.sinks = torch.tensor([sinks[i % len(sinks)] for i in range(n_heads)])
        generator = torch.Generator().manual_seed(len(spans))
        n_blocks = -(-(self.starts + self.n_tokens) // block_size)
        *ids, unused = torch.randperm(int(n_blocks.sum()) + 1, generator=generator).tolist()
        self.tables = [[ids.pop() for _ in range(n)] for n in n_blocks]
        shape = (int(n_blocks.sum()) + 1, block_size, n_kv_heads, head_dim)
        self.caches = [torch.full(shape, math.nan, dtype=dtype) for _ in range(2)]
        if value_dim is not None:
            self.caches[1] = self.caches[0][..., :value_dim]
        for start, n, table in zip(self.starts, self.n_tokens, self.tables, strict=True):
            first = 0 if self.form.window is None else max(start - self.form.window + 1, 0)
            for cache in self.caches:
                sequence = cache[table].flatten(0, 1)
                seen = sequence[first : start + n]
                seen.copy_(torch.randn(seen.shape, generator=generator))
                cache[table] = sequence.view(len(table), *cache.shape[1:])
        # Cut out of one row per token, as from the fused projection.
        n = int(self.n_tokens.sum())
        rows = torch.randn(n, n_heads + 2 * n_kv_heads, head_dim, generator=generator).to(dtype)
        self.q = rows[:, :n_heads]
        self.padded = np.full((len(spans), n_blocks.max() + more_columns), unused)
        for row, table in zip(self.padded, self.tables, strict=True):
            row[: len(table)] = table

    def plan(
        self, *, windows: Sequence[int | None] = (), has_fixed_shape: bool = False
    ) -> AttentionItems:
        uploads = uploads_for(DEVICE)
        plan = cut_batch(
            self.starts,
            self.n_tokens,
            block_tables=self.padded,
            block_size=self.caches[0].shape[1],
            windows=(*windows, self.form.window),
            is_causal=self.form.is_causal,
            cut=self.cut,
            uploads=uploads,
            has_fixed_shape=has_fixed_shape,
        )
        uploads.flush()
        return plan

    def attention(self, plan: AttentionItems) -> Tensor:
        q, keys, values = (moved(tensor, DEVICE) for tensor in (self.q, *self.caches))
        sinks = None if self.sinks is None else self.sinks.to(DEVICE)
        return attention(q, keys, values, plan, self.form, sinks).cpu()

    def reference(self) -> Tensor:
        keys, values = (cache.nan_to_num(nan=0.0) for cache in self.caches)
        return reference.attention(
            self.q,
            keys,
            values,
            start_positions=self.starts.tolist(),
            n_tokens=self.n_tokens.tolist(),
            block_tables=self.tables,
            window=self.form.window,
            scale=self.form.scale,
            soft_cap=self.form.soft_cap,
            sinks=self.sinks,
            is_causal=self.form.is_causal,
        )

    def assert_as_reference(self, plan: AttentionItems | None = None) -> None:
        ours, expected = self.attention(plan or self.plan()), self.reference()
        tolerance = 1e-5 if expected.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


MIXES = {
    "one first token": [(0, 1)],
    "decodes around the ends of blocks and steps": [(n, 1) for n in (14, 15, 16, 30, 31, 32)],
    "prompts around the ends of tiles": [(0, 8), (0, 9), (0, 16), (0, 17), (0, 33)],
    "chunks": [(5, 20), (16, 33), (47, 9)],
    "chunks that begin around the ends of steps": [(14, 9), (15, 9), (30, 9)],
    "everything": [(0, 20), (37, 1), (21, 18), (0, 1), (3, 4)],
}
FORMS = {
    "plain": AttentionForm(),
    "window of one": AttentionForm(window=1),
    "window": AttentionForm(window=19),
    "window beyond all": AttentionForm(window=5000),
    "scale": AttentionForm(scale=0.5),
    "soft cap": AttentionForm(soft_cap=0.8),
    "all": AttentionForm(window=7, scale=0.7, soft_cap=1.5),
    "both directions": AttentionForm(is_causal=False),
}


@pytest.mark.parametrize("spans", MIXES.values(), ids=MIXES.keys())
def test_mixed_batches(spans: Spans) -> None:
    Batch(spans).assert_as_reference()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_forms_of_attention(form: AttentionForm) -> None:
    Batch(MIXES["everything"], form=form).assert_as_reference()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_sizes_of_heads(head_dim: int, dtype: torch.dtype) -> None:
    Batch([(40, 1), (3, 10)], head_dim=head_dim, dtype=dtype).assert_as_reference()


@pytest.mark.parametrize(
    ("group_size", "n_kv_heads", "rows"), [(1, 3, 16), (3, 2, 16), (7, 1, 16), (20, 2, 32)]
)
def test_groups_of_heads(group_size: int, n_kv_heads: int, rows: int) -> None:
    tiles = replace(CUT.small, rows=rows)
    cut = replace(CUT, small=tiles, large=tiles, group_size=group_size)
    Batch([(20, 1), (9, 18)], cut=cut, n_kv_heads=n_kv_heads).assert_as_reference()


@pytest.mark.parametrize("block_size", [1, 3, 24, 64])
def test_sizes_of_blocks(block_size: int) -> None:
    Batch(MIXES["everything"], block_size=block_size).assert_as_reference()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(24, 16), (13, 9), (80, 64), (576, 512)], ids=str
)
def test_values_that_are_a_part_of_keys(head_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    batch = Batch([(40, 1), (3, 10)], head_dim=head_dim, value_dim=value_dim, dtype=dtype)
    batch.assert_as_reference()


@pytest.mark.parametrize("value_dim", [None, 10])
def test_heads_that_are_too_many_for_a_tile(value_dim: int | None) -> None:
    batch = Batch(
        [(200, 1), (63, 1), (150, 17)],
        n_kv_heads=2,
        n_groups=3,
        value_dim=value_dim,
        sinks=[4.0, -2.0, 7.5, 0.0, 1.0],
        cut=DIVIDING,
    )
    batch.assert_as_reference()


def test_heads_are_divided_into_groups_that_a_tile_holds() -> None:
    device = Device("none", capability=90, n_multiprocessors=132)
    for n_sharing, group_size in ((128, 64), (16, 16), (80, 40), (4, 4)):
        cut = cut_for(n_sharing, 1, 576, torch.bfloat16, device)
        assert cut.group_size == group_size
        assert cut.small.rows >= group_size <= cut.large.rows


def test_values_that_are_neither_keys_nor_as_large_are_refused() -> None:
    batch = Batch([(3, 1)])
    with pytest.raises(ValueError, match="values"):
        attention(batch.q, batch.caches[0], batch.caches[1][..., :8].clone(), batch.plan())


@pytest.mark.parametrize("window", [None, 1, 65, 100])
def test_divided_contexts(window: int | None) -> None:
    form = AttentionForm(window=window)
    batch = Batch([(200, 1), (63, 1), (150, 17), (64, 1)], form=form, cut=DIVIDING)
    # The parts are those that a layer without a window has.
    plan = batch.plan(windows=(None,))
    assert plan.divided is not None
    batch.assert_as_reference(plan)


def test_divided_contexts_in_both_directions() -> None:
    form = AttentionForm(is_causal=False)
    batch = Batch([(0, 130), (0, 7), (0, 65)], form=form, cut=DIVIDING)
    plan = batch.plan()
    assert plan.divided is not None
    batch.assert_as_reference(plan)


def test_a_plan_for_the_other_direction_is_refused() -> None:
    batch = Batch([(0, 5)])
    plan = batch.plan()
    batch.form = AttentionForm(is_causal=False)
    with pytest.raises(ValueError, match="is_causal is True in the plan, False in a layer"):
        batch.attention(plan)


@pytest.mark.parametrize("window", [None, 100])
def test_sinks_count_once_where_keys_are_divided(window: int | None) -> None:
    # The window hides whole parts.
    batch = Batch(
        [(200, 1), (63, 1), (150, 17), (64, 1)],
        form=AttentionForm(window=window),
        sinks=[4.0, -2.0, 7.5],
        n_kv_heads=2,
        cut=DIVIDING,
    )
    plan = batch.plan(windows=(None,))
    assert plan.divided is not None
    batch.assert_as_reference(plan)


def test_many_parts_of_a_token() -> None:
    # More than are combined at once, and the last ones weigh most.
    batch = Batch([(64 * 18, 1), (3, 1)], cut=DIVIDING, block_size=64)
    batch.caches[0][batch.tables[0][17:]] *= 4
    batch.assert_as_reference()


def test_heads_of_an_odd_size_are_divided() -> None:
    batch = Batch([(100, 1)], cut=DIVIDING, head_dim=80, n_kv_heads=2, dtype=torch.bfloat16)
    batch.assert_as_reference()


# A padding span is the first token of a sequence.
FIXED = [[(0, 1)] * 3, [(200, 1), (0, 1), (0, 1)], [(90, 1), (130, 1), (210, 1)]]


@pytest.mark.parametrize("spans", FIXED, ids=["padding", "one decode", "decodes"])
def test_decodes_in_a_fixed_shape(spans: Spans) -> None:
    batch = Batch(spans, cut=DIVIDING)
    batch.assert_as_reference(batch.plan(has_fixed_shape=True))


def test_what_is_not_a_number_stays_visible() -> None:
    batch = Batch([(200, 1), (30, 1)], cut=DIVIDING)
    batch.caches[1][batch.tables[0][6], 0] = math.nan  # the value of position 96
    assert batch.attention(batch.plan()).isnan().flatten(1).all(1).tolist() == [True, False]


def counted(plan: AttentionItems, window: int | None, n_tokens: int, n_keys: int) -> Tensor:
    """How often the items attend from each token of the batch to each position of its sequence."""
    counts = torch.zeros(n_tokens, n_keys, dtype=torch.int64)
    for item in plan.items.cpu().tolist():
        for i in range(item[Column.N_QUERIES]):
            position = item[Column.POSITION] + i
            end = min(item[Column.KEY_END], position + 1)
            begin = max(item[Column.KEY_BEGIN], 0 if window is None else position - window + 1)
            counts[item[Column.ROW] + i, begin : max(begin, end)] += 1
    return counts


def expected_counts(spans: Spans, window: int | None, n_keys: int) -> Tensor:
    positions = torch.cat([torch.arange(start, start + n) for start, n in spans])[:, None]
    keys = torch.arange(n_keys)
    is_seen = keys <= positions
    if window is not None:
        is_seen &= keys > positions - window
    return is_seen.long()


def assert_parts_are_combined(plan: AttentionItems) -> None:
    """Every row of the parts is written by one item and read for the token that it is of."""
    written = {
        item[Column.PART] + i: item[Column.ROW] + i
        for item in plan.items.cpu().tolist()
        if item[Column.PART] >= 0
        for i in range(item[Column.N_QUERIES])
    }
    divided = [] if plan.divided is None else plan.divided.cpu().tolist()
    read = {
        token[DividedColumn.PART] + i * token[DividedColumn.STEP]: token[DividedColumn.ROW]
        for token in divided
        for i in range(token[DividedColumn.N_PARTS])
    }
    assert read == written
    assert len(read) == sum(token[DividedColumn.N_PARTS] for token in divided)
    assert all(row < plan.n_part_rows for row in read)


SPANS = st.lists(
    st.tuples(
        st.one_of(st.just(0), st.integers(0, 700)), st.one_of(st.just(1), st.integers(1, 60))
    ),
    min_size=1,
    max_size=10,
)


@given(
    spans=SPANS,
    window=st.one_of(st.none(), st.integers(1, 800)),
    wider=st.one_of(st.none(), st.integers(1, 800)),
    group_size=st.sampled_from([1, 2, 3, 16]),
    n_shares=st.sampled_from([0.5, 3, 20, 1e9]),
    least=st.integers(64, 130),
)
def test_items_attend_from_each_token_to_each_key_once(
    spans: Spans,
    window: int | None,
    wider: int | None,
    group_size: int,
    n_shares: float,
    least: int,
) -> None:
    cut = replace(
        CUT,
        group_size=group_size,
        small_shares=n_shares,
        large_shares=n_shares / 2,
        min_small_part=least,
        min_large_part=2 * least,
    )
    batch = Batch(spans, cut=cut, form=AttentionForm(window=window), head_dim=1)
    windows = () if wider is None else (max(wider, window or 1),)
    plan = batch.plan(windows=windows)
    n_keys = max(start + n for start, n in spans)
    counts = counted(plan, window, sum(n for _, n in spans), n_keys)
    assert torch.equal(counts, expected_counts(spans, window, n_keys))
    assert_parts_are_combined(plan)


@given(
    starts=st.lists(st.integers(0, 2000), min_size=1, max_size=40),
    n_shares=st.sampled_from([0.5, 3, 20, 99.5, 1e9]),
    least=st.sampled_from([64, 100]),
)
def test_a_fixed_shape_holds_any_lengths(starts: list[int], n_shares: float, least: int) -> None:
    cut = replace(CUT, small_shares=n_shares, min_small_part=least)
    shapes = []
    for spans in ([(start, 1) for start in starts], [(2000, 1)] * len(starts)):
        columns = 126 - (max(start for start, _ in spans) // 16 + 1)
        batch = Batch(spans, cut=cut, head_dim=1, more_columns=columns)
        plan = batch.plan(has_fixed_shape=True)
        shapes.append((plan.items.shape, plan.divided is None, plan.n_part_rows, plan.large))
        assert plan.block_tables.shape == (len(starts), 126)
        n_keys = max(start for start, _ in spans) + 1
        counts = counted(plan, None, len(starts), n_keys)
        assert torch.equal(counts, expected_counts(spans, None, n_keys))
        assert_parts_are_combined(plan)
    assert shapes[0] == shapes[1]


def test_long_items_come_first() -> None:
    items = Batch([(30, 1), (0, 40), (300, 1)], cut=DIVIDING).plan().items
    n_keys = items[:, Column.KEY_END] - items[:, Column.KEY_BEGIN]
    assert n_keys.tolist() == sorted(n_keys.tolist(), reverse=True)


def test_contexts_are_divided_where_there_are_few_of_them() -> None:
    few, many = Batch([(500, 1)] * 2), Batch([(500, 1)] * 8)
    few.cut = many.cut = replace(CUT, small_shares=8, min_small_part=64)
    assert len(few.plan().items) == 8
    assert many.plan().divided is None


def test_a_long_context_among_short_ones_is_divided() -> None:
    batch = Batch([(1000, 1)] + [(50, 1)] * 7, cut=replace(CUT, small_shares=8, min_small_part=64))
    n_items = torch.bincount(batch.plan().items[:, Column.SPAN]).tolist()
    assert n_items == [6] + [1] * 7


def test_the_plan_of_a_model_has_a_part_for_every_multiprocessor() -> None:
    key_cache = torch.zeros(1, 16, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    plan = plan_attention(
        np.array([8191]),
        np.array([1]),
        block_tables=np.zeros((1, 512), np.int64),
        key_caches=[key_cache],
        n_heads=32,
        uploads=uploads_for(DEVICE),
    )
    plan = items_for(plan, key_cache)
    assert plan.large is None
    assert plan.items.shape[0] == 32  # of 256 keys, for each of 8 heads


def test_a_plan_is_refused_for_heads_that_it_lacks() -> None:
    caches = [
        torch.zeros(1, 16, n_heads, size, device=DEVICE) for n_heads, size in ((4, 16), (2, 32))
    ]
    plan = plan_attention(
        np.array([0]),
        np.array([1]),
        block_tables=np.zeros((1, 1), np.int64),
        key_caches=caches,
        n_heads=4,
        uploads=uploads_for(DEVICE),
    )
    assert items_for(plan, caches[1]).group_size == 2
    other = torch.zeros(1, 16, 2, 16, device=DEVICE)
    with pytest.raises(
        ValueError, match=r"2 K/V heads of size 16, .* for 4 of size 16, 2 of size 32"
    ):
        items_for(plan, other)


def test_tiles_that_were_measured_on_a_device_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    measured = Tiles(rows=16, keys=512, n_warps=1, n_stages=9)
    path = save("Some GPU/1", {entry(Kind.DECODES, 96, torch.float16): measured})
    assert tiles_for(Kind.DECODES, 96, torch.float16, Device("Some GPU/1", 90, 1)) == measured
    other = replace(measured, n_warps=2)
    assert save("Some GPU/1", {entry(Kind.SPANS, 64, torch.float16): other}) == path
    save("Some GPU/1", {entry(Kind.SPANS, 96, torch.float32): other})
    # A process reads a file once.
    path.rename(path.with_name("Some_GPU_2.json"))
    device = Device("Some GPU/2", capability=90, n_multiprocessors=1)
    assert tiles_for(Kind.DECODES, 96, torch.float16, device) == measured
    assert tiles_for(Kind.SPANS, 64, torch.float16, device) == other
    assert tiles_for(Kind.SPANS, 96, torch.float32, device) == other
    assert tiles_for(Kind.SPANS, 96, torch.float16, device) != measured
