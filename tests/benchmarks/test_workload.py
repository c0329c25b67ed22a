"""Workloads: what is drawn, from what, and how public traces are read."""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import workload
from benchmarks.workload import Lengths, Trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:48.1805900,9000,55
2023-11-16 18:15:51.6805900,10,0
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01+00:00,2399,6
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,API log
"""
BURSTGPT_SESSIONS = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "2.5,7,3.1,ChatGPT,10,20,30,Conversation log\n"
)


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    workload.add_options(parser)
    return parser.parse_args(arguments)


def trace(tmp_path: Path, content: str, file_format: str) -> Trace:
    path = tmp_path / "trace.csv"
    path.write_text(content)
    return workload.read_trace(path, file_format)


def test_the_mixed_trace_of_seed_0_is_always_the_same() -> None:
    lengths = workload.mixed_lengths(64, seed=0)
    assert sum(each.n_prompt for each in lengths) == 17_709
    assert sum(each.n_output for each in lengths) == 4_230
    assert lengths[:2] == (Lengths(441, 113), Lengths(338, 18))


@given(st.integers(0, 200), st.integers(0, 2**32))
def test_lengths_keep_their_bounds(n_requests: int, seed: int) -> None:
    lengths = workload.mixed_lengths(n_requests, seed=seed, prompts=(3, 5), outputs=(2, 2))
    assert len(lengths) == n_requests
    assert all(3 <= each.n_prompt <= 5 and each.n_output == 2 for each in lengths)


def test_both_bounds_occur() -> None:
    lengths = workload.mixed_lengths(200, seed=1, prompts=(3, 5))
    assert {each.n_prompt for each in lengths} == {3, 4, 5}


@given(st.integers(1, 50), st.floats(0.01, 100), st.integers(0, 1000))
def test_another_rate_stretches_the_same_arrivals(n: int, rate: float, seed: int) -> None:
    once = workload.poisson_arrivals(n, rate=1.0, seed=seed)
    assert workload.poisson_arrivals(n, rate=rate, seed=seed) == pytest.approx(
        [arrival / rate for arrival in once]
    )
    assert once[0] == 0.0
    assert list(once) == sorted(once)


def test_gaps_of_arrivals_are_exponential() -> None:
    arrivals = workload.poisson_arrivals(20_001, rate=4.0, seed=3)
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    assert sum(gaps) / len(gaps) == pytest.approx(0.25, rel=0.03)
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.015)


def test_prompts_do_not_depend_on_arrivals_nor_on_what_follows() -> None:
    lengths = workload.mixed_lengths(6, seed=5)
    offline = workload.plan(lengths, workload.all_at_once(6), vocab_size=90, seed=5)
    online = workload.plan(
        lengths[:3], workload.poisson_arrivals(3, rate=2, seed=5), vocab_size=90, seed=5
    )
    prompts = [request.prompt_token_ids for request in offline]
    assert [request.prompt_token_ids for request in online] == prompts[:3]
    assert [len(prompt) for prompt in prompts] == [each.n_prompt for each in lengths]
    assert [request.n_output for request in offline] == [each.n_output for each in lengths]
    assert set(itertools.chain.from_iterable(prompts)) == set(range(90))


def test_azure_traces_are_read_in_the_order_of_time_without_failures(tmp_path: Path) -> None:
    read = trace(tmp_path, AZURE, "azure")
    assert read.lengths == (Lengths(374, 44), Lengths(9000, 55), Lengths(396, 109))
    assert read.arrivals_s == pytest.approx((0.0, 1.5, 4.314579), abs=1e-6)


def test_azure_traces_of_2024_have_zones(tmp_path: Path) -> None:
    read = trace(tmp_path, AZURE_2024, "azure")
    assert read.arrivals_s == pytest.approx((0.0, 0.99007), abs=1e-6)


@pytest.mark.parametrize(
    ("content", "lengths", "arrivals_s"),
    [
        pytest.param(BURSTGPT, (Lengths(472, 18), Lengths(1087, 230)), (0.0, 40.0), id="plain"),
        pytest.param(BURSTGPT_SESSIONS, (Lengths(10, 20),), (0.0,), id="sessions"),
    ],
)
def test_burstgpt_is_read(
    tmp_path: Path, content: str, lengths: Sequence[Lengths], arrivals_s: Sequence[float]
) -> None:
    read = trace(tmp_path, content, "burstgpt")
    assert read == Trace(tuple(lengths), tuple(arrivals_s))


def test_a_trace_that_lacks_a_column_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no column 'TIMESTAMP'"):
        trace(tmp_path, BURSTGPT, "azure")


def test_a_line_that_is_no_request_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trace.csv, line 3: .*many"):
        trace(tmp_path, AZURE.replace("396", "many"), "azure")


def test_what_a_context_cannot_hold_is_left_out() -> None:
    read = Trace((Lengths(9, 2), Lengths(5, 5), Lengths(1, 1)), (0.0, 2.0, 5.0))
    assert read.fitting(10) == Trace((Lengths(5, 5), Lengths(1, 1)), (0.0, 3.0))


@pytest.mark.parametrize(
    ("arguments", "rate", "arrivals_s"),
    [
        pytest.param([], None, [0.0, 0.0, 0.0], id="all at once"),
        pytest.param(["--trace-scale=2"], None, [0.0, 0.75, 2.1572895], id="trace's own"),
        pytest.param(["--seed=3"], 2.0, workload.poisson_arrivals(3, rate=2.0, seed=3), id="rate"),
    ],
)
def test_options_say_when_requests_of_a_trace_come(
    tmp_path: Path, arguments: list[str], rate: float | None, arrivals_s: Sequence[float]
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    planned = workload.from_options(
        options(f"--trace={path}", *arguments), rate=rate, vocab_size=50
    )
    assert [request.n_prompt for request in planned] == [374, 9000, 396]
    assert [request.arrival_s for request in planned] == pytest.approx(arrivals_s)


def test_options_say_how_long_requests_are() -> None:
    planned = workload.from_options(
        options("--requests=5", "--prompt-tokens=7", "--output-tokens=2-3"), rate=1, vocab_size=9
    )
    assert [request.n_prompt for request in planned] == [7] * 5
    assert {request.n_output for request in planned} <= {2, 3}


def test_runs_differ_in_their_prompts_alone() -> None:
    first, second = (
        workload.from_options(options("--requests=5"), rate=1, vocab_size=4096, run=run)
        for run in (0, 1)
    )
    assert [(each.arrival_s, each.n_prompt, each.n_output) for each in first] == [
        (each.arrival_s, each.n_prompt, each.n_output) for each in second
    ]
    beginnings = {each.prompt_token_ids[:4] for each in (*first, *second)}
    assert len(beginnings) == 10


def test_a_rehearsal_leaves_nothing_that_is_measured() -> None:
    requests = workload.from_options(options("--requests=5"), rate=1, vocab_size=4096)
    first = workload.rehearsal(requests, n_requests=3, n_output=4)
    assert [each.n_prompt for each in first] == [each.n_prompt for each in requests[:3]]
    assert all(each.arrival_s == 0 and each.n_output <= 4 for each in first)
    beginnings = {each.prompt_token_ids[:4] for each in requests}
    assert not beginnings & {each.prompt_token_ids[:4] for each in first}
