"""The search finds what looking at everything finds, and predictions follow from the costs."""

from dataclasses import replace

import pytest

from services.tune.check import Check, speed
from services.tune.choice import check_limits, choose, to_check
from services.tune.search import (
    BATCH_SIZES,
    BATCH_TOKENS,
    Candidate,
    Memory,
    Prediction,
    Predictor,
    SearchGivenUp,
    best_of,
    climb,
    search,
)
from services.tune.system import SystemFailed
from simulator.outcome import LatencyLimits, Outcome
from tests.tune.cases import CUT, WHOLE, candidate, costs, tried, workload
from tests.tune.test_calibration import record


def prediction(of: Candidate, value: float, latency_s: float = 1.0) -> Prediction:
    return Prediction(of, value, latency_s, Outcome((), 1, 1.0), None)


@pytest.mark.parametrize("best", range(len(BATCH_SIZES)))
def test_a_ladder_with_one_top_is_climbed_to_it(best: int) -> None:
    tried_sizes = []

    def predict(of: Candidate) -> Prediction:
        tried_sizes.append(of.max_batch_size)
        return prediction(of, 100.0 - abs(BATCH_SIZES.index(of.max_batch_size) - best))

    found = climb(BATCH_SIZES, lambda size: candidate(size, 2048), predict)
    assert found.candidate.max_batch_size == BATCH_SIZES[best]
    assert len(set(tried_sizes)) == len(tried_sizes) < len(BATCH_SIZES)


def test_of_equals_the_one_with_the_lower_latency_is_best() -> None:
    slow, quick = prediction(candidate(32, 512), 100.0, 2.0), prediction(candidate(8, 512), 99.8)
    assert best_of([slow, quick]) is quick
    assert best_of([slow, replace(quick, value=98.0)]) is slow


def test_the_search_comes_near_the_best_of_all() -> None:
    predictor = Predictor(costs(), workload(), Memory(10_000))
    found = search(WHOLE, predictor, n_requests=24)
    everything = [
        predictor(candidate(size, tokens))
        for size in BATCH_SIZES
        for tokens in BATCH_TOKENS
        if size <= min(tokens, 32)
    ]
    assert found.value >= 0.98 * best_of(everything).value


def test_less_memory_lets_fewer_requests_run() -> None:
    plenty = Predictor(costs(), workload(), Memory(10_000))(candidate(32, 512))
    little = Predictor(costs(), workload(), Memory(96))(candidate(32, 512))
    assert little.value < 0.9 * plenty.value
    assert little.outcome.max_reserved_slots <= 96


def test_limits_are_kept_at_the_rate_that_is_found_and_not_far_above_it() -> None:
    limits = LatencyLimits(ttft_s=0.5, tpot_s=0.05)
    work = workload(limits)
    predictor = Predictor(costs(), work, Memory(10_000))
    of = candidate(8, 128)
    found = predictor(of)
    assert found.rate is not None
    assert work.is_kept_by(found.outcome)
    assert not work.is_kept_by(predictor.simulation(of, rate=1.5 * found.rate).run())


def test_a_candidate_has_a_rate_of_its_own_beside_a_better_one() -> None:
    work = workload(LatencyLimits(ttft_s=0.5, tpot_s=0.05))
    predictor = Predictor(costs(), work, Memory(10_000))
    better, worse = predictor(candidate(8, 128)), predictor(candidate(1, 64))
    assert worse.rate == better.rate
    assert not work.is_kept_by(worse.outcome)
    alone = predictor.anew()(worse.candidate)
    assert work.is_kept_by(alone.outcome)
    assert worse.value < alone.value < better.value


def test_limits_that_everything_keeps_end_the_search_for_a_rate() -> None:
    predictor = Predictor(costs(), workload(LatencyLimits(ttft_s=1e6)), Memory(10_000))
    found = search(WHOLE, predictor, n_requests=24)
    assert found.outcome.kept(LatencyLimits(ttft_s=1e6)) == 1.0


def test_a_candidate_that_cannot_keep_up_with_another_is_worse() -> None:
    predictor = Predictor(costs(), workload(LatencyLimits(ttft_s=0.5, tpot_s=0.05)), Memory(10_000))
    assert predictor(candidate(1, 64)).value < predictor(candidate(8, 128)).value
    assert predictor(candidate(2, 64)).value < predictor(candidate(8, 128)).value


def test_a_cut_model_with_long_ways_promises_less() -> None:
    assert tried(CUT, way_s=0.02).best.value < tried(WHOLE).best.value


def test_what_was_run_decides_over_what_was_predicted() -> None:
    whole, cut = tried(WHOLE), tried(CUT)
    better, worse = sorted((whole, cut), key=lambda each: -each.best.value)
    checks = {
        better.best.candidate: Check(0.5 * better.best.value, True, ()),
        worse.best.candidate: Check(worse.best.value, True, ()),
    }
    assert choose([whole, cut], {}) in (whole.best, cut.best)
    assert choose([whole, cut], checks).candidate == worse.best.candidate


def test_one_run_alone_does_not_win_over_what_promises_far_more() -> None:
    whole = tried(WHOLE)
    slow = whole.predictor(candidate(1, 64))
    near = replace(whole.best, value=0.9 * whole.best.value).candidate
    assert choose([whole], {slow.candidate: Check(slow.value, True, ())}) == whole.best
    assert choose([whole], {near: Check(1.0, True, ())}).candidate == near


def test_what_has_failed_is_not_chosen() -> None:
    whole, cut = tried(WHOLE), tried(CUT)
    failed = {whole.best.candidate: Check(0.0, False, (), has_failed=True)}
    assert choose([whole, cut], failed) == cut.best
    with pytest.raises(SystemFailed, match="nothing that was run"):
        choose([whole], failed)


def test_the_default_is_run_second_whatever_it_promises() -> None:
    whole, default = tried(WHOLE), candidate(1, 64)
    assert whole.predictor(default).value < 0.6 * whole.best.value
    checks: dict[Candidate, Check] = {}
    for expected in (whole.best.candidate, default):
        assert to_check([whole], checks, default) == expected
        checks[expected] = Check(1.0, True, ())
    assert to_check([whole], checks, default) is None


@pytest.mark.thorough
def test_limits_that_nothing_keeps_are_refused_with_what_can_be_kept() -> None:
    work = workload(LatencyLimits(ttft_s=1e-4))
    predictor = Predictor(costs(), work, Memory(10_000))
    hopeless = replace(tried(WHOLE), best=predictor(candidate(1, 64)))
    with pytest.raises(SystemFailed, match=r"at best ttft_p99_s would be 0\.\d+, tpot_p99_s 0\."):
        check_limits([hopeless], work)
    check_limits([hopeless, tried(WHOLE)], workload(LatencyLimits(ttft_s=1e6)))


def test_a_search_that_is_given_up_ends() -> None:
    predictor = Predictor(costs(), workload(), Memory(10_000))
    predictor.give_up()
    with pytest.raises(SearchGivenUp):
        search(WHOLE, predictor, n_requests=24)


def test_a_run_that_is_cut_off_counts_by_the_tokens_it_computed() -> None:
    simulation = Predictor(costs(), workload(), Memory(10_000)).simulation(candidate(8, 128))
    simulation.run()
    n_tokens, simulated_s = simulation.progress[9]
    twice_as_slow = [record(1, 5.0, 5.0 + 2 * simulated_s, [("a", 0, n_tokens)], [1.0])]
    assert speed(simulation, twice_as_slow) == pytest.approx(0.5)
