"""A watcher's state is what the events say, and stays small."""

import pytest

from services.common.watch_json import Json
from services.console.console_state import (
    ENDED_S,
    KEPT_S,
    MAX_REQUESTS,
    NO_FIGURES,
    ConsoleState,
    KvSlots,
    PipelineMark,
)
from tests.console.events import (
    STORY,
    Event,
    T,
    arrival,
    epoch,
    event,
    iteration,
    mark,
    pool,
    request,
    told,
)


def after(*events: Event | Json) -> ConsoleState:
    """The state after the story and some events more."""
    state = ConsoleState()
    for each in told(*STORY, *events):
        state.feed(each)
    return state


def test_before_the_first_event_nothing_is_known() -> None:
    state = ConsoleState()
    assert state.away == "connecting"
    assert (state.pipelines, state.figures) == ({}, NO_FIGURES)


def test_the_story_is_told() -> None:
    state = after()
    assert state.away == ""
    assert state.now == pytest.approx(T + 0.8)
    assert (state.pipelines[0].n_stages, state.n_in_flight) == (2, 2)
    assert state.kv == KvSlots(shared=100, used=200, reserved=100, cached=50, free=550)
    assert [row.number for row in state.shown_requests()] == [1, 3, 2]
    one, three, two = state.shown_requests()
    assert (one.turn, one.n_generated_tokens, one.account) == ("admitted", 4, "alice")
    assert (two.turn, two.reason, two.n_generated_tokens) == ("ended", "stop", 2)
    assert (three.n_prompt_tokens, three.n_cached_tokens, three.max_new_tokens) == (9, 4, 5)


def test_pipelines_are_kept_apart_and_added_up() -> None:
    other = iteration(0.7, 1, {4: (9, "p", 0)})
    other.iteration.pipeline = 1
    told_pool = pool(1.0, [], {1: 4, 3: 2, 4: 1})
    told_pool.pool.pipelines.extend([0, 0, 1])
    admitted = request(0.7, 4, "admitted", pipeline=1)
    state = after(epoch(0.7, 4, pipeline=1, n_slots=600), admitted, other, told_pool)
    assert sorted(state.pipelines) == [0, 1]
    assert (state.n_running, state.n_in_flight) == (3, 4)
    assert [state.pipelines[number].n_running for number in (0, 1)] == [2, 1]
    assert state.kv.free == 550 + 150
    assert [it.pipeline for it in state.iterations] == [0, 0, 0, 0, 1]
    assert [state.requests[number].pipeline for number in (1, 3, 4)] == [0, 0, 1]
    moved = told_pool.pool
    moved.pipelines[0] = 1
    state.feed(told(*STORY, told_pool)[-1])
    assert state.requests[1].pipeline == 1
    assert state.pipelines[0].n_running == 1


def test_a_pipeline_that_begins_to_drain_stays_as_it_is_and_says_so() -> None:
    admitted = request(0.7, 4, "admitted", pipeline=1)
    state = after(epoch(0.7, 4, pipeline=1), admitted)
    n_marks, kv = state.n_marks, state.pipelines[0].kv
    state.feed(told(*STORY, epoch(0.9, is_draining=True))[-1])
    assert state.pipelines[0].epoch["is_draining"]
    assert not state.pipelines[1].epoch["is_draining"]
    assert (state.n_marks, state.pipelines[0].kv) == (n_marks, kv)


def test_a_pipeline_that_is_lost_or_leaves_is_not_shown_while_others_serve() -> None:
    lost = mark(0.8, "lost", "gone")
    assert sorted(after(epoch(0.7, 4, pipeline=1), lost).pipelines) == [1]
    assert sorted(after(lost).pipelines) == [0], "the last one stays"
    assert sorted(after(epoch(0.7, 4, pipeline=1), mark(0.8, "left", "")).pipelines) == [1]
    assert sorted(after(lost, epoch(0.9, 4)).pipelines) == [0]


def test_a_block_is_that_of_the_largest_span() -> None:
    blocks = [(it.request, it.kind) for it in after().iterations]
    assert blocks == [(2, "p"), (1, "d"), (3, "p"), (3, "r")]
    first = after().iterations[0]
    assert [round(end - T, 3) for _, end in first.computing] == [0.1, 0.2]


def test_who_waits_comes_after_who_runs_and_in_the_pools_order() -> None:
    state = after(arrival(0.9, 5, 1, 1), arrival(0.9, 4, 1, 1), pool(0.9, [5, 4], {3: 2, 1: 5}))
    assert [row.number for row in state.shown_requests()] == [3, 1, 5, 4, 2]


def test_ended_requests_are_forgotten_after_a_while() -> None:
    state = after(mark(0.4 + ENDED_S + 0.1, "draining", ""))
    assert sorted(state.requests) == [1, 3]


def test_figures_are_those_of_the_last_seconds() -> None:
    assert after().figures == NO_FIGURES
    state = after(mark(1.6, "draining", ""))
    assert state.figures == {"tokens_per_s": 8, "batch_size": 2}


@pytest.mark.parametrize("note", ["gap", "here"])
def test_what_is_told_anew_replaces_what_was_told(note: str) -> None:
    once = after()
    again = after()
    for each in ({"type": note, "t": T + 99}, *anew()):
        again.feed(each)
    assert again.requests == once.requests
    assert (again.iterations, again.kv, again.now) == (once.iterations, once.kv, once.now)
    assert [str(each) for each in again.marks] == [str(each) for each in once.marks] + [
        "gap: some events were missed"
    ] * (note == "gap")


def anew() -> list[Json]:
    """The story as a late viewer is told it: kind by kind, and the pool as it is."""
    kinds = ("epoch", "mark", "request", "iteration")
    changes = told(*STORY, pool(0.8, [], {1: 4, 3: 2}))
    return [*(each for kind in kinds for each in changes if each["type"] == kind), changes[-1]]


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
        "epoch: 4, demo on 2 stages: a new pipeline serves",
        "gap: some events were missed",
    ]
    assert not state.requests
    assert state.marks[1] == PipelineMark(T + 0.9, "lost", "stage 1 went away (requests 1, 3)")
    assert state.n_marks == 6


def test_another_scheduler_numbers_its_requests_anew() -> None:
    state = after(epoch(0.9, 2**20 + 1))
    assert not state.requests


def test_any_event_says_that_somebody_is_there_again() -> None:
    state = after({"type": "away", "text": "no pipeline"})
    assert state.away == "no pipeline"
    for each in told(pool(1.0, [], {})):
        state.feed(each)
    assert state.away == ""


def test_iterations_and_requests_are_kept_for_a_while_and_not_for_ever() -> None:
    state = after(iteration(KEPT_S + 10, 9, {1: (1, "d", 10)}))
    assert [it.number for it in state.iterations] == [9]
    for number in range(MAX_REQUESTS + 50):
        for each in told(arrival(KEPT_S + 11, number, 1, 1)):
            state.feed(each)
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
        {"type": "iteration", "t": T, "numbers": [1], "n_generated": []},
        {"type": "pool", "t": T, "waiting": 3},
        {"type": "mark", "t": "now", "kind": "lost"},
        {"type": "mark", "t": T},
        {"type": "figures", "t": T, "recent": {}},
    ],
    ids=lambda each: each["type"],
)
def test_a_broken_event_is_named(broken: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"a broken event of type '{broken['type']}'"):
        ConsoleState().feed(broken)
