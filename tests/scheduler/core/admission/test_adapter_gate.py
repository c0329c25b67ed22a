"""A request with an adapter is admitted when the ranks hold the adapter. Until then it delays no
other request, and no stream of other requests holds it up for ever."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.adapter_list import AdapterList
from services.scheduler.core.admission.adapter_gate import (
    LOST,
    MAX_LOSSES,
    AdapterChange,
    WantedLoad,
)
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.request import Request, RequestId
from services.scheduler.core.scheduler import Scheduler
from tests.scheduler.core.workload import build

FIXED = "fixed"


def scheduler_with(known: str, *, max_loaded: int = 2) -> Scheduler:
    """Returns a scheduler that knows an adapter for each letter, whose digest is the letter."""
    scheduler = build(
        max_batch_size=16,
        n_blocks=400,
        block_size=4,
        pipeline_depth=1,
        policy=ChunkedPolicy(max_batch_size=16, max_batch_tokens=64),
    )
    scheduler.pool.adapters.begin([FIXED], max_loaded)
    adapters = AdapterList()
    for name in known:
        adapters.put(name, f"/adapters/{name}", name)
    scheduler.pool.shared.adapters.sources = adapters
    return scheduler


def submit(scheduler: Scheduler, name: str, adapter: str = "", n_tokens: int = 40) -> Request:
    request = Request(RequestId(name), [1], max_new_tokens=n_tokens, adapter=adapter)
    scheduler.submit(request)
    return request


def load(scheduler: Scheduler, *, failure: str = "") -> AdapterChange | None:
    """Lets the ranks carry out what they must do, and returns it."""
    change = next_change(scheduler)
    if change is not None and change.load_id and failure:
        adapter = scheduler.pool.adapters.note_failed(change.load_id, failure)
        for request in scheduler.pool.shared.stranded_without(adapter):
            scheduler.give_up(request, failure)
    elif change is not None and change.load_id:
        scheduler.pool.adapters.note_loaded(change.load_id, change.digest)
    return change


def next_change(scheduler: Scheduler) -> AdapterChange | None:
    """What the ranks must do."""
    return scheduler.pool.adapters.next_change(scheduler.pool.line())


def strays(scheduler: Scheduler) -> list[Request]:
    """Requests whose adapter was unloaded."""
    return scheduler.pool.adapters.strays(scheduler.pool.order)


def run(scheduler: Scheduler) -> list[str]:
    """Runs an iteration and returns the requests that it admits."""
    batch = scheduler.select()
    if batch is None:
        return []
    scheduler.apply(batch.iteration, [7] * len(batch.spans))
    return [span.request.request_id for span in batch.spans if span.is_admission]


def test_a_request_waits_for_its_adapter_and_others_pass() -> None:
    scheduler = scheduler_with("ab")
    for name, adapter in (("1", "a"), ("2", ""), ("3", "b"), ("4", "a"), ("5", FIXED)):
        submit(scheduler, name, adapter)
    assert run(scheduler) == ["2", "5"]
    change = next_change(scheduler)
    assert change == AdapterChange((), 1, "a", "/adapters/a", "a")
    assert next_change(scheduler) is None  # one at a time
    assert run(scheduler) == []
    scheduler.pool.adapters.note_loaded(1, "a")
    assert run(scheduler) == ["1", "4"]
    assert load(scheduler) == AdapterChange((), 2, "b", "/adapters/b", "b")
    assert run(scheduler) == ["3"]
    assert not scheduler.pool.adapters.is_needed


def test_the_least_recently_used_adapter_without_requests_makes_room() -> None:
    scheduler = scheduler_with("abcd")
    for adapter in "ab":
        submit(scheduler, adapter, adapter, n_tokens=1)
        load(scheduler)
        assert run(scheduler) == [adapter]
    submit(scheduler, "a2", "a", n_tokens=1)
    assert run(scheduler) == ["a2"]
    submit(scheduler, "c", "c")
    assert load(scheduler) == AdapterChange((2,), 3, "c", "/adapters/c", "c")  # not a: used later
    assert run(scheduler) == ["c"]
    submit(scheduler, "d", "d")
    assert load(scheduler) == AdapterChange((1,), 4, "d", "/adapters/d", "d")


def test_a_stream_of_requests_does_not_keep_an_adapter_out() -> None:
    scheduler = scheduler_with("ab", max_loaded=1)
    submit(scheduler, "a0", "a", n_tokens=3)
    load(scheduler)
    run(scheduler)
    submit(scheduler, "b", "b")
    admitted = []
    for index in range(20):
        submit(scheduler, f"a{index + 1}", "a", n_tokens=3)
        load(scheduler)
        admitted += run(scheduler)
        if "b" in admitted:
            break
    assert admitted == ["b"]  # a's next requests wait behind it


def test_an_adapter_that_an_earlier_request_needs_is_not_dropped_for_a_later_one() -> None:
    scheduler = scheduler_with("ab", max_loaded=1)
    submit(scheduler, "a", "a")
    load(scheduler)
    submit(scheduler, "b", "b")
    assert load(scheduler) is None
    assert run(scheduler) == ["a"]


def test_a_closed_adapter_opens_when_nobody_needs_its_place() -> None:
    scheduler = scheduler_with("ab", max_loaded=1)
    submit(scheduler, "a", "a")
    load(scheduler)
    run(scheduler)
    other = submit(scheduler, "b", "b")
    assert load(scheduler) is None
    submit(scheduler, "a2", "a")
    assert run(scheduler) == []  # a is closed
    scheduler.cancel(other)
    assert load(scheduler) is None
    assert run(scheduler) == ["a2"]


def test_a_broken_adapter_fails_its_own_requests_only() -> None:
    scheduler = scheduler_with("ab")
    for name, adapter in (("1", "a"), ("2", "b"), ("3", "a"), ("4", "")):
        submit(scheduler, name, adapter)
    load(scheduler, failure="broken")
    assert [one.request_id for one in scheduler.pool] == ["2", "4"]
    assert load(scheduler) == AdapterChange((1,), 2, "b", "/adapters/b", "b")  # some may have it
    assert sorted(run(scheduler)) == ["2", "4"]


def test_requests_whose_adapter_is_unloaded_are_strays_unless_the_ranks_hold_it() -> None:
    scheduler = scheduler_with("ab")
    submit(scheduler, "a", "a")
    load(scheduler)
    run(scheduler)
    submit(scheduler, "a2", "a")
    stray = submit(scheduler, "b", "b")
    adapters = scheduler.pool.shared.adapters.sources
    assert isinstance(adapters, AdapterList)
    adapters.remove("a")
    adapters.remove("b")
    assert strays(scheduler) == [stray]
    scheduler.give_up(stray, "unloaded")
    assert run(scheduler) == ["a2"]
    assert load(scheduler) is None  # in use
    scheduler.suspend()
    assert {one.request_id for one in strays(scheduler)} == {"a", "a2"}


def test_an_unloaded_adapter_is_dropped_when_its_last_request_ends() -> None:
    scheduler = scheduler_with("a")
    submit(scheduler, "a", "a", n_tokens=2)
    load(scheduler)
    run(scheduler)
    adapters = scheduler.pool.shared.adapters.sources
    assert isinstance(adapters, AdapterList)
    adapters.remove("a")
    assert load(scheduler) is None
    run(scheduler)
    assert load(scheduler) == AdapterChange((1,))
    assert load(scheduler) is None


class Asked:
    """A client that asks to load an adapter."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self.ends: list[tuple[str, str]] = []
        self.wanted = WantedLoad(name, "/x", lambda *end: self.ends.append(end))
        scheduler.pool.shared.adapters.want(self.wanted)


