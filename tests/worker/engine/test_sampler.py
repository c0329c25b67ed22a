"""Which tokens are chosen, how often, and what may not influence it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels import TORCH
from kernels.pytorch.sample import CDF_BLOCK, invert_cdf
from kernels.pytorch.sample import token_weights as weights_of_columns
from kernels.upload import Uploads
from services.common.sampling import SamplingParams
from services.worker.engine.sampler import (
    SAMPLING_COLUMNS,
    PenalizedRows,
    SamplingBatch,
    column_values,
    uniforms,
)

Columns = dict[str, Any]
DEFAULTS = SamplingParams(seed=0)


def batch_of(
    n_rows: int,
    *,
    banned: tuple[tuple[int, list[int]], ...] = (),
    position: Any = 0,
    **columns: Any,
) -> SamplingBatch:
    """Rows that share what is given once and differ in what is given as a list."""
    options = np.array([column_values(DEFAULTS)] * n_rows, SAMPLING_COLUMNS)
    for name, values in columns.items():
        options[name] = values
    return SamplingBatch(
        options=options,
        positions=np.broadcast_to(np.asarray(position, np.int64), n_rows).copy(),
        banned=tuple((row, np.array(ids, dtype=np.int64)) for row, ids in banned),
    )


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Tokens as a rank on a CPU chooses and hands them out."""
    tokens = TORCH.sample(logits, batch.columns(Uploads(), logits.shape[1]))
    return tokens


def token_weights(logits: Tensor, batch: SamplingBatch) -> Tensor:
    return weights_of_columns(logits, batch.columns(Uploads(), logits.shape[1]))


def random_logits(n_rows: int, vocab_size: int, *, seed: int = 0, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(n_rows, vocab_size, generator=generator)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("top_p", [0.0, 5e-324, 1e-45, 1e-30, 1e-9])
@pytest.mark.parametrize("temperature", [0.01, 1.0, 2.0])
def test_a_top_p_of_nothing_takes_the_argmax(top_p: float, temperature: float) -> None:
    logits = random_logits(64, 300)
    batch = batch_of(64, top_p=top_p, temperature=temperature, seed=list(range(64)))
    assert sample(logits, batch).tolist() == logits.argmax(-1).tolist()


class TestUniforms:
    def test_are_splitmix64(self) -> None:
        # The published first outputs of SplitMix64 with seed 0, which the extra mix leaves 0.
        published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
        ours = uniforms(np.zeros(3, dtype=np.int64), np.arange(3))
        assert ours.tolist() == [(number >> 12) / 2**52 for number in published]

    def test_accept_the_whole_range(self) -> None:
        seeds = np.array([0, -1, -1, -(2**63)])
        numbers = uniforms(seeds, np.array([0, 0, 2**32 - 1, 1]))
        assert len(set(numbers.tolist())) == 4
        assert ((numbers >= 0) & (numbers < 1)).all()

    def test_seeds_do_not_share_their_sequences(self) -> None:
        gamma = 0x9E3779B97F4A7C15  # by which the counter of SplitMix64 moves on
        seeds = np.array([7, (7 + gamma) % 2**64, (7 + 2 * gamma) % 2**64], dtype=np.uint64)
        numbers = uniforms(seeds.view(np.int64), np.array([2, 1, 0]))
        assert len(set(numbers.tolist())) == 3

    @pytest.mark.parametrize("along", ["seed", "position"])
    def test_are_uniform_and_independent(self, along: str) -> None:
        n = 40_000
        counter, fixed = np.arange(n), np.full(n, 12345)
        seed, position = (counter, fixed) if along == "seed" else (fixed, counter)
        numbers = uniforms(seed, position)
        # Pairs of neighbours fall evenly on a 10 x 10 grid; 99 degrees of freedom, p < 1e-5.
        counts, _, _ = np.histogram2d(numbers[0::2], numbers[1::2], bins=10, range=[(0, 1)] * 2)
        assert chi_square(counts, np.full((10, 10), n / 200)) < 175


class TestInvertCdf:
    LAST = 1 - 2.0**-52  # the largest number that `uniforms` makes

    @given(
        seed=st.integers(0, 10_000),
        density=st.sampled_from([0.01, 0.5, 1.0]),
        uniform=st.one_of(st.sampled_from([0.0, LAST]), st.floats(0, LAST)),
    )
    def test_finds_the_id_where_the_cumulative_weight_passes_the_target(
        self, seed: int, density: float, uniform: float
    ) -> None:
        rng = np.random.default_rng(seed)
        n_ids = 3 * CDF_BLOCK
        weights = (rng.random(n_ids) ** 9 * (rng.random(n_ids) < density)).astype(np.float32)
        weights[rng.integers(n_ids)] = 1
        token = int(
            invert_cdf(
                torch.from_numpy(weights)[None], torch.tensor([uniform], dtype=torch.float64)
            ).item()
        )
        up_to = weights.astype(np.float64).cumsum()
        assert weights[token] > 0
        assert up_to[token] - weights[token] <= uniform * up_to[-1] * (1 + 1e-12)
        assert up_to[token] >= uniform * up_to[-1] * (1 - 1e-12)

    def test_the_last_uniform_takes_the_last_id_that_has_weight(self) -> None:
        rng = np.random.default_rng(0)
        # Of very different sizes, so that sums in another order round differently.
        weights = (rng.random((2000, 2 * CDF_BLOCK)) ** 40).astype(np.float32)
        weights[:, 199] = 1
        weights[:, 200:] = 0
        uniform = torch.full((2000,), self.LAST, dtype=torch.float64)
        assert set(invert_cdf(torch.from_numpy(weights), uniform).tolist()) == {199}


class TestGreedy:
    def test_temperature_0_takes_the_most_likely(self) -> None:
        logits = random_logits(9, 301)
        batch = batch_of(9, temperature=0, top_p=0.3, seed=5)
        assert sample(logits, batch).tolist() == logits.argmax(-1).tolist()
        assert sample(logits, batch).dtype == torch.int64

    @given(seed=st.integers(-(2**63), 2**63 - 1), scale=st.sampled_from([0.01, 1.0, 30.0]))
    def test_top_k_1_is_greedy_even_among_equals(self, seed: int, scale: float) -> None:
        # Rounded to bfloat16, as a bfloat16 model's are: many tokens are equally likely.
        logits = random_logits(6, 777, seed=seed % 1000, scale=scale).bfloat16().float()
        batch = batch_of(6, top_k=1, seed=seed, position=range(6))
        assert sample(logits, batch).tolist() == logits.argmax(-1).tolist()

    @pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-44])
    def test_tiny_temperatures_are_almost_greedy(self, temperature: float) -> None:
        logits = random_logits(50, 100)
        batch = batch_of(50, temperature=temperature, position=range(50))
        assert sample(logits, batch).tolist() == logits.argmax(-1).tolist()

    def test_rows_of_both_kinds_mix(self) -> None:
        logits = random_logits(40, 60, scale=0.5)
        batch = batch_of(40, temperature=[0.0, 1.0] * 20, position=range(40))
        tokens = sample(logits, batch)
        assert tokens[0::2].tolist() == logits[0::2].argmax(-1).tolist()
        assert tokens[1::2].tolist() != logits[1::2].argmax(-1).tolist()


