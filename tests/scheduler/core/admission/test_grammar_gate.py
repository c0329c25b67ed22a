"""A request with a grammar is admitted when the ranks have compiled the grammar, and holds nobody
up before."""

from collections.abc import Iterable

import pytest

from services.common.sampling import MAX_COMPILED_GRAMMARS
from services.scheduler.core.clients.accounts import AccountLimits, AccountUse
from services.scheduler.core.order.fair import Fair
from services.scheduler.core.policies import Policy
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.policies.orca import OrcaPolicy
from services.scheduler.core.request import FinishReason, Request, RequestId
from services.scheduler.core.scheduler import Scheduler
from tests.scheduler.core.workload import build

POLICIES = [
    pytest.param(OrcaPolicy(max_batch_size=16), id="orca"),
    pytest.param(ChunkedPolicy(max_batch_size=16, max_batch_tokens=64), id="chunked"),
]
NAMES = [chr(ord("a") + index) for index in range(MAX_COMPILED_GRAMMARS + 2)]


def submit(scheduler: Scheduler, name: str, grammar: str = "", **fields: object) -> Request:
    request = Request(
        RequestId(name),
        [1],
        **{"max_new_tokens": 40, **fields},  # type: ignore[arg-type]
        grammar=grammar.encode(),
        grammar_digest=grammar.encode() or None,
    )
    scheduler.submit(request)
    return request


def scheduler_with(policy: Policy, grammars: Iterable[str], *, n_blocks: int = 400) -> Scheduler:
    """Returns a scheduler with a request for each grammar; an empty one is none."""
    scheduler = build(
        max_batch_size=16, n_blocks=n_blocks, block_size=4, pipeline_depth=1, policy=policy
    )
    for index, grammar in enumerate(grammars):
        submit(scheduler, f"{index}{grammar}", grammar)
    return scheduler


def due(scheduler: Scheduler) -> str | None:
    """Returns the grammar that the ranks are told to compile, if any."""
    grammar = scheduler.next_grammar()
    if grammar is None:
        return None
    assert grammar.grammar == grammar.digest
    return grammar.digest.decode()


def compile_due(scheduler: Scheduler) -> str:
    """Lets the ranks compile the grammar that is due, and returns it."""
    digest = due(scheduler)
    assert digest is not None
    assert scheduler.note_grammar(digest.encode()) == []
    return digest