def test_an_adapter_that_a_client_asks_for_is_loaded_once() -> None:
    scheduler = scheduler_with("")
    other = scheduler.pool.beside()
    other.adapters.begin((), 2)
    asked = Asked(scheduler, "new")
    change = next_change(scheduler)
    assert change == AdapterChange((), 1, "new", "/x", "")
    assert other.adapters.next_change(other.line()) is None
    scheduler.pool.adapters.note_loaded(1, "its digest")
    assert asked.ends == [("its digest", "")]
    assert not scheduler.pool.shared.adapters.wanted


def test_an_order_that_a_lost_pipeline_had_is_given_to_another() -> None:
    scheduler = scheduler_with("")
    other = scheduler.pool.beside()
    other.adapters.begin((), 2)
    asked = Asked(scheduler, "new")
    assert next_change(scheduler) is not None
    scheduler.suspend()
    assert not asked.ends
    assert other.adapters.next_change(other.line()) == AdapterChange((), 1, "new", "/x", "")
    other.adapters.note_failed(1, "broken")
    assert asked.ends == [("", "broken")]


def test_a_load_with_which_two_pipelines_are_lost_fails() -> None:
    scheduler = scheduler_with("")
    asked = Asked(scheduler, "new")
    for _ in range(MAX_LOSSES):
        assert not asked.ends
        assert next_change(scheduler) is not None
        scheduler.suspend()
    assert asked.ends == [("", LOST)]
    assert next_change(scheduler) is None
    assert not scheduler.pool.shared.adapters.wanted


def test_loads_that_clients_ask_for_take_turns_with_those_of_requests() -> None:
    scheduler = scheduler_with("ab", max_loaded=1)
    clients = [Asked(scheduler, f"missing{number}") for number in range(1000)]
    submit(scheduler, "1", "a", n_tokens=1)
    submit(scheduler, "2", "b", n_tokens=1)
    admitted = []
    for _ in range(6):
        change = next_change(scheduler)
        if change is not None and change.name.startswith("missing"):
            scheduler.pool.adapters.note_failed(change.load_id, "does not exist")
        elif change is not None and change.load_id:
            scheduler.pool.adapters.note_loaded(change.load_id, change.digest)
        admitted += run(scheduler)
    assert admitted == ["1", "2"]
    assert len([one for one in clients if one.ends]) >= 2  # and the clients are not kept out