class TestFrequencies:
    N = 20_000

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
    @pytest.mark.parametrize("along", ["seed", "position"])
    def test_follow_the_softmax(self, temperature: float, along: str) -> None:
        logits = random_logits(1, 12, scale=1.0)
        counts = self.counts(logits, temperature=temperature, **{along: np.arange(self.N)})
        expected = self.N * (logits[0].double() / temperature).softmax(-1).numpy()
        assert expected.min() > 5
        assert chi_square(counts, expected) < 45  # 11 degrees of freedom, p < 1e-5
        # The test can tell: a slightly different temperature would not pass.
        other = self.N * (logits[0].double() / (1.2 * temperature)).softmax(-1).numpy()
        assert chi_square(counts, other) > 45

    def test_follow_the_softmax_over_many_blocks_of_ids(self) -> None:
        logits = random_logits(1, 1000, scale=1.0)
        counts = self.counts(logits, position=np.arange(self.N))
        expected = self.N * logits[0].double().softmax(-1).numpy()
        by_size = expected.argsort().reshape(20, 50)  # 50 tokens together, 20 times
        assert chi_square(counts[by_size].sum(1), expected[by_size].sum(1)) < 58  # 19 d.f., 1e-5

    def test_follow_the_softmax_of_what_the_filters_keep(self) -> None:
        logits = random_logits(1, 12, scale=1.0)
        counts = self.counts(logits, top_k=5, position=np.arange(self.N))
        kept = logits[0].topk(5).indices.numpy()
        expected = self.N * logits[0, kept].double().softmax(-1).numpy()
        assert counts.sum() == counts[kept].sum()
        assert chi_square(counts[kept], expected) < 28  # 4 degrees of freedom, p < 1e-5

    def counts(self, logits: Tensor, **columns: Any) -> np.ndarray:
        batch = batch_of(self.N, **columns)
        tokens = sample(logits.expand(self.N, -1), batch)
        return np.bincount(tokens.numpy(), minlength=logits.shape[1])


