"""What a viewer who comes later is told first: everything that lives, and bounded history."""

from collections.abc import Sequence

from orcinus.v1 import watch_pb2

from services.common.watch_json import Json, to_json
from services.frontend.watching import view_state
from services.frontend.watching.view_feed import as_json
from services.frontend.watching.view_state import (
    FIGURES_S,
    ITERATIONS_S,
    MARKS_S,
    MAX_ITERATION_BYTES,
    MAX_ITERATIONS,
    MAX_REQUEST_BYTES,
    MAX_REQUESTS,
    MAX_TURNS,
    ViewState,
)
from tests.fake_watch import START_NS, decision, ended, epoch, iteration, mark, pool, request

WAITING, ADMITTED, PUT_DOWN = (
    watch_pb2.REQUEST_TURN_WAITING,
    watch_pb2.REQUEST_TURN_ADMITTED,
    watch_pb2.REQUEST_TURN_PUT_DOWN,
)


def change_of(event: watch_pb2.WatchEvent | Json) -> Json:
    return to_json(event) if isinstance(event, watch_pb2.WatchEvent) else event


def data_of(event: watch_pb2.WatchEvent | Json) -> bytes:
    return as_json(change_of(event))


def told_after(*events: watch_pb2.WatchEvent | Json) -> Sequence[bytes]:
    state = ViewState()
    for event in events:
        state.add(change_of(event), data_of(event))
    return list(state.told())


def figures(at_s: int) -> Json:
    return {"t": START_NS / 1e9 + at_s, "type": "figures", "minute": {}, "recent": {}}


def all_of(*events: watch_pb2.WatchEvent | Json) -> Sequence[bytes]:
    return [data_of(event) for event in events]


def test_nothing_is_told_before_anything_happened() -> None:
    assert told_after() == []


def test_each_kind_is_told_in_its_place_however_it_came() -> None:
    ended_turns = (request(1, WAITING, name="a"), request(1, ADMITTED), ended(1, at_s=1))
    live = (request(2, WAITING, name="b"), request(2, ADMITTED, at_s=1))
    came = (
        epoch(1),
        *live,
        *ended_turns,
        iteration(1, 1, 2),
        figures(1),
        mark("lost"),
        pool(2),
        epoch(2, at_s=2),
        decision("{}"),
        pool(at_s=2),
        iteration(2, 2, at_s=2),
    )
    assert told_after(*came) == all_of(
        epoch(1),
        epoch(2, at_s=2),
        mark("lost"),
        *ended_turns,
        *live,
        iteration(1, 1, 2),
        iteration(2, 2, at_s=2),
        figures(1),
        pool(at_s=2),
    )


def test_history_ends_where_its_time_is_over_and_what_lives_stays() -> None:
    old = (
        epoch(1),
        mark("old"),
        request(1, WAITING, name="a"),
        request(2, WAITING, name="b"),
        ended(2),
        iteration(1, 1),
    )
    late = ITERATIONS_S + 1
    news = (iteration(2, 1, at_s=late), request(3, WAITING, at_s=late))
    assert told_after(*old, *news) == all_of(
        epoch(1),
        mark("old"),
        request(1, WAITING, name="a"),
        request(3, WAITING, at_s=late),
        iteration(2, 1, at_s=late),
    )
    later = mark("new", at_s=MARKS_S + 1)
    assert told_after(*old, later)[:2] == all_of(epoch(1), later)
    assert told_after(*map(figures, range(FIGURES_S + 5))) == all_of(
        *map(figures, range(5, FIGURES_S + 5))
    )


def test_iterations_are_bounded_in_number_and_in_bytes() -> None:
    small = [iteration(number, 1) for number in range(MAX_ITERATIONS + 5)]
    assert told_after(*small) == all_of(*small[5:])
    large = [iteration(number, *range(4000)) for number in range(40)]
    told = told_after(*large)
    assert 1 < len(told) < len(large)
    assert MAX_ITERATION_BYTES - len(told[0]) < sum(map(len, told)) <= MAX_ITERATION_BYTES


def test_a_request_keeps_its_first_turn_and_the_latest() -> None:
    first = request(1, WAITING, name="a")
    turns = [request(1, kind, at_s=n) for n in range(20) for kind in (ADMITTED, PUT_DOWN)]
    assert told_after(first, *turns) == all_of(first, *turns[1 - MAX_TURNS :])


def test_requests_are_bounded_and_those_that_have_ended_leave_first() -> None:
    live = [request(number, WAITING) for number in range(1, MAX_REQUESTS + 1)]
    over = [event for n in (-1, -2) for event in (request(2**31 + n, WAITING), ended(2**31 + n))]
    assert told_after(*over, *live[:-2], live[-2]) == all_of(*over[2:], *live[:-1])
    assert told_after(*live, request(2**31, WAITING))[0] == data_of(live[1])
    named = [request(number, WAITING, name="x" * 1000) for number in range(1, MAX_REQUESTS)]
    told = told_after(*named)
    assert told == all_of(*named[-len(told) :])
    assert sum(map(len, told)) <= MAX_REQUEST_BYTES < sum(map(len, told)) + 1100


def test_an_event_that_is_larger_than_all_may_be_is_not_kept() -> None:
    huge = mark("x" * view_state.MAX_MARK_BYTES)
    assert told_after(mark("a"), huge, mark("b")) == all_of(mark("b"))


def test_the_epochs_of_all_pipelines_that_serve_are_told() -> None:
    first, second, again = epoch(1), epoch(2, pipeline=1), epoch(3)
    assert told_after(first, second) == all_of(first, second)
    assert told_after(first, second, again) == all_of(first, second, again)
    later = epoch(2**20 + 1, pipeline=2)
    assert told_after(first, second, later) == all_of(first, second, later)


def test_a_pipeline_that_serves_no_longer_is_not_told_while_others_serve() -> None:
    first, second = epoch(1), epoch(2, pipeline=1)
    left = mark("left", epoch=1, kind=watch_pb2.MARK_KIND_LEFT)
    assert told_after(first, second, left) == all_of(second, left)
    lost = mark("lost", epoch=2)
    assert told_after(first, second, left, lost) == all_of(second, left, lost)
    unfit = mark("unfit", kind=watch_pb2.MARK_KIND_UNFIT)
    assert told_after(first, second, unfit) == all_of(first, second, unfit)
