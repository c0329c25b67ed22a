"""Sampling, of every implementation, against the slow version and against each other.

Weights in float32 are off by some parts of 2^24, so a draw, a `top_p` or a `min_p` that falls
within that of a border between two tokens may come out on either side. How much that is, is
computed here for each row (`allowed_tokens`); all else must be equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import TORCH, triton_ops
from kernels.forms.sampling_columns import (
    ALL_GREEDY,
    AllowedTokens,
    Biases,
    Penalties,
    SamplingColumns,
)
from kernels.pytorch.adjust import BANNED
from kernels.reference import sampling as reference
from tests.kernels.implementations import (
    CPU,
    CUDA,
    IMPLEMENTATIONS,
    IS_INTERPRETED,
    Implementation,
    moved,
)

LAST_UNIFORM = 1 - 2.0**-52
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# NumPy, which interprets, says so where a tiny temperature makes an infinity.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in multiply:RuntimeWarning")


@dataclasses.dataclass(frozen=True)
class Sampler:
    """An implementation of sampling, and where its tensors must be."""

    sample: Callable[..., Tensor]
    device: torch.device

    def __call__(self, logits: Tensor, columns: SamplingColumns) -> list[int]:
        tokens = self.sample(moved(logits, self.device), on_device(columns, self.device))
        assert tokens.dtype == torch.int64
        assert tokens.device.type == self.device.type
        return tokens.tolist()


Columns = TypeVar("Columns", SamplingColumns, Penalties, Biases, AllowedTokens)


def on_device(columns: Columns, device: torch.device) -> Columns:
    there: dict[str, Any] = {
        name: value.to(device)
        for name, value in fields_of(columns).items()
        if isinstance(value, Tensor)
    }
    there |= {
        name: on_device(value, device)
        for name, value in fields_of(columns).items()
        if type(value) in (Penalties, Biases, AllowedTokens)
    }
    return dataclasses.replace(columns, **there)


def on_triton(n_lanes: int) -> Sampler:
    """Rows of a few hundred logits are many blocks for a program of few lanes."""
    sample = import_module("kernels.triton.sample").sample
    return Sampler(partial(sample, n_lanes=n_lanes), CPU if IS_INTERPRETED else CUDA)


ON_TRITON = [
    pytest.param(
        on_triton(n_lanes),
        id=f"triton-of-{n_lanes}",
        marks=pytest.mark.triton if IS_INTERPRETED else pytest.mark.gpu,
    )
    for n_lanes in (128, 4096)
    if triton_ops() is not None
]
SAMPLERS = [
    *(
        pytest.param(Sampler(on.ops.sample, on.device), id=param.id, marks=param.marks)
        for param in IMPLEMENTATIONS
        for on in param.values
        if isinstance(on, Implementation) and on.ops is not triton_ops()
    ),
    *ON_TRITON,
]


def fields_of(columns: SamplingColumns | Penalties | Biases | AllowedTokens) -> dict[str, Any]:
    return {field.name: getattr(columns, field.name) for field in dataclasses.fields(columns)}


def columns_of(
    n_rows: int, *, banned: tuple[tuple[int, int], ...] = (), **given: Any
) -> SamplingColumns:
    """Rows that share what is given once and differ in what is given as a list."""
    defaults = {
        "temperature": (1.0, torch.float32),
        "top_k": (0, torch.int64),
        "top_p": (1.0, torch.float64),
        "min_p": (0.0, torch.float32),
        "uniform": (0.5, torch.float64),
    }
    assert given.keys() <= defaults.keys()
    columns: dict[str, Any] = {
        name: torch.as_tensor(given.get(name, default), dtype=dtype).expand(n_rows).clone()
        for name, (default, dtype) in defaults.items()
    }
    is_sampled = columns["temperature"] > 0
    is_limited = (columns["top_k"] > 0) | (columns["top_p"] < 1)
    return SamplingColumns(
        **columns,
        banned_rows=torch.tensor([row for row, _ in banned], dtype=torch.int64),
        banned_ids=torch.tensor([token for _, token in banned], dtype=torch.int64),
        any_sampled=bool(is_sampled.any()),
        any_limited=bool((is_sampled & is_limited).any()),
        any_min_p=bool((is_sampled & (columns["min_p"] > 0)).any()),
    )


def rows_of(columns: SamplingColumns, rows: list[int]) -> SamplingColumns:
    """Returns the columns of some rows, which have nothing banned."""
    assert not set(rows) & set(columns.banned_rows.tolist())
    kept: dict[str, Any] = {
        name: value[rows]
        for name, value in fields_of(columns).items()
        if isinstance(value, Tensor) and not name.startswith("banned")
    }
    nothing = torch.empty(0, dtype=torch.int64)
    return dataclasses.replace(columns, **kept, banned_rows=nothing, banned_ids=nothing)


def random_logits(
    n_rows: int, vocab_size: int, dtype: torch.dtype, *, seed: int = 0, scale: float = 3.0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(n_rows, vocab_size, generator=generator)).to(dtype)


def random_columns(
    n_rows: int, vocab_size: int, *, seed: int = 0, has_banned: bool = True
) -> SamplingColumns:
    """Rows of all kinds."""
    rng = np.random.default_rng(seed)
    banned = [
        (row, int(token))
        for row in range(n_rows)
        if has_banned and rng.random() < 0.2
        for token in rng.permutation(vocab_size)[: min(3, vocab_size - 1)]
    ]
    return columns_of(
        n_rows,
        banned=tuple(banned),
        temperature=rng.choice([0, 0.3, 1, 1, 1.7, 1e-44], n_rows),
        top_k=rng.choice([0, 0, -1, 1, 5, 40, vocab_size // 2, vocab_size, 10**6], n_rows),
        top_p=rng.choice([1, 1, 1e-6, 0.3, 0.9, 0.999], n_rows),
        min_p=rng.choice([0, 0, 0.02, 0.5, 1], n_rows),
        uniform=rng.random(n_rows),
    )


def errors(logits: Tensor, columns: SamplingColumns, row: int) -> tuple[float, float]:
    """By how much a row's masses, of the whole, and its `min_p` may come out wrong.

    A weight is exp(a), with `a` in float32 after up to eight roundings in its last place, and the
    exponential is within eight more; or it is below 2^-44 and lost. The most likely tokens, which
    filters leave, are the least wrong.
    """
    unit = 2.0**-24
    values = logits[row].double()
    values[columns.banned_ids[columns.banned_rows == row]] = -torch.inf
    exponents = ((values - values.max()) / columns.temperature[row].double()).clamp(min=-1e3)
    weights = exponents.exp()
    off = (weights * (8 * exponents.abs() + 8) * unit).sum() / weights.sum()
    min_p = columns.min_p[row].item()
    least = 8 * unit * (1 - np.log(min_p)) * min_p if min_p else 0.0
    return float(off) + len(values) * 2.0**-44, float(least)


def allowed_tokens(logits: Tensor, columns: SamplingColumns, row: int) -> set[int]:
    """Returns the tokens that a row may get, given how floats are rounded: mostly one."""
    mass, least = errors(logits, columns, row)
    uniform, top_p, min_p = (
        getattr(columns, name)[row].item() for name in ("uniform", "top_p", "min_p")
    )
    mine = [
        token
        for of_row, token in zip(
            columns.banned_rows.tolist(), columns.banned_ids.tolist(), strict=True
        )
        if of_row == row
    ]
    cases = [
        (uniform + a, top_p + b if top_p < 1 else 1.0, min_p + c)
        for a in (-2 * mass, 0, 2 * mass)
        for b in (-2 * mass, 0, 2 * mass)
        for c in (-least, 0, least)
    ]
    n = len(cases)
    uniforms, top_ps, min_ps = zip(*cases, strict=True)
    shaken = columns_of(
        n,
        banned=tuple((i, token) for i in range(n) for token in mine),
        temperature=columns.temperature[row],
        top_k=columns.top_k[row],
        top_p=np.clip(top_ps, 1e-300, 1),
        min_p=np.clip(min_ps, 0, 1),
        uniform=np.clip(uniforms, 0, LAST_UNIFORM),
    )
    return set(reference.sample(logits[row].expand(n, -1), shaken).tolist())


def assert_allowed(tokens: list[int], logits: Tensor, columns: SamplingColumns) -> None:
    expected = reference.sample(logits, columns).tolist()
    others = [row for row, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b]
    for row in others:
        assert tokens[row] in allowed_tokens(logits, columns, row), row
    assert len(others) <= 1 + len(tokens) // 100  # borders are narrow


@pytest.mark.parametrize("sampler", SAMPLERS)
class TestEveryVersion:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("vocab_size", [1, 2, 63, 301, 1030])
    def test_chooses_what_the_slow_version_chooses(
        self, sampler: Sampler, vocab_size: int, dtype: torch.dtype
    ) -> None:
        n_rows = 8
        logits = random_logits(n_rows, vocab_size, dtype, seed=vocab_size)
        columns = random_columns(n_rows, vocab_size, seed=vocab_size)
        assert_allowed(sampler(logits, columns), logits, columns)

    def test_greedy_rows_take_the_first_of_the_most_likely(self, sampler: Sampler) -> None:
        logits = random_logits(5, 700, torch.bfloat16)
        logits[:, 650] = logits[:, 130] = 50
        columns = columns_of(5, temperature=0, top_k=7, top_p=0.1, uniform=0.9)
        assert sampler(logits, columns) == [130] * 5
        columns = columns_of(5, temperature=[0, 1e-44, 0, 1e-44, 0], uniform=0.9)
        assert sampler(logits, columns) == [130, 650, 130, 650, 130]

    @pytest.mark.parametrize(
        ("limit", "kept"),
        [({"top_k": 3}, 3), ({"top_k": 200}, 200), ({"top_p": 0.01}, 7), ({"top_p": 0.5}, 350)],
    )
    def test_of_equals_the_first_stay(
        self, sampler: Sampler, limit: dict[str, Any], kept: int
    ) -> None:
        """All tokens are equal, so no bound separates them."""
        columns = columns_of(3, uniform=[0, 0.5 - 1e-9, LAST_UNIFORM], **limit)
        tokens = sampler(torch.full((3, 700), -2.5), columns)
        assert tokens == [0, -(-kept // 2) - 1, kept - 1]

    def test_the_limit_falls_within_equals(self, sampler: Sampler) -> None:
        logits = torch.full((2, 500), -5.0)
        logits[:, [400, 10]] = 3.0
        logits[:, [90, 300, 20, 450]] = 2.0
        # 2 and 2 of the next 4; e^3, e^3, e^2 make 0.7 of the six.
        columns = columns_of(2, top_k=[4, 6], top_p=[1, 0.67], uniform=LAST_UNIFORM)
        assert sampler(logits, columns) == [400, 400]
        logits[:, 400] = 2.0
        logits[:, 5] = 3.0
        assert sampler(logits, columns) == [90, 20]

    @pytest.mark.parametrize("scale", [0.01, 1.0])
    def test_many_tokens_are_kept(self, sampler: Sampler, scale: float) -> None:
        logits = random_logits(4, 900, torch.float32, scale=scale)
        columns = columns_of(
            4, top_k=[600, 800, 0, 500], top_p=[1, 0.9, 0.95, 1], uniform=[0.2, 0.4, 0.6, 0.8]
        )
        assert_allowed(sampler(logits, columns), logits, columns)

    def test_the_ends_of_the_draw_are_the_first_and_the_last_that_have_weight(
        self, sampler: Sampler
    ) -> None:
        logits = torch.full((4, 600), -60.0)
        logits[:, [77, 300, 511]] = torch.tensor([0.0, -1.0, 0.5])
        columns = columns_of(
            4, top_k=[0, 0, 3, 3], min_p=0.01, uniform=[0, LAST_UNIFORM, 0, LAST_UNIFORM]
        )
        assert sampler(logits, columns) == [77, 511, 77, 511]

    @pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
    def test_rows_that_are_not_numbers_have_no_token(self, sampler: Sampler, wrong: float) -> None:
        logits = random_logits(5, 333, torch.bfloat16)
        logits[1, 332] = logits[2, 0] = logits[4, 100] = wrong
        columns = columns_of(5, temperature=[1, 1, 0, 0, 1], top_k=[0, 5, 0, 0, 0], top_p=0.9)
        assert [token < 0 for token in sampler(logits, columns)] == [False, True, True, False, True]
        # Not even if it may not be chosen.
        banned = columns_of(5, temperature=[0, 1, 0, 0, 1], banned=((2, 0), (4, 100)))
        assert [token < 0 for token in sampler(logits, banned)] == [
            False, True, True, False, True
        ]  # fmt: skip

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_banned_tokens_are_out_in_their_row_only(
        self, sampler: Sampler, temperature: float
    ) -> None:
        logits = torch.zeros(3, 200)
        logits[:, 7] = 100
        logits[:, 150] = 50
        before = logits.clone()
        columns = columns_of(3, temperature=temperature, banned=((1, 7),))
        assert sampler(logits, columns) == [7, 150, 7]
        assert torch.equal(logits, before)
        all_but_one = tuple((2, token) for token in range(200) if token != 9)
        columns = columns_of(3, temperature=temperature, top_k=50, banned=all_but_one)
        assert sampler(logits, columns) == [7, 7, 9]

    def test_no_temperature_is_so_high_that_banned_tokens_are_sampled(
        self, sampler: Sampler
    ) -> None:
        n_rows, vocab_size = 16, 200
        banned = [token for token in range(vocab_size) if token % 20]
        columns = columns_of(
            n_rows,
            banned=tuple((row, token) for row in range(n_rows) for token in banned),
            temperature=torch.finfo(torch.float32).max,
            top_p=[1, 0.9] * (n_rows // 2),
            uniform=np.linspace(0, LAST_UNIFORM, n_rows),
        )
        for dtype in DTYPES:
            tokens = sampler(random_logits(n_rows, vocab_size, dtype), columns)
            assert not set(tokens) & set(banned)
            assert len(set(tokens)) > 5, "all others are about as likely"

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("others", ["greedy", "sampled", "banned"])
    def test_tokens_are_those_of_the_penalised_logits(
        self, sampler: Sampler, others: str, dtype: torch.dtype
    ) -> None:
        n_rows, vocab_size = 6, 301
        logits = random_logits(n_rows, vocab_size, dtype)
        before = logits.clone()
        columns = {
            "greedy": ALL_GREEDY,
            "sampled": random_columns(n_rows, vocab_size, seed=1, has_banned=False),
            "banned": columns_of(n_rows, temperature=0, banned=((2, 7), (3, 8))),
        }[others]
        first = logits.argmax(-1)
        counts = torch.zeros(4, vocab_size, dtype=torch.int32)
        counts[[0, 1, 2], first[[1, 3, 4]]] = 30
        penalties = Penalties(
            rows=torch.tensor([1, 3, 4]),
            repetition=torch.ones(3),
            frequency=torch.tensor([2.0, 2.0, 0.0]),
            presence=torch.zeros(3),
            count_rows=torch.tensor([0, 1, 2]),
            counts=counts,
        )
        penalized = logits.to(torch.float32, copy=True)
        penalized[[1, 3], first[[1, 3]]] -= 60
        tokens = sampler(logits, dataclasses.replace(columns, penalties=penalties))
        assert tokens == sampler(penalized, columns)
        assert torch.equal(logits, before)
        if others == "greedy":
            without = sampler(logits, columns)
            assert [a != b for a, b in zip(tokens, without, strict=True)] == [
                False, True, False, True, False, False
            ]  # fmt: skip
            reference_columns = columns_of(n_rows, temperature=0)
            slow = dataclasses.replace(reference_columns, penalties=penalties)
            assert tokens == reference.sample(logits, slow).tolist()

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("others", ["greedy", "sampled", "banned"])
    def test_tokens_are_those_of_the_biased_and_masked_logits(
        self, sampler: Sampler, others: str, dtype: torch.dtype
    ) -> None:
        n_rows, vocab_size = 6, 301
        logits = random_logits(n_rows, vocab_size, dtype)
        before = logits.clone()
        columns = {
            "greedy": ALL_GREEDY,
            "sampled": random_columns(n_rows, vocab_size, seed=1, has_banned=False),
            "banned": columns_of(n_rows, temperature=0, banned=((2, 7), (3, 8))),
        }[others]
        first = logits.argmax(-1)
        is_allowed = random_logits(2, vocab_size, torch.float32, seed=2) > 2
        is_allowed[:, [0, 300]] = True
        is_allowed[0, first[0]] = is_allowed[1, first[4]] = False
        words = np.zeros((2, 320), np.bool_)
        words[:, :vocab_size] = is_allowed
        adjustments: dict[str, Any] = {
            "biases": Biases(
                rows=torch.tensor([5, 1, 1]),
                ids=torch.tensor([7, int(first[1]), 12]),
                values=torch.tensor([100.0, -100.0, 0.125]),
            ),
            "allowed": AllowedTokens(
                rows=torch.tensor([0, 4]),
                masks=torch.from_numpy(np.packbits(words, axis=1, bitorder="little")).view(
                    torch.int32
                ),
            ),
        }
        changed = logits.to(torch.float32, copy=True)
        changed[5, 7] += 100
        changed[1, first[1]] -= 100
        changed[1, 12] += 0.125
        changed[[0, 4]] = changed[[0, 4]].masked_fill(~is_allowed, BANNED)
        tokens = sampler(logits, dataclasses.replace(columns, **adjustments))
        assert tokens == sampler(changed, columns)
        assert torch.equal(logits, before)
        assert is_allowed[0, tokens[0]]
        assert is_allowed[1, tokens[4]]
        if others == "greedy":
            assert tokens[5] == 7
            assert tokens[1] != first[1]
            slow = dataclasses.replace(columns_of(n_rows, temperature=0), **adjustments)
            assert tokens == reference.sample(logits, slow).tolist()

    def test_no_temperature_is_so_high_that_masked_tokens_are_sampled(
        self, sampler: Sampler
    ) -> None:
        n_rows, vocab_size = 16, 200
        is_allowed = np.zeros(224, np.bool_)
        is_allowed[:vocab_size:20] = True
        mask = np.packbits(is_allowed, bitorder="little").view(np.int32)
        columns = dataclasses.replace(
            columns_of(
                n_rows,
                temperature=torch.finfo(torch.float32).max,
                top_p=[1, 0.9] * (n_rows // 2),
                uniform=np.linspace(0, LAST_UNIFORM, n_rows),
            ),
            allowed=AllowedTokens(torch.arange(n_rows), torch.from_numpy(np.tile(mask, (16, 1)))),
        )
        for dtype in DTYPES:
            tokens = sampler(random_logits(n_rows, vocab_size, dtype), columns)
            assert all(token % 20 == 0 for token in tokens)
            assert len(set(tokens)) > 5, "all others are about as likely"

    def test_a_mask_hides_no_row_that_is_not_a_number(self, sampler: Sampler) -> None:
        logits = torch.zeros(3, 64)
        logits[0, 3], logits[1, 4] = float("nan"), float("inf")
        masks = torch.full((3, 2), 1, dtype=torch.int32)
        columns = dataclasses.replace(
            columns_of(3, temperature=[0, 1, 1]), allowed=AllowedTokens(torch.arange(3), masks)
        )
        assert [token < 0 for token in sampler(logits, columns)] == [True, True, False]

    def test_rows_lie_anywhere(self, sampler: Sampler) -> None:
        wide = random_logits(8, 451, torch.float32)
        columns = random_columns(4, 449, seed=3)
        expected = sampler(wide[::2, 1:450].contiguous(), columns)
        assert sampler(wide[::2, 1:450], columns) == expected
        assert sampler(wide[::2, 1:450].t().contiguous().t(), columns) == expected

    def test_rows_are_chosen_alike_alone_and_together(self, sampler: Sampler) -> None:
        n_rows = 8
        logits = random_logits(n_rows, 390, torch.float32)
        columns = random_columns(n_rows, 390, seed=5, has_banned=False)
        together = sampler(logits, columns)
        order = [5, 2, 7, 0, 1, 3, 6, 4]
        assert sampler(logits[order], rows_of(columns, order)) == [together[i] for i in order]
        for row in (0, 4):
            assert sampler(logits[row : row + 1], rows_of(columns, [row])) == [together[row]]

    @given(
        seed=st.integers(0, 10_000),
        scale=st.sampled_from([0.0, 0.1, 3.0, 30.0]),
        dtype=st.sampled_from(DTYPES),
    )
    @settings(
        max_examples=6,
        deadline=None,
        suppress_health_check=[HealthCheck.differing_executors],
    )
    def test_filters_and_draws_of_any_rows(
        self, sampler: Sampler, seed: int, scale: float, dtype: torch.dtype
    ) -> None:
        vocab_size = 40 + seed % 200
        logits = random_logits(3, vocab_size, dtype, seed=seed, scale=scale)
        columns = random_columns(3, vocab_size, seed=seed)
        tokens = sampler(logits, columns)
        for row, token in enumerate(tokens):
            assert token in allowed_tokens(logits, columns, row)
        larger = logits.float() > logits.float().gather(1, torch.tensor(tokens)[:, None])
        larger[columns.banned_rows, columns.banned_ids] = False
        n_before = larger.sum(-1)
        is_limited = columns.top_k > 0
        assert (n_before < columns.top_k)[is_limited].all()


@pytest.mark.parametrize("sampler", ON_TRITON)
def test_triton_agrees_with_torch_on_many_rows(sampler: Sampler) -> None:
    n_rows, vocab_size = (4000, 3001) if sampler.device.type == "cuda" else (40, 301)
    for dtype in (torch.float32, torch.bfloat16):
        logits = random_logits(n_rows, vocab_size, dtype, seed=7)
        columns = random_columns(n_rows, vocab_size, seed=7)
        ours, theirs = sampler(logits, columns), TORCH.sample(logits, columns).tolist()
        others = [row for row, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
        for row in others:
            assert {ours[row], theirs[row]} <= allowed_tokens(logits, columns, row)
        assert len(others) <= 1 + n_rows // 1000


@pytest.mark.parametrize("sampler", ON_TRITON[:1])
def test_triton_chooses_alike_whatever_the_shape_of_its_programs(sampler: Sampler) -> None:
    """Sums of whole numbers are equal in any order."""
    logits = random_logits(8, 500, torch.float32, scale=1.0)
    columns = random_columns(8, 500, seed=11)
    tokens = sampler(logits, columns)
    assert on_triton(32)(logits, columns) == tokens
    assert on_triton(512)(logits, columns) == tokens