class TestIndependenceOfTheBatch:
    def test_a_row_gets_the_same_token_alone_and_in_any_batch(self) -> None:
        n, vocab_size = 24, 2000
        rng = np.random.default_rng(0)
        logits = random_logits(n, vocab_size, scale=1.5)
        columns: Columns = {
            "temperature": rng.choice([0, 0.7, 1.5], n),
            "top_k": rng.choice([0, 5, 300], n),
            "top_p": rng.choice([0.4, 0.95, 1], n),
            "min_p": rng.choice([0, 0.01], n),
            "seed": rng.integers(0, 2**63, n),
            "position": rng.integers(0, 5000, n),
        }
        together = sample(logits, batch_of(n, **columns)).tolist()
        order = rng.permutation(n)
        shuffled = batch_of(n, **{name: column[order] for name, column in columns.items()})
        assert sample(logits[order], shuffled).tolist() == [together[i] for i in order]
        alone = [
            sample(logits[i : i + 1], batch_of(1, **{k: c[i] for k, c in columns.items()})).item()
            for i in range(n)
        ]
        assert alone == together
        greedy = logits.argmax(-1).tolist()
        assert sum(a != b for a, b in zip(together, greedy, strict=True)) > 5

    def test_seed_and_position_both_matter(self) -> None:
        logits = random_logits(1, 500, scale=0.1).expand(60, -1)
        by_seed = sample(logits, batch_of(60, seed=range(60)))
        by_position = sample(logits, batch_of(60, position=range(60)))
        assert len(set(by_seed.tolist())) > 40
        assert len(set(by_position.tolist())) > 40


def obvious_weights(logits: Tensor, batch: SamplingBatch, row: int) -> dict[int, float]:
    """Returns the tokens that a row's filters keep, applied one after the other."""
    values = logits[row].tolist()
    options = batch.options[row]
    scaled = (logits[row] - logits[row].max()) / float(options["temperature"])
    weights = scaled.exp().double().tolist()
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if options["top_k"] > 0:
        order = order[: options["top_k"]]
    if options["top_p"] < 1:
        enough = options["top_p"] * sum(weights[token] for token in order)
        kept, total = [], 0.0
        for token in order:
            if total >= enough:
                break
            kept.append(token)
            total += weights[token]
        order = kept
    return {token: weights[token] for token in order if weights[token] >= options["min_p"]}


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([-1, 0, 1, 3, 70, 1200, 10**6]),
        "top_p": st.sampled_from([1e-6, 0.2, 0.5, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    }
)


class TestFilters:
    @given(
        rows=st.lists(PARAMS, min_size=1, max_size=4),
        vocab_size=st.sampled_from([2, 100, 128, 1500]),
        scale=st.sampled_from([0.0, 0.5, 8.0]),
        rounded=st.booleans(),
        seed=st.integers(0, 100),
    )
    def test_keep_what_the_obvious_version_keeps(
        self, rows: list[Columns], vocab_size: int, scale: float, rounded: bool, seed: int
    ) -> None:
        logits = random_logits(len(rows), vocab_size, seed=seed, scale=scale)
        logits = logits.bfloat16().float() if rounded else logits
        columns: Columns = {name: [row[name] for row in rows] for name in rows[0]}
        batch = batch_of(len(rows), **columns)
        ours = token_weights(logits, batch)
        for row in range(len(rows)):
            expected = obvious_weights(logits, batch, row)
            kept = ours[row].nonzero()[:, 0].tolist()
            # What underflows to weight 0 is kept by some filters and never sampled.
            assert kept == sorted(token for token, weight in expected.items() if weight > 0)
            assert ours[row, kept].tolist() == pytest.approx([expected[i] for i in kept], rel=1e-6)

    @given(
        top_p=st.lists(st.floats(0.01, 1.0), min_size=2, max_size=6),
        seed=st.integers(0, 100),
    )
    def test_a_larger_top_p_keeps_no_less(self, top_p: list[float], seed: int) -> None:
        top_p = sorted(top_p)
        logits = random_logits(1, 400, seed=seed).expand(len(top_p), -1)
        is_kept = token_weights(logits, batch_of(len(top_p), top_p=top_p)) > 0
        assert (is_kept[1:] >= is_kept[:-1]).all()
        assert (is_kept.sum(-1) >= 1).all()

    def test_nothing_is_dropped_by_default(self) -> None:
        logits = random_logits(2, 300)
        weights = token_weights(logits, batch_of(2))
        torch.testing.assert_close(weights / weights.sum(-1, keepdim=True), logits.softmax(-1))

    def test_top_k_alone_keeps_even_the_most_unlikely_of_the_k(self) -> None:
        weights = token_weights(torch.tensor([[0.0, -50.0, -60.0, -55.0]]), batch_of(1, top_k=3))
        assert weights.nonzero()[:, 1].tolist() == [0, 1, 3]

    def test_dropped_tokens_are_never_sampled(self) -> None:
        logits = random_logits(1, 300, scale=0.5).expand(5000, -1)
        batch = batch_of(5000, top_k=7, position=range(5000))
        assert set(sample(logits, batch).tolist()) == set(logits[0].topk(7).indices.tolist())


