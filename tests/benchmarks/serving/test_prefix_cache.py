"""The benchmark of the prefix cache: what it reports, and what it refuses to compare."""

import argparse
import dataclasses
from pathlib import Path

import pytest

from benchmarks.records import RequestRecord
from benchmarks.serving.prefix_cache import Chat, Turn, draw, pauses, planned, report


def chat(*, has_cache: bool, first_token_s: float, token: int = 7, n_cached: int = 0) -> Chat:
    """Two users, two turns of ten seconds each."""
    turns = []
    for user in range(2):
        for turn in (1, 2):
            start_s = 10.0 * (turn - 1)
            record = RequestRecord(
                arrival_s=start_s,
                start_s=start_s,
                first_token_s=start_s + first_token_s,
                end_s=start_s + 10 * first_token_s,
                n_prompt=5,
                n_output=3,
            )
            turns.append(Turn(user, turn, (token,) * 3, n_cached, record))
    return Chat(has_cache, tuple(turns))


def test_it_reports_ratios_of_the_turns_after_the_first(tmp_path: Path) -> None:
    chats = [
        chat(has_cache=False, first_token_s=0.8),
        chat(has_cache=True, first_token_s=0.1, n_cached=4),
    ]
    *_, ratios = report(chats, 2)
    assert ratios == "first token 8.00 x sooner, throughput 1.64 x, same tokens"
    draw(tmp_path / "figure.png", chats, 2)
    assert (tmp_path / "figure.png").stat().st_size > 0


def test_it_sets_a_peer_beside_ours_by_whether_it_caches(tmp_path: Path) -> None:
    ours = [
        chat(has_cache=False, first_token_s=0.8),
        chat(has_cache=True, first_token_s=0.1, n_cached=4),
    ]
    peers = [
        chat(has_cache=False, first_token_s=0.4, token=9),
        chat(has_cache=True, first_token_s=0.2, token=8),
    ]
    chats = [*ours, *(dataclasses.replace(one, engine="vllm") for one in peers)]
    *_, off, on = report(chats, 2)
    assert off == "ours to vllm, cache off: first token 0.50 x sooner, throughput 0.78 x"
    assert on == "ours to vllm, cache on: first token 2.00 x sooner, throughput 1.09 x"
    draw(tmp_path / "figure.png", chats, 2)
    assert (tmp_path / "figure.png").stat().st_size > 0


def options_of(*, think_s: float) -> argparse.Namespace:
    return argparse.Namespace(
        seed=0, users=2, turns=3, n_system=4, n_question=2, n_answer=5, think_s=think_s
    )


def test_the_turns_of_a_peer_follow_one_another() -> None:
    requests = planned(options_of(think_s=0.0))
    assert [request.arrival_s for request in requests] == [0.0] * 6
    assert [request.follows for request in requests] == [None, 0, 1, None, 3, 4]
    assert [request.n_prompt for request in requests] == [6, 2, 2, 6, 2, 2]
    assert requests[0].prompt_token_ids[:4] == requests[3].prompt_token_ids[:4]


def test_users_think_as_long_whoever_answers() -> None:
    options = options_of(think_s=2.0)
    thought_s = [request.arrival_s for request in planned(options)]
    assert thought_s == [pause_s for of_user in pauses(options) for pause_s in of_user]
    assert len(set(thought_s)) == 6
    assert min(thought_s) > 0


def test_it_refuses_other_tokens_and_a_cache_that_has_nothing() -> None:
    off = chat(has_cache=False, first_token_s=0.8)
    with pytest.raises(RuntimeError, match="differ"):
        report([off, chat(has_cache=True, first_token_s=0.1, token=8, n_cached=4)], 2)
    with pytest.raises(RuntimeError, match="nothing"):
        report([off, chat(has_cache=True, first_token_s=0.1)], 2)
