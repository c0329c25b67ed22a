"""Tokens are counted for the requests that have penalties."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.forms.sampling_columns import IN_PROMPT
from services.worker.engine.token_counts import CountedTokens, TokenCounts

CPU = torch.device("cpu")
VOCAB_SIZE = 11


def counted(prompt: list[tuple[int, int]], generated: list[tuple[int, int]]) -> CountedTokens:
    """Pairs of a place in the batch and a row of the counts."""
    return CountedTokens(
        prompt_tokens=torch.tensor([place for place, _ in prompt], dtype=torch.int64),
        prompt_rows=torch.tensor([row for _, row in prompt], dtype=torch.int64),
        generated_tokens=torch.tensor([place for place, _ in generated], dtype=torch.int64),
        generated_rows=torch.tensor([row for _, row in generated], dtype=torch.int64),
    )


def test_a_prompt_is_marked_and_what_is_generated_is_counted() -> None:
    counts = TokenCounts(VOCAB_SIZE, CPU)
    first, second = counts.reserve(), counts.reserve()
    token_ids = torch.tensor([5, 5, 7, 3, 7, 7])
    counts.add(token_ids, counted([(0, first), (1, first), (2, second)], []))
    counts.add(token_ids, counted([(4, first)], [(2, first), (3, second), (5, first)]))
    assert counts.tensor[first].nonzero()[:, 0].tolist() == [5, 7]
    assert counts.tensor[first, [5, 7]].tolist() == [IN_PROMPT, IN_PROMPT + 2]
    assert counts.tensor[second, [3, 7]].tolist() == [1, IN_PROMPT]


@given(
    batches=st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, VOCAB_SIZE - 1))), max_size=6
    )
)
def test_counts_are_how_often_tokens_occur(batches: list[list[tuple[int, int]]]) -> None:
    counts = TokenCounts(VOCAB_SIZE, CPU)
    rows = [counts.reserve() for _ in range(3)]
    for batch in batches:
        token_ids = torch.tensor([token for _, token in batch], dtype=torch.int64)
        counts.add(token_ids, counted([], [(i, rows[row]) for i, (row, _) in enumerate(batch)]))
    expected = Counter(pair for batch in batches for pair in batch)
    assert counts.tensor[rows].tolist() == [
        [expected[row, token] for token in range(VOCAB_SIZE)] for row in range(3)
    ]


def test_rows_are_as_many_as_there_are_at_once_and_begin_at_zero() -> None:
    counts = TokenCounts(VOCAB_SIZE, CPU)
    assert counts.tensor.numel() == 0, "who has no penalties pays nothing"
    token_ids = torch.tensor([4])
    rows = []
    for _ in range(70):
        rows.append(counts.reserve())
        counts.add(token_ids, counted([], [(0, rows[-1])]))
    assert len(set(rows)) == counts.n_reserved == 70
    assert counts.tensor[rows, 4].tolist() == [1] * 70, "growing keeps what has been counted"
    size = len(counts.tensor)
    for _ in range(200):
        counts.release(rows.pop())
        rows.append(counts.reserve())
        assert not counts.tensor[rows[-1]].any()
    assert len(counts.tensor) == size < 2 * 70
    for row in rows:
        counts.release(row)
    assert counts.n_reserved == 0


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_counting_does_not_wait_for_a_gpu() -> None:
    device = torch.device("cuda")
    counts = TokenCounts(VOCAB_SIZE, device)
    of_batch = counted([(0, 0)], [(1, 0), (1, 0)])
    there = CountedTokens(
        prompt_tokens=of_batch.prompt_tokens.to(device),
        prompt_rows=of_batch.prompt_rows.to(device),
        generated_tokens=of_batch.generated_tokens.to(device),
        generated_rows=of_batch.generated_rows.to(device),
    )
    token_ids = torch.tensor([2, 3], device=device)
    try:
        torch.cuda.set_sync_debug_mode("error")
        counts.reserve()
        counts.add(token_ids, there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert counts.tensor[0, [2, 3]].tolist() == [IN_PROMPT, 2]