def admitted(scheduler: Scheduler) -> list[str]:
    """Runs an iteration and returns the requests that it admits."""
    batch = scheduler.select()
    if batch is None:
        return []
    scheduler.apply(batch.iteration, [7] * len(batch.spans))
    return [span.request.request_id for span in batch.spans if span.is_admission]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_waits_for_its_grammar_and_others_pass(policy: Policy) -> None:
    scheduler = scheduler_with(policy, ["a", "", "b", "a", ""])
    assert admitted(scheduler) == ["1", "4"]
    assert due(scheduler) == "a"
    assert due(scheduler) is None  # one at a time
    assert admitted(scheduler) == []
    scheduler.note_grammar(b"a")
    assert admitted(scheduler) == ["0a", "3a"]
    assert compile_due(scheduler) == "b"
    assert due(scheduler) is None
    assert admitted(scheduler) == ["2b"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_has_its_place_when_its_grammar_is_compiled(policy: Policy) -> None:
    scheduler = scheduler_with(policy, [], n_blocks=4)
    submit(scheduler, "running", max_new_tokens=3)
    assert admitted(scheduler) == ["running"]
    submit(scheduler, "first", "a", max_new_tokens=15)  # needs all memory
    submit(scheduler, "second", max_new_tokens=15)
    compile_due(scheduler)
    assert [admitted(scheduler) for _ in range(3)] == [[], [], ["first"]]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_grammar_that_cannot_be_compiled_ends_its_requests_alone(policy: Policy) -> None:
    scheduler = scheduler_with(policy, ["a", "", "a", "b"])
    assert due(scheduler) == "a"
    ends = scheduler.note_grammar(b"a", "too many items")
    assert [(end.request.request_id, end.finish_reason) for end in ends] == [
        ("0a", FinishReason.FAILED),
        ("2a", FinishReason.FAILED),
    ]
    assert {end.message for end in ends} == {"grammar: cannot be followed: too many items"}
    assert admitted(scheduler) == ["1"]
    assert compile_due(scheduler) == "b"
    assert admitted(scheduler) == ["3b"]


def test_the_outcome_for_a_request_that_is_gone_changes_nothing() -> None:
    scheduler = scheduler_with(OrcaPolicy(max_batch_size=16), [])
    cancelled = submit(scheduler, "cancelled", "a")
    assert due(scheduler) == "a"
    scheduler.cancel(cancelled)
    assert scheduler.note_grammar(b"a", "too late") == []
    assert due(scheduler) is None


def test_grammars_are_compiled_in_the_order_of_requests() -> None:
    scheduler = build(
        max_batch_size=16,
        n_blocks=400,
        block_size=4,
        pipeline_depth=1,
        order=Fair(ageing_s=1000, now=lambda: 0.0),
    )
    busy = AccountUse(AccountLimits(), name="busy")
    for name in NAMES:
        submit(scheduler, name, name, account=busy)
    assert compile_due(scheduler) == NAMES[0]
    assert admitted(scheduler) == [NAMES[0]]
    submit(scheduler, "other", "z", account=AccountUse(AccountLimits(), name="other"))
    assert compile_due(scheduler) == "z"  # has been served less
    assert admitted(scheduler) == ["other"]


def test_ranks_keep_few_grammars_and_those_that_are_needed_next() -> None:
    scheduler = scheduler_with(OrcaPolicy(max_batch_size=16), NAMES)
    ahead = NAMES[:MAX_COMPILED_GRAMMARS]
    assert [compile_due(scheduler) for _ in ahead] == ahead
    assert due(scheduler) is None  # the others come when these have run
    for request in list(scheduler.pool)[:3]:
        scheduler.cancel(request)
    grammar = scheduler.next_grammar()
    assert grammar is not None
    assert grammar.digest.decode() == NAMES[MAX_COMPILED_GRAMMARS]
    kept = [digest.decode() for digest in grammar.kept]
    assert set(kept) == set(NAMES[1:])  # the first was dropped, as the least recently used


def test_the_grammar_of_a_running_request_is_kept() -> None:
    scheduler = scheduler_with(OrcaPolicy(max_batch_size=1), ["x"])
    compile_due(scheduler)
    assert admitted(scheduler) == ["0x"]
    for round_number in range(2 * MAX_COMPILED_GRAMMARS):
        request = submit(scheduler, "waits", str(round_number))
        grammar = scheduler.next_grammar()
        assert grammar is not None
        assert b"x" in grammar.kept
        assert len(grammar.kept) <= MAX_COMPILED_GRAMMARS + 1
        scheduler.note_grammar(grammar.digest)
        scheduler.cancel(request)


def test_a_preempted_request_keeps_its_grammar_if_it_is_next() -> None:
    scheduler = scheduler_with(OrcaPolicy(max_batch_size=16), ["a"])
    compile_due(scheduler)
    assert admitted(scheduler) == ["0a"]
    (request,) = scheduler.pool.running
    scheduler._preempt(request)
    assert admitted(scheduler) == ["0a"]


def test_the_ranks_of_another_epoch_compile_again() -> None:
    scheduler = scheduler_with(OrcaPolicy(max_batch_size=16), ["a", "b"])
    compile_due(scheduler)
    assert admitted(scheduler) == ["0a"]
    assert due(scheduler) == "b"  # and the answer never comes
    scheduler.suspend()
    again = Scheduler(
        scheduler.pool,
        scheduler.kv_manager,
        policy=OrcaPolicy(max_batch_size=16),
        pipeline_depth=1,
    )
    assert admitted(again) == []
    grammar = again.next_grammar()
    assert grammar is not None
    assert grammar.digest == b"a"
    assert set(grammar.kept) == {b"a", b"b"}  # which ranks that were not lost still have
    again.note_grammar(b"a")
    assert admitted(again) == ["0a"]
    assert compile_due(again) == "b"
    assert admitted(again) == ["1b"]


def test_nobody_is_preempted_for_a_request_that_cannot_begin() -> None:
    """A client with less than its share would take a place for a request without a grammar."""
    scheduler = build(
        max_batch_size=2,
        n_blocks=400,
        block_size=4,
        pipeline_depth=1,
        order=Fair(ageing_s=1000, now=lambda: 0.0),
    )
    busy = AccountUse(AccountLimits(), name="busy")
    for name in ("0", "1", "2"):
        submit(scheduler, name, account=busy)
    assert admitted(scheduler) == ["0", "1"]
    submit(scheduler, "other", "a", account=AccountUse(AccountLimits(), name="other"))
    for _ in range(3):
        batch = scheduler.select()
        assert batch is not None
        assert [span.request.request_id for span in batch.spans] == ["0", "1"]
        scheduler.apply(batch.iteration, [7, 7])
    compile_due(scheduler)
    batch = scheduler.select()
    assert batch is not None
    assert "other" in [span.request.request_id for span in batch.spans]


def test_an_output_that_ends_before_its_grammar_ends_for_its_length() -> None:
    scheduler = build(max_batch_size=4, n_blocks=40, block_size=4, pipeline_depth=1)
    for name in ("ended", "cut"):
        scheduler.submit(Request(RequestId(name), [1], 9, stop_token_ids=frozenset([0])))
    batch = scheduler.select()
    assert batch is not None
    updates = scheduler.apply(batch.iteration, [0, 0], cut=[1])
    assert [(update.request.request_id, update.finish_reason) for update in updates] == [
        ("ended", FinishReason.STOP),
        ("cut", FinishReason.LENGTH),
    ]
