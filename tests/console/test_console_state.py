"""A watcher's state is what the events say, and stays small."""

import pytest

from services.console.console_state import (
    ENDED_S,
    KEPT_S,
    MAX_REQUESTS,
    ConsoleState,
    KvSlots,
    Mark,
)
from tests.console.events import STORY, T, arrival, epoch, event, iteration, mark, pool, request


def after(*events: object) -> ConsoleState:
    """The state after the story and some events more."""
    state = ConsoleState()
    for each in (*STORY, *events):
        state.feed(each)  # type: ignore[arg-type]
    return state


def test_before_the_first_event_nothing_is_known() -> None:
    state = ConsoleState()
    assert state.away == "connecting"
    assert (state.n_stages, state.tokens_per_s(), state.mean_batch_size()) == (0, 0.0, 0.0)


def test_the_story_is_told() -> None:
    state = after()
    assert state.away == ""
    assert state.now == pytest.approx(T + 0.8)
    assert (state.n_stages, state.n_in_flight) == (2, 2)
    assert state.tokens_per_s() == pytest.approx(8 / 0.8)
    assert state.mean_batch_size() == 2
    assert state.kv == KvSlots(shared=100, used=200, reserved=100, cached=50, free=550)
    assert [row.number for row in state.shown_requests()] == [1, 3, 2]
    one, three, two = state.shown_requests()
    assert (one.turn, one.n_generated_tokens, one.account) == ("admitted", 4, "alice")
    assert (two.turn, two.reason, two.n_generated_tokens) == ("ended", "stop", 2)
    assert (three.n_prompt_tokens, three.n_cached_tokens, three.max_new_tokens) == (9, 4, 5)


def test_a_block_is_that_of_the_largest_span() -> None:
    blocks = [(it.request, it.kind, it.n_requests) for it in after().iterations]
    assert blocks == [(2, "p", 2), (1, "d", 2), (3, "p", 2), (3, "r", 2)]
    first = after().iterations[0]
    assert [round(end - T, 3) for _, end in first.computing] == [0.1, 0.2]


def test_who_waits_comes_after_who_runs_and_in_the_pools_order() -> None:
    state = after(arrival(0.9, 5, 1, 1), arrival(0.9, 4, 1, 1), pool(0.9, [5, 4], {3: 2, 1: 5}))
    assert [row.number for row in state.shown_requests()] == [3, 1, 5, 4, 2]


def test_ended_requests_are_forgotten_after_a_while() -> None:
    state = after(mark(0.4 + ENDED_S + 0.1, "draining", ""))
    assert sorted(state.requests) == [1, 3]


def test_requests_that_the_pool_no_longer_has_are_forgotten() -> None:
    assert sorted(after(pool(0.9, [], {3: 3})).requests) == [2, 3]


@pytest.mark.parametrize("note", ["gap", "here"])
def test_what_is_told_anew_replaces_what_was_told(note: str) -> None:
    told = after()
    again = after({"type": note, "t": T + 99}, *anew())
    assert again.requests == told.requests
    assert (again.iterations, again.kv, again.now) == (told.iterations, told.kv, told.now)
    assert [str(each) for each in again.marks] == [str(each) for each in told.marks] + [
        "gap: some events were missed"
    ] * (note == "gap")


def anew() -> list[dict[str, object]]:
    """The story as one who comes later is told it: kind by kind, and the pool as it is."""
    kinds = ("epoch", "mark", "request", "iteration")
    told = [each for kind in kinds for each in STORY if each["type"] == kind]
    return [*told, pool(0.8, [], {1: 4, 3: 2})]


def test_requests_that_were_never_told_of_have_a_row_from_the_pool() -> None:
    state = after(pool(0.9, [8], {1: 2, 9: 77}))
    assert state.requests[9].n_generated_tokens == 77
    assert state.requests[8].n_prompt_tokens is None


def test_a_request_that_is_put_down_is_said_to_be() -> None:
    assert after(request(0.9, 1, "put_down")).requests[1].turn == "put_down"


def test_marks_come_from_losses_epochs_and_the_way_here() -> None:
    state = after(
        mark(0.9, "lost", "stage 1 went away", 1, 3),
        {"type": "away", "text": "no pipeline"},
        {"type": "away", "text": "no pipeline"},
        {"type": "here"},
        epoch(1.5, 4),
        {"type": "gap"},
    )
    texts = [str(each) for each in state.marks]
    assert texts == [
        "epoch: 3, demo on 2 stages",
        "lost: stage 1 went away (requests 1, 3)",
        "away: no pipeline",
        "here",
        "epoch: 4, demo on 2 stages",
        "gap: some events were missed",
    ]
    assert not state.requests
    assert state.marks[1] == Mark(T + 0.9, "lost", "stage 1 went away (requests 1, 3)")
    assert state.n_marks == 6


def test_any_event_says_that_somebody_is_there_again() -> None:
    state = after({"type": "away", "text": "no pipeline"})
    assert state.away == "no pipeline"
    state.feed(pool(1.0, [], {}))
    assert state.away == ""


def test_iterations_and_requests_are_kept_for_a_while_and_not_for_ever() -> None:
    state = after(iteration(KEPT_S + 10, 9, {1: (1, "d")}))
    assert [it.number for it in state.iterations] == [9]
    for number in range(MAX_REQUESTS + 50):
        state.feed(arrival(KEPT_S + 11, number, 1, 1))
    assert len(state.requests) == MAX_REQUESTS


def test_what_a_terminal_would_take_for_a_command_is_replaced() -> None:
    state = after(
        arrival(0.9, 7, 1, 1, account="\x1b[2Jevil"), mark(0.9, "lost", "\x1b]0;title\x07")
    )
    assert state.requests[7].account == "·[2Jevil"
    assert "\x1b" not in str(state.marks[-1])


def test_events_of_other_types_change_nothing() -> None:
    before = after()
    assert after(event(0.8, decision={"core": "{}"}), {"type": "new"}) == before


@pytest.mark.parametrize(
    "broken",
    [
        {"type": "epoch", "t": T},
        {"type": "request", "t": T, "number": "x"},
        {"type": "iteration", "t": T, "numbers": [1], "n_new_tokens": []},
        {"type": "pool", "t": T, "waiting": 3},
        {"type": "mark", "t": "now", "kind": "lost"},
        {"type": "mark", "t": T},
    ],
    ids=lambda each: each["type"],
)
def test_a_broken_event_is_named(broken: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"a broken event of type '{broken['type']}'"):
        ConsoleState().feed(broken)
