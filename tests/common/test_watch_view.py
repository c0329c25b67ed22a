"""The view is the sum of a scheduler's events."""

from typing import Any

import pytest
from orcinus.v1 import watch_pb2

from services.common.watch_json import Json
from services.common.watch_view import ENDED_S, View
from tests.fake_watch import START_NS, ended, epoch, iteration, mark, pool, request

WAITING = watch_pb2.REQUEST_TURN_WAITING


def changes(*events: watch_pb2.WatchEvent) -> list[Json]:
    view = View()
    return [change for event in events for change in view.take(event)]


def last(*events: watch_pb2.WatchEvent) -> Json:
    return changes(*events)[-1]


def arrival(number: int, *, at_s: float = 0.0, n_prompt: int = 10) -> watch_pb2.WatchEvent:
    event = request(number, WAITING, at_s=at_s)
    event.request.n_prompt_tokens = n_prompt
    return event


def ran(number: int, at_s: float, **columns: Any) -> watch_pb2.WatchEvent:
    """An iteration of one request, 1, that is sent at a time and takes 10 ms."""
    event = iteration(number, 1, at_s=at_s)
    for name, value in columns.items():
        del getattr(event.iteration, name)[:]
        getattr(event.iteration, name).append(value)
    return event


def test_epochs_of_another_term_are_told_apart_and_a_second_epoch_is_a_new_pipeline() -> None:
    first, second, third = changes(epoch(1), epoch(2), epoch(2**20 + 1))
    assert (first["term"], second["term"], third["term"]) == (0, 0, 1)
    assert first["text"] == "1, test-model on 2 stages"
    assert second["text"] == "2, test-model on 2 stages: a new pipeline serves"


def test_a_pipeline_beside_others_is_named_where_it_serves_and_where_it_is_lost() -> None:
    one, alone, other, both = changes(
        epoch(1), mark("gone", epoch=1), epoch(2, pipeline=1), mark("gone", epoch=2)
    )
    assert (one["pipeline"], other["pipeline"]) == (0, 1)
    assert other["text"] == "2, test-model on 2 stages: pipeline 1 serves"
    assert (alone["text"], both["text"]) == ("gone", "pipeline 1: gone")
    assert last(epoch(1), epoch(2, pipeline=1), mark("draining"))["text"] == "draining"


def test_an_epoch_that_begins_to_drain_keeps_its_label() -> None:
    draining = epoch(2, pipeline=1)
    draining.epoch.is_draining = True
    before, after = changes(epoch(1), epoch(2, pipeline=1), draining)[1:]
    assert before["text"] == after["text"]
    assert (before["is_draining"], after["is_draining"]) == (False, True)


def test_an_admission_names_its_pipeline_also_if_it_is_the_first() -> None:
    admitted, waiting = watch_pb2.REQUEST_TURN_ADMITTED, WAITING
    assert last(request(1, admitted))["pipeline"] == 0
    assert last(request(1, admitted, pipeline=2))["pipeline"] == 2
    assert "pipeline" not in last(request(1, waiting))


def test_memory_and_figures_of_pipelines_are_added_up() -> None:
    first, second = epoch(1), epoch(2, pipeline=1)
    first.epoch.n_slots, second.epoch.n_slots = 1000, 600
    events = [first, second]
    for pipeline, n_slots in ((0, 300), (1, 200), (0, 100)):
        event = iteration(len(events), 1, at_s=0.1 * len(events), pipeline=pipeline)
        event.iteration.n_allocated_slots = n_slots
        events.append(event)
    told = changes(*events, mark("x", at_s=2))
    assert [each["memory"]["free"] for each in told[2:5]] == [700, 400, 900]
    [figures] = [each for each in told if each["type"] == "figures"]
    assert figures["minute"]["n_allocated_slots"] == 500


def test_output_tokens_follow_from_the_position_of_a_span() -> None:
    prefill = ran(1, 0.1, start_positions=0, n_tokens=10, kinds=watch_pb2.SPAN_KIND_PREFILL)
    assert last(arrival(1), prefill)["n_generated"] == [1]
    late = ran(9, 0.2, start_positions=17)  # those before were in flight when the watch began
    assert last(arrival(1), late)["n_generated"] == [9]
    drafts = ran(9, 0.2, start_positions=17, n_tokens=4, n_new_tokens=3)
    assert last(arrival(1), drafts)["n_generated"] == [11]
    assert last(late, late)["n_generated"] == [2], "without a known prompt they are counted"


def test_the_pool_tells_output_tokens_and_they_never_become_fewer() -> None:
    event = pool()
    event.pool.running.append(1)
    event.pool.n_generated_tokens.append(5)
    assert last(arrival(1), event)["n_generated"] == [5]
    assert last(arrival(1), event, ran(3, 0.1, start_positions=12))["n_generated"] == [5]


def test_the_first_token_of_a_request_is_told_once() -> None:
    brings_none = ran(1, 0.1, n_new_tokens=0)
    told = changes(arrival(1), brings_none, ran(2, 0.2), ran(3, 0.3))
    assert [each["first_tokens"] for each in told[1:]] == [[], [(1, 0.21)], []]


def test_an_iteration_that_is_told_after_the_end_of_its_request_counts() -> None:
    [*_, end, late] = changes(arrival(1), ended(1, at_s=0.2), ran(1, 0.1, start_positions=10))
    assert end["turn"] == "ended"
    assert (late["n_generated"], late["first_tokens"]) == ([2], [(1, 0.11)])


def test_requests_that_have_ended_are_forgotten() -> None:
    view = View()
    for event in (arrival(1), ended(1), arrival(2, at_s=ENDED_S + 1)):
        list(view.take(event))
    assert list(view._requests) == [2]


def test_numbers_of_another_term_are_other_requests() -> None:
    before = (epoch(1), arrival(1), ran(1, 0.1, n_new_tokens=5))
    assert last(*before, epoch(2**20 + 1), ran(2, 0.2))["n_generated"] == [1]
    assert last(*before, epoch(2), ran(2, 0.2))["n_generated"] != [1]


def test_memory_is_divided_by_what_it_is_for() -> None:
    serving, event = epoch(1), iteration(1, 1)
    serving.epoch.n_slots = 1000
    event.iteration.n_reserved_slots = 400
    event.iteration.n_allocated_slots = 300
    event.iteration.n_shared_slots = 100
    event.iteration.n_cached_slots = 50
    memory = last(serving, event)["memory"]
    assert memory == {"used": 200, "shared": 100, "reserved": 100, "cached": 50, "free": 550}
    assert sum(memory.values()) == 1000


def test_figures_have_first_tokens_and_the_gaps_between_tokens() -> None:
    events = (arrival(1), ran(1, 0.1), ran(2, 0.3, n_new_tokens=2), ran(3, 0.5), mark("x", at_s=2))
    [figures] = [each for each in changes(*events) if each["type"] == "figures"]
    assert figures["t"] == START_NS / 1e9 + 1
    minute = figures["minute"]
    assert (minute["tokens_per_s"], minute["iterations_per_s"], minute["batch_size"]) == (4, 3, 1)
    assert minute["first_token_s"] == pytest.approx(0.11, rel=0.006)
    assert minute["token_gap_s"] == pytest.approx(0.1, rel=0.006)
    assert minute["token_gap_p90_s"] == pytest.approx(0.2, rel=0.006)


def test_an_event_of_a_later_version_is_refused() -> None:
    with pytest.raises(ValueError, match="no known type"):
        changes(watch_pb2.WatchEvent(time_unix_ns=1))
