"""What is run beyond the paper's figures is what it is said to be."""

from dataclasses import replace

import pytest

from benchmarks.paper.beyond import defaults, elsewhere, ladder
from benchmarks.paper.beyond.__main__ import lines_of
from benchmarks.paper.beyond.loads import Load, TwoClients
from benchmarks.paper.beyond.setups import IterationLevel, RequestLevel
from benchmarks.paper.beyond.trials import InBand, Trial
from benchmarks.paper.gpu_costs import Gpu
from simulator.costs import IterationWork, LinearCosts
from simulator.workload import Lengths, equal_lengths, mixed_lengths

GPU = Gpu(layer_s=1e-4, bandwidth=1e12, products=1e14, request_s=1e-6, pair_s=1e-9)
ENGINES = {"orca": GPU, "ft": replace(GPU, sync_s=0.03)}
FEW = Load(mixed_lengths(12, seed=0))


def test_messages_in_band_keep_each_stage_waiting() -> None:
    costs = InBand(LinearCosts(((1.0,) + (0.0,) * 9,) * 3, hop_s=0.5), (0.25, 0.125))
    assert [costs.stage_s(index, IterationWork(1, 1, 1, 0, 1)) for index in range(3)] == [
        1.25,
        1.125,
        1.125,
    ]
    assert (costs.n_stages, costs.hop_s) == (3, 0.5)


def test_a_load_at_another_rate_is_the_same_stretched() -> None:
    slow, fast = FEW.arrivals(1.0), FEW.arrivals(4.0)
    assert [one.time_s for one in slow] == pytest.approx([4 * one.time_s for one in fast])
    assert all(one.time_s == 0 for one in FEW.arrivals(None))


def test_clients_that_know_no_lengths_ask_for_the_context() -> None:
    unknown = replace(FEW, context=2048).arrivals(None)
    assert {one.n_prompt + (one.max_new_tokens or 0) for one in unknown} == {2048}


def test_the_first_half_of_a_prompt_is_one_of_a_few() -> None:
    load = replace(FEW, lengths=equal_lengths(40, n_prompt=10, n_output=1), n_beginnings=3)
    prompts = [one.prompt_token_ids or () for one in load.arrivals(None)]
    assert {len(prompt) for prompt in prompts} == {10}
    assert len({tuple(prompt[:5]) for prompt in prompts}) == 3
    assert len({tuple(prompt[5:]) for prompt in prompts}) == 40


def test_the_small_client_asks_at_the_same_times_with_the_large_one() -> None:
    clients = TwoClients(mixed_lengths(110, seed=0))
    alone, both = (clients.arrivals(0.1, both=both) for both in (False, True))
    small = [one for one in both if one.account is not None and one.account.name == "small"]
    assert (len(alone), len(both)) == (10, 110)
    assert [one.time_s for one in small] == [one.time_s for one in alone]


def test_throughput_within_a_latency_keeps_it() -> None:
    trial = Trial(IterationLevel(4), GPU, FEW)
    alone_s = trial.outcome(1e-3).median_normalised_s
    highest = trial.highest()
    assert trial.within(alone_s / 2) == 0
    assert 0 < trial.within(1.5 * alone_s) <= trial.within(3 * alone_s) <= highest


def test_a_rung_counts_with_the_best_of_its_sizes() -> None:
    small, large = RequestLevel(1, 1), RequestLevel(4, 4)
    load = Load(equal_lengths(24, n_prompt=64, n_output=16))
    found = ladder.measure([ladder.Rung("both", (small, large), GPU)], load)[0]
    assert found.highest == Trial(large, GPU, load).highest() > Trial(small, GPU, load).highest()
    assert found.highest_size == "4,4"
    assert found.within == max(Trial(setup, GPU, load).within() for setup in (small, large))


def test_each_rung_of_the_ladder_can_be_built() -> None:
    rungs = [*ladder.ladder(ENGINES), *ladder.added_alone(ENGINES), *ladder.removed_alone(ENGINES)]
    load = Load(mixed_lengths(3, seed=0))
    for rung in rungs:
        for setup in rung.setups:
            trial = Trial(setup, rung.gpu, load, message_s=rung.message_s)
            assert len(trial.outcome(0.05).requests) == 3


@pytest.mark.thorough
def test_chunks_steady_the_pace_and_shared_beginnings_are_not_computed() -> None:
    load = Load(mixed_lengths(60, seed=0))
    whole, *chunked = defaults.chunks(GPU, load)
    assert all(one.p99_gap_ms < whole.p99_gap_ms for one in chunked)
    assert defaults.prefixes(GPU, load)["ratio"] > 1


@pytest.mark.thorough
def test_admission_that_knows_more_has_larger_batches() -> None:
    rows = defaults.memory(GPU, Load(equal_lengths(300, n_prompt=256, n_output=64)))
    at = {(row["admission"], row["max_sequence_len"]): row["mean_batch_size"] for row in rows}
    reserving, optimistic = "reserves what is asked for", "optimistic"
    assert at[reserving, 2048] < at[reserving, 640] < at["knows lengths", None]
    assert at[reserving, 2048] < at[optimistic, 2048]


@pytest.mark.thorough
def test_a_fair_order_shields_the_small_client() -> None:
    found = defaults.fairness(GPU, mixed_lengths(440, seed=0))
    assert found["alone"] < found["fair"] < found["fcfs"]


def test_there_is_no_memory_for_eight_on_one_gpu() -> None:
    rows = elsewhere.thirteen(ENGINES)
    assert all(None not in row["ms"] for row in rows if row["engine"] == "orca")
    for row in rows:
        if row["engine"] == "ft":
            assert [time_ms is None for time_ms in row["ms"]] == [False] * 3 + [True] * 3


def test_what_is_found_is_printed_by_parts() -> None:
    worth = ladder.Worth("a rung", 1.23456, "8,8", 0.5, "1,1")
    found = {"ladder": [worth], "limits": {"bounds": {"32": 11.0}, "rows": [{"n": 1}]}}
    assert list(lines_of(found)) == [
        "ladder",
        "  name a rung, highest 1.235, highest_size 8,8, within 0.5, within_size 1,1",
        "limits",
        "  bounds",
        "    32: 11",
        "  rows",
        "    n 1",
    ]


def test_a_lone_length_is_what_it_says() -> None:
    load = Load((Lengths(3, 2),))
    assert [(one.n_prompt, one.n_output) for one in load.arrivals(1.0)] == [(3, 2)]
