"""The loop that drives a peer: who is handed over when, and what is noted about it."""

from typing import Any

from benchmarks.peers.protocol import TokenIds, run
from tests.benchmarks.peers.fake_peer import CountingEngine


class Clock:
    """Time that passes when somebody sleeps or computes."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


class SlowEngine(CountingEngine):
    """Takes a second for a step."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def step(self) -> dict[int, TokenIds]:
        self._clock.now += 1.0
        return super().step()


def serve(*requests: tuple[float, list[int], int]) -> tuple[SlowEngine, dict[str, Any]]:
    """Requests as arrival, prompt and length of the output."""
    clock = Clock()
    engine = SlowEngine(clock)
    keys = ("arrival_s", "prompt_token_ids", "n_output")
    given = [dict(zip(keys, request, strict=True)) for request in requests]
    return engine, run(engine, given, clock=clock, sleep=clock.sleep)


def test_requests_that_come_together_are_computed_together() -> None:
    engine, answer = serve((0.0, [7], 2), (0.0, [3, 40], 1))

    assert engine.largest_batch == 2
    assert answer["token_ids"] == [[8, 9], [41]]
    assert answer["requests"] == [
        {
            "arrival_s": 0.0,
            "n_prompt": 1,
            "start_s": 0.0,
            "first_token_s": 1.0,
            "end_s": 2.0,
            "n_output": 2,
        },
        {
            "arrival_s": 0.0,
            "n_prompt": 2,
            "start_s": 0.0,
            "first_token_s": 1.0,
            "end_s": 1.0,
            "n_output": 1,
        },
    ]


def test_a_request_waits_for_the_step_during_which_it_came() -> None:
    _, answer = serve((0.0, [1], 3), (1.5, [1], 1))

    late = answer["requests"][1]
    assert (late["start_s"], late["first_token_s"]) == (2.0, 3.0)


def test_nothing_runs_until_the_next_request_is_due() -> None:
    engine, answer = serve((0.0, [1], 1), (10.0, [1], 1))

    assert engine.largest_batch == 1
    assert answer["requests"][1]["start_s"] == 10.0


def test_requests_are_taken_in_the_order_of_their_arrival() -> None:
    _, answer = serve((5.0, [1], 1), (0.0, [1], 1))

    assert [each["end_s"] for each in answer["requests"]] == [6.0, 1.0]


def test_a_further_turn_comes_when_the_one_before_has_ended_after_its_prompt_and_answer() -> None:
    clock = Clock()
    engine = SlowEngine(clock)
    turns: list[dict[str, Any]] = [
        {"arrival_s": 0.0, "prompt_token_ids": [7], "n_output": 2},
        {"arrival_s": 0.0, "prompt_token_ids": [40, 50], "n_output": 1, "follows": 0},
        {"arrival_s": 0.0, "prompt_token_ids": [60], "n_output": 1, "follows": 1},
    ]
    answer = run(engine, turns, clock=clock, sleep=clock.sleep)

    assert answer["token_ids"] == [[8, 9], [51], [61]]
    records = answer["requests"]
    assert [each["arrival_s"] for each in records] == [0.0, 2.0, 3.0]
    assert [each["n_prompt"] for each in records] == [1, 5, 7]
    assert [each["first_token_s"] for each in records] == [1.0, 3.0, 4.0]


def test_a_further_turn_comes_as_long_after_the_one_before_as_is_said() -> None:
    clock = Clock()
    turns: list[dict[str, Any]] = [
        {"arrival_s": 0.5, "prompt_token_ids": [7], "n_output": 1},
        {"arrival_s": 4.0, "prompt_token_ids": [40], "n_output": 1, "follows": 0},
        {"arrival_s": 2.0, "prompt_token_ids": [3], "n_output": 2},
    ]
    records = run(SlowEngine(clock), turns, clock=clock, sleep=clock.sleep)["requests"]
    assert [each["arrival_s"] for each in records] == [0.5, 5.5, 2.0]
    assert [each["first_token_s"] for each in records] == [1.5, 6.5, 3.0]
    assert [each["end_s"] for each in records] == [1.5, 6.5, 4.0]