class TestBanned:
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_tokens_are_not_chosen_in_their_row_only(self, temperature: float) -> None:
        logits = torch.zeros(3, 50)
        logits[:, 7] = 100
        logits[:, 9] = 50
        batch = batch_of(3, temperature=temperature, banned=((1, [7]),))
        assert sample(logits, batch).tolist() == [7, 9, 7]
        assert logits[1, 7] == 100  # the caller's logits are left alone

    def test_ids_beyond_the_vocabulary_mean_nothing(self) -> None:
        logits = random_logits(1, 10)
        batch = batch_of(1, temperature=0, banned=((0, [10, 5000]),))
        assert sample(logits, batch).item() == logits.argmax()

    def test_may_be_given_for_rows_in_any_order(self) -> None:
        logits = random_logits(3, 40)
        first = logits.argmax(-1).tolist()
        batch = batch_of(3, temperature=0, banned=((2, [first[2]]), (0, [first[0], 39])))
        columns = batch.columns(Uploads(), 40)
        assert columns.banned_rows.tolist() == [0, 0, 2]
        for row in (0, 2):
            logits[row, first[row]] = -100
        assert sample(logits, batch).tolist() == logits.argmax(-1).tolist()

    def test_banning_everything_is_an_error(self) -> None:
        batch = batch_of(2, banned=((1, [0, 1, 2]),))
        with pytest.raises(ValueError, match="every token of row 1"):
            batch.columns(Uploads(), 3)


class TestColumns:
    """The flags that a batch gives to the operation beside its columns."""

    def test_a_greedy_batch_uploads_nothing(self) -> None:
        class NoUploads(Uploads):
            def add(self, values: np.ndarray) -> Tensor:
                raise AssertionError("nothing is needed")

        columns = batch_of(5, temperature=0, top_k=3, min_p=0.5).columns(NoUploads(), 100)
        assert columns.is_greedy

    @pytest.mark.parametrize("temperature", [0, 1])
    def test_say_who_is_penalised(self, temperature: float) -> None:
        penalized = PenalizedRows(
            rows=np.array([1]),
            options=np.array(
                [
                    column_values(
                        SamplingParams(
                            repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=-1
                        )
                    )
                ],
                SAMPLING_COLUMNS,
            ),
            count_rows=np.array([7]),
            counts=torch.zeros(8, 100, dtype=torch.int32),
        )
        batch = replace(batch_of(2, temperature=temperature), penalized=penalized)
        columns = batch.columns(Uploads(), 100)
        assert columns.is_greedy == (temperature == 0)
        penalties = columns.penalties
        assert penalties is not None
        assert penalties.counts is penalized.counts
        assert (penalties.rows.tolist(), penalties.count_rows.tolist()) == ([1], [7])
        amounts = penalties.repetition, penalties.frequency, penalties.presence
        assert [amount.tolist() for amount in amounts] == [[1.5], [0.5], [-1]]
        assert batch_of(2).columns(Uploads(), 100).penalties is None

    def test_know_what_is_needed(self) -> None:
        def facts(**given: Any) -> tuple[bool, bool, bool]:
            columns = batch_of(2, **given).columns(Uploads(), 100)
            return columns.any_sampled, columns.any_limited, columns.any_min_p

        assert facts() == (True, False, False)
        assert facts(top_k=[0, 99]) == (True, True, False)
        assert facts(top_k=100) == (True, False, False)
        assert facts(top_p=[1, 0.99]) == (True, True, False)
        assert facts(min_p=[0, 0.01]) == (True, False, True)
        # What a greedy row says does not count.
        assert facts(temperature=[0, 1], top_k=[5, 0], min_p=[1, 0]) == (True, False, False)
        assert facts(temperature=0, banned=((1, [3]),)) == (False, False, False)

    def test_are_copies(self) -> None:
        batch = batch_of(4, top_k=1)
        columns = batch.columns(Uploads(), 100)
        batch.options["top_k"] = 7
        assert columns.top_k.tolist() == [1, 1, 1, 1]
        assert columns.top_k.is_contiguous()


class TestNonFinite:
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
    def test_a_row_that_is_not_numbers_has_no_token(self, wrong: float, temperature: float) -> None:
        logits = random_logits(4, 300)
        sample(logits, batch_of(4, temperature=temperature))
        logits[2, 299] = wrong
        tokens = sample(logits, batch_of(4, temperature=temperature))
        assert (tokens < 0).tolist() == [False, False, True, False]

    def test_infinities_of_both_signs_do_not_cancel(self) -> None:
        logits = torch.zeros(1, 10)
        logits[0, 3], logits[0, 4] = torch.inf, -torch.inf
        assert sample(logits, batch_of(1)).tolist() == [-1]
