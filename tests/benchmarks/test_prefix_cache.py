"""The benchmark of the prefix cache: what it reports, and what it refuses to compare."""

from pathlib import Path

import pytest

from benchmarks.prefix_cache import Chat, Turn, draw, report
from benchmarks.records import RequestRecord


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


def test_it_refuses_other_tokens_and_a_cache_that_has_nothing() -> None:
    off = chat(has_cache=False, first_token_s=0.8)
    with pytest.raises(RuntimeError, match="differ"):
        report([off, chat(has_cache=True, first_token_s=0.1, token=8, n_cached=4)], 2)
    with pytest.raises(RuntimeError, match="nothing"):
        report([off, chat(has_cache=True, first_token_s=0.1)], 2)
