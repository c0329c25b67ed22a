"""Loads have the shared beginnings that they are said to have."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.placement import loads
from simulator.engine import A_TOKEN, STOP_TOKEN

ROWS = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 600, "output_length": 7, "hash_ids": [0, 3]},
    {"timestamp": 6000, "input_length": 1300, "output_length": 9, "hash_ids": [0, 1, 4]},
]


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_equal_ids_are_equal_blocks_and_a_conversation_has_one_client(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", *map(json.dumps, ROWS))
    one, two, three = loads.mooncake(path, 3, seed=0).arrivals
    prompts = [list(each.prompt_token_ids or ()) for each in (one, two, three)]
    assert [len(prompt) for prompt in prompts] == [1100, 600, 1300]
    assert prompts[0][:1024] == prompts[2][:1024]
    assert prompts[0][:512] == prompts[1][:512]
    assert set(prompts[0][1024:]).isdisjoint(prompts[2][1024:])
    assert one.account is three.account
    assert [each.time_s for each in (one, two, three)] == [0.0, 3.0, 6.0]


@pytest.mark.parametrize(
    "line", ["{", "[1]", '{"timestamp": 1}', json.dumps({**ROWS[0], "hash_ids": []})]
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "trace.jsonl", json.dumps(ROWS[0]), line)
    with pytest.raises(ValueError, match="line 2: no request of Mooncake"):
        loads.mooncake(path, 2, seed=0)


def test_a_short_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", json.dumps(ROWS[0]))
    with pytest.raises(ValueError, match="has 1 requests, fewer than 2"):
        loads.mooncake(path, 2, seed=0)


def test_a_turn_of_a_chat_begins_with_all_turns_before_it() -> None:
    arrivals = loads.chats(200, rate=2.0, seed=1).arrivals
    assert [one.time_s for one in arrivals] == sorted(one.time_s for one in arrivals)
    prompts = [list(one.prompt_token_ids or ()) for one in arrivals]
    n_continued = 0
    for index, (arrival, prompt) in enumerate(zip(arrivals, prompts, strict=True)):
        later = [one for one in prompts[index + 1 :] if one[: len(prompt)] == prompt]
        for turn, _ in pairwise([*later, None]):
            assert turn is not None
            answer = turn[len(prompt) : len(prompt) + arrival.n_output]
            assert answer == [A_TOKEN] * (arrival.n_output - 1) + [STOP_TOKEN]
        n_continued += bool(later)
    assert n_continued > 50


def test_a_load_at_a_rate_is_the_same_stretched() -> None:
    load = loads.azure(101, seed=0)
    fast = load.at_rate(50.0).arrivals
    assert fast[-1].time_s == pytest.approx(2.0)
    assert [one.n_prompt for one in fast] == [one.n_prompt for one in load.arrivals]


def test_the_first_clients_send_half_of_the_conversations() -> None:
    names = [one.account.name for one in loads.azure(4000, seed=0).arrivals if one.account]
    part = sum(int(name) < loads.N_LARGE for name in names) / len(names)
    assert part == pytest.approx(loads.LARGE_PART, abs=0.03)
    assert len(set(names)) == loads.N_CLIENTS
