"""Attention of mixed batches against one request and one formula at a time."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels import AttentionForm, AttentionPlan
from kernels.reference import operations as reference
from kernels.upload import uploads_for
from tests.kernels.implementations import (
    COMPILED,
    IMPLEMENTATIONS,
    INTERPRETED,
    NATIVE,
    ON_TORCH,
    Implementation,
    moved,
)


class PagedBatch:
    """Random spans over random storage: no slot that is not theirs holds finite numbers."""

    def __init__(
        self,
        spans: Sequence[tuple[int, int]],
        *,
        n_heads: int = 6,
        n_kv_heads: int = 2,
        head_dim: int = 8,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        on: Implementation = ON_TORCH,
        form: AttentionForm | None = None,
        sinks: Sequence[float] | None = None,
        windows: Sequence[int | None] = (None,),
        value_dim: int | None = None,
    ) -> None:
        """`spans` are (tokens stored before, tokens in the batch).

        Heads have the `sinks` in turn. With `value_dim` values are as many first elements of keys.
        """
        self.form = AttentionForm() if form is None else form
        self.sinks: Tensor | None = None
        if sinks is not None:
            self.sinks = torch.tensor([sinks[i % len(sinks)] for i in range(n_heads)])
        self.windows = windows if self.form.window is None else (*windows, self.form.window)
        generator = torch.Generator().manual_seed(len(spans))
        self.starts = [start for start, _ in spans]
        self.n_tokens = [n for _, n in spans]
        n_blocks = [-(-(start + n) // block_size) for start, n in spans]
        shuffled = torch.randperm(sum(n_blocks) + 3, generator=generator).tolist()
        self.tables = [[shuffled.pop() for _ in range(n)] for n in n_blocks]
        shape = (sum(n_blocks) + 3, block_size, n_kv_heads, head_dim)
        self.key_cache = torch.full(shape, torch.nan, dtype=dtype)
        self.value_cache = torch.full(shape, torch.nan, dtype=dtype)
        n = sum(self.n_tokens)
        # Cut out of one row per token, as from the fused projection.
        rows = torch.randn(n, n_heads + 2 * n_kv_heads, head_dim, generator=generator).to(dtype)
        self.q = rows[:, :n_heads]
        self.k, self.v = rows[:, n_heads:].chunk(2, 1)
        self._store(generator)
        self.on = on
        self._value_dim = value_dim
        if value_dim is not None:
            self.value_cache = self.key_cache[..., :value_dim]

    def _store(self, generator: torch.Generator) -> None:
        first = 0
        for start, n, table in zip(self.starts, self.n_tokens, self.tables, strict=True):
            for cache, new in ((self.key_cache, self.k), (self.value_cache, self.v)):
                sequence = cache[table].flatten(0, 1)
                sequence[:start] = torch.randn(start, *sequence.shape[1:], generator=generator).to(
                    cache.dtype
                )
                sequence[start : start + n] = new[first : first + n]
                cache[table] = sequence.view(len(table), *cache.shape[1:])
            first += n

    def plan(self, key_caches: Sequence[Tensor] = ()) -> AttentionPlan:
        """The plan of layers with these keys, by default its own."""
        width = max(map(len, self.tables))
        padded = np.zeros((len(self.tables), width), dtype=np.int64)
        for row, table in zip(padded, self.tables, strict=True):
            row[: len(table)] = table
        uploads = uploads_for(self.on.device)
        plan = self.on.ops.plan_attention(
            np.array(self.starts),
            np.array(self.n_tokens),
            block_tables=padded,
            key_caches=[each.to(self.on.device) for each in key_caches or [self.key_cache]],
            n_heads=self.q.shape[1],
            windows=self.windows,
            is_causal=self.form.is_causal,
            uploads=uploads,
        )
        uploads.flush()
        return plan

    def attention(self, plan: AttentionPlan | None = None) -> Tensor:
        tensors = (self.q, self.key_cache, self.value_cache)
        q, key_cache, value_cache = (moved(tensor, self.on.device) for tensor in tensors)
        if self._value_dim is not None:
            value_cache = key_cache[..., : self._value_dim]
        sinks = None if self.sinks is None else self.sinks.to(self.on.device)
        plan = plan or self.plan()
        return self.on.ops.attention(q, key_cache, value_cache, plan, self.form, sinks).cpu()

    def reference(self) -> Tensor:
        return reference.attention(
            self.q,
            self.key_cache,
            self.value_cache,
            start_positions=self.starts,
            n_tokens=self.n_tokens,
            block_tables=self.tables,
            window=self.form.window,
            scale=self.form.scale,
            soft_cap=self.form.soft_cap,
            sinks=self.sinks,
            is_causal=self.form.is_causal,
        )


def assert_as_reference(batch: PagedBatch) -> None:
    ours, expected = batch.attention(), batch.reference()
    assert expected.abs().max() < 10  # nothing outside the sequences was read
    assert expected.std() > 0.05
    tolerance = 1e-5 if expected.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


MIXES = {
    "one decode": [(12, 1)],
    "one first token": [(0, 1)],
    "one prompt": [(0, 13)],
    "one chunk": [(7, 6)],
    "decodes of equal length": [(9, 1), (9, 1), (9, 1)],
    "decodes of odd lengths": [(3, 1), (0, 1), (17, 1), (8, 1)],
    "prompts of odd lengths": [(0, 5), (0, 2), (0, 11)],
    "chunks of odd lengths": [(5, 3), (1, 7), (16, 2)],
    "everything": [(0, 9), (6, 1), (4, 5), (0, 2), (13, 1), (0, 1), (8, 8), (2, 1)],
    "decodes too different to share a call": [(900, 1), (3, 1), (700, 1), (1, 1)],
    "prompts too different to share a call": [(0, 90), (0, 3), (0, 60)],
    "chunks too different to share a call": [(300, 40), (2, 2), (100, 60)],
}


@pytest.mark.parametrize("on", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spans", MIXES.values(), ids=MIXES.keys())
def test_mixed_batches(
    spans: list[tuple[int, int]], dtype: torch.dtype, on: Implementation
) -> None:
    assert_as_reference(PagedBatch(spans, dtype=dtype, on=on))


FORMS = {
    "window of one": AttentionForm(window=1),
    "window": AttentionForm(window=7),
    "window of a block": AttentionForm(window=4),
    "window beyond all": AttentionForm(window=5000),
    "scale": AttentionForm(scale=0.5),
    "soft cap": AttentionForm(soft_cap=0.8),
    "all": AttentionForm(window=6, scale=0.7, soft_cap=1.5),
    "both directions": AttentionForm(is_causal=False),
    "capped in both directions": AttentionForm(scale=0.7, soft_cap=1.5, is_causal=False),
}


# Every form of the mix of all spans and every mix in the form of all options; the others take long.
FORMS_OF_MIXES = [
    pytest.param(
        form,
        spans,
        id=f"{name}-{mix}",
        marks=() if name == "all" or mix == "everything" else pytest.mark.thorough,
    )
    for name, form in FORMS.items()
    for mix, spans in MIXES.items()
]


@pytest.mark.parametrize("on", COMPILED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("form", "spans"), FORMS_OF_MIXES)
def test_forms_of_attention(
    form: AttentionForm,
    spans: list[tuple[int, int]],
    dtype: torch.dtype,
    on: Implementation,
) -> None:
    assert_as_reference(PagedBatch(spans, dtype=dtype, on=on, form=form))


def test_attention_in_both_directions_has_no_window() -> None:
    with pytest.raises(ValueError, match="no window"):
        AttentionForm(window=3, is_causal=False)


@pytest.mark.parametrize("on", NATIVE)
@pytest.mark.parametrize("n_threads", [1, 3, 16])
def test_a_text_in_both_directions_is_attended_to_alike_in_any_company(
    n_threads: int, on: Implementation
) -> None:
    form = AttentionForm(is_causal=False)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        alone = PagedBatch([(0, 700)], on=on, form=form)
        torch.set_num_threads(n_threads)
        others = PagedBatch([(0, 90), (0, 700), (0, 3)], on=on, form=form)
        of_alone = slice(90, 790)
        others.q[of_alone], others.k[of_alone], others.v[of_alone] = alone.q, alone.k, alone.v
        others._store(torch.Generator().manual_seed(1))
        together = others.attention()[of_alone]
        torch.set_num_threads(2)
        assert torch.equal(together, alone.attention())
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(together, alone.reference(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("on", COMPILED)
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("spans", [[(0, 1100)], [(700, 900), (0, 5)]], ids=["prompt", "chunk"])
def test_long_spans_are_capped_a_part_at_a_time(
    spans: list[tuple[int, int]], window: int | None, on: Implementation
) -> None:
    form = AttentionForm(soft_cap=1.0, window=window)
    # Long sums of random values are small; the tolerance is absolute.
    batch = PagedBatch(spans, form=form, block_size=16, on=on)
    torch.testing.assert_close(batch.attention(), batch.reference(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("on", IMPLEMENTATIONS)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_a_form_changes_what_is_computed(form: AttentionForm, on: Implementation) -> None:
    plain = PagedBatch(MIXES["everything"], on=on)
    other = PagedBatch(MIXES["everything"], on=on, form=form)
    is_same = form == FORMS["window beyond all"]
    assert torch.equal(plain.attention(), other.attention()) == is_same
    assert_as_reference(other)


# A sink that hardly matters, some that weigh as much as keys, and one that outweighs them all.
SINKS = [-20.0, 0.7, 3.0, -1.5, 8.0]


@pytest.mark.parametrize("on", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_sinks_take_weight_from_keys(
    form: AttentionForm, dtype: torch.dtype, on: Implementation
) -> None:
    batch = PagedBatch(MIXES["everything"], dtype=dtype, on=on, form=form, sinks=SINKS)
    assert_as_reference(batch)
    plain = PagedBatch(MIXES["everything"], dtype=dtype, on=on, form=form).attention()
    assert (batch.attention()[:, 1].abs() < plain[:, 1].abs()).float().mean() > 0.9


@pytest.mark.parametrize("on", IMPLEMENTATIONS)
@pytest.mark.parametrize("spans", [MIXES["everything"], [(300, 1)]], ids=["mix", "decode"])
def test_sinks_of_any_size_leave_numbers(spans: list[tuple[int, int]], on: Implementation) -> None:
    ours = PagedBatch(spans, on=on, sinks=[1e30, -1e30, 200.0]).attention()
    plain = PagedBatch(spans, on=on).attention()
    torch.testing.assert_close(ours[:, 1::3], plain[:, 1::3])
    assert ours[:, ::3].abs().max() < 1e-30
    assert ours[:, 2::3].abs().max() < 1e-30


@pytest.mark.parametrize("on", IMPLEMENTATIONS)
@pytest.mark.parametrize("form", [FORMS["all"], AttentionForm()], ids=["all", "plain"])
def test_one_plan_serves_layers_with_heads_of_several_kinds(
    form: AttentionForm, on: Implementation
) -> None:
    layers = [
        PagedBatch(MIXES["everything"], n_kv_heads=n_kv_heads, head_dim=head_dim, on=on, form=form)
        for n_kv_heads, head_dim in ((2, 8), (6, 20), (1, 8))
    ]
    plan = layers[0].plan(key_caches=[layer.key_cache for layer in layers])
    for layer in layers:
        assert torch.equal(layer.attention(plan), layer.attention())
        assert_as_reference(layer)


@pytest.mark.parametrize("on", COMPILED)
@given(
    spans=st.lists(
        st.tuples(st.integers(0, 600), st.one_of(st.just(1), st.integers(1, 40))),
        min_size=1,
        max_size=6,
    ),
    sinks=st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=6),
    window=st.one_of(st.none(), st.integers(1, 300)),
    soft_cap=st.sampled_from([None, 2.0]),
    heads=st.sampled_from([(1, 1), (5, 1), (6, 3), (4, 4)]),
    block_size=st.sampled_from([1, 5, 16]),
    head_dim=st.sampled_from([8, 33, 64]),
)
def test_any_sinks_of_any_mix(
    on: Implementation,
    spans: list[tuple[int, int]],
    sinks: list[float],
    window: int | None,
    soft_cap: float | None,
    heads: tuple[int, int],
    block_size: int,
    head_dim: int,
) -> None:
    batch = PagedBatch(
        spans,
        n_heads=heads[0],
        n_kv_heads=heads[1],
        head_dim=head_dim,
        block_size=block_size,
        on=on,
        form=AttentionForm(window=window, soft_cap=soft_cap),
        sinks=sinks,
    )
    torch.testing.assert_close(batch.attention(), batch.reference(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("on", NATIVE)
@pytest.mark.parametrize("n_threads", [1, 3, 16])
def test_sinks_count_once_where_keys_are_divided(n_threads: int, on: Implementation) -> None:
    # One K/V head: there are fewer pieces than threads, unless the keys of one are divided.
    batch = PagedBatch(
        [(3000, 1), (0, 200), (900, 7)], n_heads=3, n_kv_heads=1, on=on, sinks=[6.0, 9.0, -3.0]
    )
    before = torch.get_num_threads()
    results = []
    try:
        for n in (n_threads, 2):
            torch.set_num_threads(n)
            results.append(batch.attention())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)
    torch.testing.assert_close(results[0], batch.reference(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("on", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("n_heads", "n_kv_heads", "head_dim", "value_dim"),
    [
        (6, 1, 13, 9),
        (4, 2, 24, 16),
        (3, 1, 96, 64),
        (40, 1, 80, 64),
        (2, 1, 576, 512),
    ],
)
def test_values_that_are_a_part_of_keys(
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    on: Implementation,
) -> None:
    batch = PagedBatch(
        MIXES["everything"],
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=dtype,
        on=on,
    )
    assert batch.attention().shape == (sum(batch.n_tokens), n_heads, value_dim)
    assert_as_reference(batch)


@pytest.mark.parametrize("on", COMPILED)
@given(
    spans=st.lists(
        st.tuples(st.integers(0, 600), st.one_of(st.just(1), st.integers(1, 40))),
        min_size=1,
        max_size=6,
    ),
    window=st.one_of(st.none(), st.integers(1, 300)),
    soft_cap=st.sampled_from([None, 2.0]),
    heads=st.sampled_from([(1, 1), (5, 1), (6, 3), (130, 1)]),
    block_size=st.sampled_from([1, 5, 16]),
    sizes=st.sampled_from([(8, 2), (33, 32), (80, 64), (67, 51)]),
)
def test_any_mix_of_values_that_are_a_part_of_keys(
    on: Implementation,
    spans: list[tuple[int, int]],
    window: int | None,
    soft_cap: float | None,
    heads: tuple[int, int],
    block_size: int,
    sizes: tuple[int, int],
) -> None:
    batch = PagedBatch(
        spans,
        n_heads=heads[0],
        n_kv_heads=heads[1],
        head_dim=sizes[0],
        value_dim=sizes[1],
        block_size=block_size,
        on=on,
        form=AttentionForm(window=window, soft_cap=soft_cap),
    )
    torch.testing.assert_close(batch.attention(), batch.reference(), rtol=1e-5, atol=1e-5)


# Implementations with sizes of blocks; of these one is enough where it takes long.
ON_BLOCKS = [
    pytest.param(
        *on.values,
        size,
        id=f"{on.id}-{size}",
        marks=[*on.marks, pytest.mark.thorough] if size == 1 else on.marks,
    )
    for implementations, sizes in ((COMPILED, (1, 3, 16)), (INTERPRETED, (3,)))
    for on in implementations
    for size in sizes
]


@pytest.mark.parametrize(("on", "block_size"), ON_BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("n_heads", "n_kv_heads", "head_dim"),
    [
        (4, 4, 16),
        (9, 3, 64),
        (5, 1, 10),
        (2, 1, 2),
        (3, 1, 33),
        (4, 4, 80),
        (8, 2, 96),
        (14, 2, 128),
        (4, 1, 256),
        (4, 1, 512),
    ],
)
def test_forms_of_heads_and_blocks(
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    on: Implementation,
) -> None:
    batch = PagedBatch(
        MIXES["everything"],
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        on=on,
    )
    assert_as_reference(batch)


@pytest.mark.parametrize("on", COMPILED)
@given(
    spans=st.lists(
        st.tuples(
            st.one_of(st.just(0), st.integers(0, 60)), st.one_of(st.just(1), st.integers(1, 40))
        ),
        min_size=1,
        max_size=12,
    ),
    head_dim=st.sampled_from([8, 64]),
)
def test_any_mix_of_spans(on: Implementation, spans: list[tuple[int, int]], head_dim: int) -> None:
    assert_as_reference(PagedBatch(spans, head_dim=head_dim, on=on))


@pytest.mark.parametrize("on", COMPILED)
@given(
    spans=st.lists(
        st.tuples(st.integers(0, 60), st.one_of(st.just(1), st.integers(1, 40))),
        min_size=1,
        max_size=12,
    ),
    window=st.integers(1, 70),
    soft_cap=st.sampled_from([None, 2.0]),
    block_size=st.sampled_from([1, 4, 5, 16]),
    head_dim=st.sampled_from([8, 64]),
)
def test_any_window_of_any_mix(
    on: Implementation,
    spans: list[tuple[int, int]],
    window: int,
    soft_cap: float | None,
    block_size: int,
    head_dim: int,
) -> None:
    form = AttentionForm(window=window, soft_cap=soft_cap)
    assert_as_reference(
        PagedBatch(spans, form=form, head_dim=head_dim, block_size=block_size, on=on)
    )


@pytest.mark.parametrize("spans", [[(100, 1)], [(60, 40)], [(90, 70), (3, 1)], [(2000, 3)]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("on", IMPLEMENTATIONS)
def test_blocks_behind_a_window_may_hold_what_is_not_finite(
    on: Implementation, dtype: torch.dtype, spans: list[tuple[int, int]]
) -> None:
    window, block_size = 5, 4
    batch = PagedBatch(
        spans, on=on, dtype=dtype, block_size=block_size, form=AttentionForm(window=window)
    )
    expected = batch.attention()
    for (start, _), table in zip(spans, batch.tables, strict=True):
        behind = table[: max(0, start - window + 1) // block_size]
        batch.key_cache[behind] = torch.nan
        batch.value_cache[behind] = torch.nan
    assert torch.equal(batch.attention(), expected)


@pytest.mark.parametrize("on", IMPLEMENTATIONS)
def test_a_plan_of_other_operations_is_refused(on: Implementation) -> None:
    batch = PagedBatch(MIXES["one decode"], on=on)
    with pytest.raises(TypeError, match="planned with other operations"):
        on.ops.attention(batch.q, batch.key_cache, batch.value_cache, AttentionPlan(), batch.form)


@pytest.mark.parametrize("on", NATIVE)
@pytest.mark.parametrize("n_threads", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_number_of_threads(dtype: torch.dtype, n_threads: int, on: Implementation) -> None:
    spans = [(3000, 1), (0, 200), (900, 7), (40, 1), (1500, 1)]
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        # One K/V head: there are fewer pieces than threads, unless the keys of one are divided.
        for n_kv_heads in (1, 3):
            batch = PagedBatch(spans, n_heads=3, n_kv_heads=n_kv_heads, dtype=dtype, on=on)
            ours, expected = batch.attention(), batch.reference()
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("on", NATIVE)
def test_a_batch_is_attended_to_alike_every_time(on: Implementation) -> None:
    batch = PagedBatch([(2500, 1), (0, 150), (800, 3)], dtype=torch.bfloat16, on=on)
    assert all(torch.equal(batch.attention(), batch.attention()) for _ in range(5))


@pytest.mark.parametrize("on", NATIVE)
def test_other_element_types_go_to_pytorch(on: Implementation) -> None:
    assert_as_reference(PagedBatch(MIXES["everything"], dtype=torch.float64, on=on))