def test_a_stream_of_requests_does_not_keep_out_an_adapter_that_a_client_asks_for() -> None:
    scheduler = scheduler_with("a", max_loaded=1)
    submit(scheduler, "0", "a", n_tokens=3)
    load(scheduler)
    run(scheduler)
    asked = Asked(scheduler, "new")
    for index in range(20):
        submit(scheduler, f"{index + 1}", "a", n_tokens=3)
        load(scheduler)
        run(scheduler)
        if asked.ends:
            break
    assert asked.ends


def test_an_adapter_stays_for_a_request_that_came_before_a_client_asked() -> None:
    scheduler = scheduler_with("ab", max_loaded=1)
    submit(scheduler, "1", "b", n_tokens=1)
    load(scheduler)
    asked = Asked(scheduler, "new")
    submit(scheduler, "2", "a", n_tokens=1)
    assert next_change(scheduler) is None  # b stays for the request that waits
    assert run(scheduler) == ["1"]
    assert next_change(scheduler) == AdapterChange((1,), 2, "new", "/x", "")
    assert not asked.ends


def test_an_adapter_that_the_ranks_have_already_keeps_its_first_load() -> None:
    scheduler = scheduler_with("a")
    submit(scheduler, "1", "a")
    load(scheduler)
    for load_id, digest in ((2, "a"), (3, FIXED)):
        asked = Asked(scheduler, "same")
        assert next_change(scheduler) == AdapterChange(
            (load_id - 1,) if load_id > 2 else (), load_id, "same", "/x", ""
        )
        scheduler.pool.adapters.note_loaded(load_id, digest)
        assert asked.ends == [(digest, "")]
    assert scheduler.pool.adapters.is_needed
    assert next_change(scheduler) == AdapterChange((3,))  # so no rank counts it as one more
    assert run(scheduler) == ["1"]


def test_what_nobody_waits_for_any_more_is_dropped() -> None:
    scheduler = scheduler_with("")
    asked = Asked(scheduler, "new")
    assert next_change(scheduler) is not None
    scheduler.pool.shared.adapters.wanted.remove(asked.wanted)  # its time was over
    scheduler.pool.adapters.note_loaded(1, "its digest")
    assert not asked.ends
    assert load(scheduler) == AdapterChange((1,))


def test_ranks_that_load_nothing_admit_what_they_have() -> None:
    scheduler = scheduler_with("a", max_loaded=0)
    submit(scheduler, "1", FIXED)
    waits = submit(scheduler, "2", "a")
    Asked(scheduler, "new")
    assert load(scheduler) is None
    assert run(scheduler) == ["1"]
    assert strays(scheduler) == []  # another pipeline may have it
    assert waits in scheduler.pool


def carry_out(scheduler: Scheduler, change: AdapterChange | None, held: dict[int, str]) -> None:
    """Lets the ranks, which hold the adapters `held`, carry out a change. An adapter that a client
    asks for does not exist."""
    if change is None:
        return
    for load_id in change.dropped:
        held.pop(load_id, None)
    if change.load_id:
        held[change.load_id] = change.digest
        if change.digest:
            scheduler.pool.adapters.note_loaded(change.load_id, change.digest)
        else:
            scheduler.pool.adapters.note_failed(change.load_id, "does not exist")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 4)), min_size=1, max_size=25),
    st.integers(1, 3),
    st.lists(st.sampled_from(["run", "load", "lose"]), max_size=12),
    st.booleans(),
)
def test_every_request_ends_and_memory_is_bounded(
    requests: list[tuple[str, int]], max_loaded: int, steps: list[str], asks: bool
) -> None:
    """With `asks`, a client always asks for an adapter that does not exist."""
    scheduler = scheduler_with("abcd", max_loaded=max_loaded)
    held: dict[int, str] = {}  # what the ranks hold, by load
    for index, (adapter, n_tokens) in enumerate(requests):
        submit(scheduler, str(index), adapter, n_tokens)
    for step in [*steps, *["load", "run"] * 300]:
        if not len(scheduler.pool):
            break
        if asks and not scheduler.pool.shared.adapters.wanted:
            Asked(scheduler, "missing")
        if step == "lose":
            scheduler.suspend()
            held.clear()
        elif step == "load":
            carry_out(scheduler, next_change(scheduler), held)
            assert len(held) <= max_loaded
        elif (batch := scheduler.select()) is not None:
            assert {span.request.adapter for span in batch.spans} <= set(held.values())
            scheduler.apply(batch.iteration, [7] * len(batch.spans))
    assert not len(scheduler.pool)
    assert scheduler.pool.shared.adapters.waiting == Counter()


@pytest.mark.parametrize("digest", ["", "any"])
def test_a_pool_without_adapters_admits_everything(digest: str) -> None:
    scheduler = build(max_batch_size=4, n_blocks=40, block_size=4, pipeline_depth=1)
    submit(scheduler, "1", digest)
    assert run(scheduler) == ["1"]
