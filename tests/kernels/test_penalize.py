"""Penalties, of every implementation, against the slow version and others' arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels import triton_ops
from kernels.forms.sampling_columns import IN_PROMPT, Penalties
from kernels.pytorch.penalize import penalize
from kernels.reference import sampling as reference
from tests.kernels.implementations import CPU, CUDA, IS_INTERPRETED, moved

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Penalizer:
    """An implementation, and where its tensors must be."""

    penalize: Callable[[Tensor, Penalties], Tensor]
    device: torch.device

    def __call__(self, logits: Tensor, penalties: Penalties) -> Tensor:
        there = {
            field.name: getattr(penalties, field.name).to(self.device)
            for field in dataclasses.fields(penalties)
        }
        given = moved(logits, self.device)
        before = given.clone()
        penalized = self.penalize(given, Penalties(**there))
        assert torch.equal(given, before) or given.isnan().any()
        assert penalized.dtype == torch.float32
        return penalized.cpu()


PENALIZERS = [
    pytest.param(Penalizer(penalize, CPU), id="torch-cpu"),
    pytest.param(Penalizer(penalize, CUDA), id="torch-cuda", marks=pytest.mark.gpu),
]
if triton_ops() is not None:
    PENALIZERS.append(
        pytest.param(
            Penalizer(
                import_module("kernels.triton.penalize").penalize,
                CPU if IS_INTERPRETED else CUDA,
            ),
            id="triton-interpreted" if IS_INTERPRETED else "triton-cuda",
            marks=() if IS_INTERPRETED else pytest.mark.gpu,
        )
    )


def random_logits(n_rows: int, vocab_size: int, dtype: torch.dtype, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (8 * torch.randn(n_rows, vocab_size, generator=generator)).to(dtype)


def random_penalties(n_rows: int, vocab_size: int, *, seed: int = 0) -> Penalties:
    """About half of the rows have some, which are counted anywhere."""
    rng = np.random.default_rng(seed)
    rows = np.flatnonzero(rng.random(n_rows) < 0.5)
    n = len(rows)
    counts = rng.integers(1, 40, (n + 3, vocab_size)) * (rng.random((n + 3, vocab_size)) < 0.1)
    counts |= IN_PROMPT * (rng.random((n + 3, vocab_size)) < 0.1)
    return Penalties(
        rows=torch.from_numpy(rows),
        repetition=torch.from_numpy(rng.uniform(0.125, 8, n).astype(np.float32)),
        frequency=torch.from_numpy(rng.uniform(-2, 2, n).astype(np.float32)),
        presence=torch.from_numpy(rng.uniform(-2, 2, n).astype(np.float32)),
        count_rows=torch.from_numpy(rng.permutation(n + 3)[:n]),
        counts=torch.from_numpy(counts.astype(np.int32)),
    )


def of_one_row(
    vocab_size: int,
    prompt: list[int],
    generated: list[int],
    *,
    repetition: float = 1,
    frequency: float = 0,
    presence: float = 0,
) -> Penalties:
    counts = np.bincount(generated, minlength=vocab_size).astype(np.int32)
    counts[prompt] |= IN_PROMPT
    return Penalties(
        rows=torch.tensor([0]),
        repetition=torch.tensor([repetition], dtype=torch.float32),
        frequency=torch.tensor([frequency], dtype=torch.float32),
        presence=torch.tensor([presence], dtype=torch.float32),
        count_rows=torch.tensor([0]),
        counts=torch.from_numpy(counts)[None],
    )


@pytest.mark.parametrize("penalizer", PENALIZERS)
class TestEveryVersion:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("vocab_size", [1, 2, 63, 301, 2049, 5003])
    def test_does_what_the_slow_version_does(
        self, penalizer: Penalizer, vocab_size: int, dtype: torch.dtype
    ) -> None:
        n_rows = 9
        logits = random_logits(n_rows, vocab_size, dtype, seed=vocab_size)
        penalties = random_penalties(n_rows, vocab_size, seed=vocab_size)
        expected = reference.penalize(logits, penalties)
        penalized = penalizer(logits, penalties)
        torch.testing.assert_close(penalized.double(), expected, rtol=1e-6, atol=1e-5)
        others = torch.ones(n_rows, dtype=torch.bool)
        others[penalties.rows] = False
        assert torch.equal(penalized[others], logits.float()[others])

    @pytest.mark.parametrize("repetition", [0.5, 1.0, 1.3])
    def test_repetition_is_that_of_transformers(
        self, penalizer: Penalizer, repetition: float
    ) -> None:
        transformers = pytest.importorskip("transformers")
        logits = random_logits(1, 100, torch.float32)
        prompt, generated = [5, 7, 7, 99], [7, 50, 51, 50]
        processor = transformers.RepetitionPenaltyLogitsProcessor(penalty=repetition)
        expected = processor(torch.tensor([prompt + generated]), logits.clone())
        penalties = of_one_row(100, prompt, generated, repetition=repetition)
        torch.testing.assert_close(penalizer(logits, penalties), expected, rtol=1e-6, atol=0)
        assert torch.equal(expected, logits) == (repetition == 1)

    @given(
        prompt=st.lists(st.integers(0, 19), max_size=8),
        generated=st.lists(st.integers(0, 19), max_size=30),
        repetition=st.floats(0.125, 8, width=32),
        frequency=st.floats(-2, 2, width=32),
        presence=st.floats(-2, 2, width=32),
        seed=st.integers(0, 99),
    )
    def test_presence_and_frequency_are_openais(
        self,
        penalizer: Penalizer,
        prompt: list[int],
        generated: list[int],
        repetition: float,
        frequency: float,
        presence: float,
        seed: int,
    ) -> None:
        """mu[j] - c[j] * frequency - (c[j] > 0) * presence, where c counts what was generated."""
        logits = random_logits(1, 20, torch.float32, seed=seed)
        expected = logits[0].double().numpy().copy()
        seen = sorted({*prompt, *generated})
        expected[seen] *= np.where(expected[seen] > 0, 1 / repetition, repetition)
        counts = np.array([generated.count(token) for token in range(20)])
        expected -= counts * frequency + (counts > 0) * presence
        penalties = of_one_row(
            20,
            prompt,
            generated,
            repetition=repetition,
            frequency=frequency,
            presence=presence,
        )
        np.testing.assert_allclose(penalizer(logits, penalties)[0], expected, rtol=1e-6, atol=1e-4)

    def test_what_is_less_than_a_step_of_the_logits_type_counts(self, penalizer: Penalizer) -> None:
        logits = torch.full((1, 3), 20.0, dtype=torch.bfloat16)
        penalized = penalizer(logits, of_one_row(3, [], [1], presence=0.05))
        assert penalized[0].tolist() == pytest.approx([20, 19.95, 20], abs=1e-5)

    def test_a_prompt_counts_for_the_repetition_alone(self, penalizer: Penalizer) -> None:
        logits = torch.tensor([[4.0, 4.0, -4.0, 4.0]])
        penalties = of_one_row(4, [0, 2], [3], repetition=2, frequency=1, presence=0.5)
        assert penalizer(logits, penalties)[0].tolist() == [2, 4, -8, 0.5]

    def test_what_is_no_number_stays_so(self, penalizer: Penalizer) -> None:
        logits = torch.tensor([[float("nan"), float("inf"), float("-inf"), 1.0]])
        penalties = of_one_row(4, [0, 1, 2], [0, 1, 2], repetition=2, frequency=2, presence=-2)
        penalized = penalizer(logits, penalties)
        assert penalized[0].isfinite().tolist() == [False, False, False, True]

    def test_rows_lie_anywhere(self, penalizer: Penalizer) -> None:
        wide = random_logits(8, 451, torch.float32)
        penalties = random_penalties(4, 449)
        expected = penalizer(wide[::2, 1:450].contiguous(), penalties)
        assert torch.equal(penalizer(wide[::2, 1:450], penalties), expected)
        assert torch.equal(penalizer(wide[::2, 1:450].t().contiguous().t(), penalties), expected)
