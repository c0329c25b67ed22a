"""Attention of mixed batches against one request and one formula at a time."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import AttentionMetadata, ops_for, reference

CPU = torch.device("cpu")


class PagedBatch:
    """Random spans over random storage: every slot that is not theirs holds large numbers."""

    def __init__(
        self,
        spans: Sequence[tuple[int, int]],
        *,
        n_heads: int = 6,
        n_kv_heads: int = 2,
        head_dim: int = 8,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
    ) -> None:
        """`spans` are (tokens stored before, tokens in the batch)."""
        generator = torch.Generator().manual_seed(len(spans))
        self.starts = [start for start, _ in spans]
        self.n_tokens = [n for _, n in spans]
        n_blocks = [-(-(start + n) // block_size) for start, n in spans]
        shuffled = torch.randperm(sum(n_blocks) + 3, generator=generator).tolist()
        self.tables = [[shuffled.pop() for _ in range(n)] for n in n_blocks]
        form = (sum(n_blocks) + 3, block_size, n_kv_heads, head_dim)
        self.key_cache = torch.full(form, 1e4, dtype=dtype)
        self.value_cache = torch.full(form, 1e4, dtype=dtype)
        n = sum(self.n_tokens)
        # Cut out of one row per token, as from the fused projection.
        rows = torch.randn(n, n_heads + 2 * n_kv_heads, head_dim, generator=generator).to(dtype)
        self.q = rows[:, :n_heads]
        self.k, self.v = rows[:, n_heads:].chunk(2, 1)
        self._store(generator)
        self.device = device

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

    def plan(self) -> AttentionMetadata:
        width = max(map(len, self.tables))
        padded = np.zeros((len(self.tables), width), dtype=np.int64)
        for row, table in zip(padded, self.tables, strict=True):
            row[: len(table)] = table
        return ops_for(self.device).plan_attention(
            np.array(self.starts),
            np.array(self.n_tokens),
            block_tables=padded,
            key_cache=self.key_cache.to(self.device),
        )

    def attention(self) -> Tensor:
        tensors = (self.q, self.k, self.v, self.key_cache, self.value_cache)
        q, k, v, key_cache, value_cache = (tensor.to(self.device) for tensor in tensors)
        plan = self.plan()
        return ops_for(self.device).attention(q, k, v, key_cache, value_cache, plan).cpu()

    def reference(self) -> Tensor:
        return reference.attention(
            self.q,
            self.key_cache,
            self.value_cache,
            start_positions=self.starts,
            n_tokens=self.n_tokens,
            block_tables=self.tables,
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


@pytest.mark.parametrize("device", [CPU, pytest.param("cuda", marks=pytest.mark.gpu)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spans", MIXES.values(), ids=MIXES.keys())
def test_mixed_batches(
    spans: list[tuple[int, int]], dtype: torch.dtype, device: torch.device | str
) -> None:
    assert_as_reference(PagedBatch(spans, dtype=dtype, device=torch.device(device)))


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize(
    ("n_heads", "n_kv_heads", "head_dim"), [(4, 4, 16), (9, 3, 64), (5, 1, 10), (2, 1, 2)]
)
def test_forms_of_heads_and_blocks(
    n_heads: int, n_kv_heads: int, head_dim: int, block_size: int
) -> None:
    batch = PagedBatch(
        MIXES["everything"],
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
    )
    assert_as_reference(batch)


@given(
    spans=st.lists(
        st.tuples(
            st.one_of(st.just(0), st.integers(0, 60)), st.one_of(st.just(1), st.integers(1, 40))
        ),
        min_size=1,
        max_size=12,
    )
)
@settings(max_examples=40, deadline=None)
def test_any_mix_of_spans(spans: list[tuple[int, int]]) -> None:
    assert_as_reference(PagedBatch(spans))


@given(
    spans=st.lists(
        st.tuples(st.integers(0, 3000), st.one_of(st.just(1), st.integers(1, 64))),
        min_size=1,
        max_size=40,
    )
)
@settings(max_examples=40, deadline=None)
def test_groups_hold_every_token_once(spans: list[tuple[int, int]]) -> None:
    plan = PagedBatch(spans, n_heads=1, n_kv_heads=1, head_dim=2, block_size=64).plan()
    n_tokens = sum(n for _, n in spans)
    whole = torch.arange(n_tokens)
    places = [whole if group.tokens is None else group.tokens for group in plan.decodes]
    places += [group.places for group in plan.prompts]
    places += [group.places for group in plan.chunks]
    assert torch.cat(places).sort().values.tolist() == list(range(n_tokens))


def test_short_contexts_share_one_call() -> None:
    plan = PagedBatch([(40 + i % 5, 1) for i in range(32)]).plan()
    assert len(plan.decodes) == 1


def test_a_call_is_not_mostly_padding() -> None:
    plan = PagedBatch([(900, 1), (3, 1), (700, 1), (1, 1)]).plan()
    places = [group.tokens.tolist() for group in plan.decodes if group.tokens is not None]
    assert places == [[0, 2], [1, 3]]


def test_long_contexts_do_not_overflow_the_cache_together() -> None:
    # 1 MiB holds 512 keys of 8 heads of 64 in float32.
    plan = PagedBatch([(249, 1)] * 8, n_heads=8, n_kv_heads=8, head_dim=64).plan()
    assert [group.mask for group in plan.decodes] == [None] * 4
    assert [len(group.blocks) for group in plan.decodes] == [2 * 63] * 4
