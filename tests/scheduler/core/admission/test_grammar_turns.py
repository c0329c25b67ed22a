"""An iteration brings the ranks one new grammar, whatever waits."""

from collections.abc import Iterable

import pytest

from services.common.sampling import MAX_COMPILED_GRAMMARS
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


def scheduler_with(policy: Policy, grammars: Iterable[str]) -> Scheduler:
    """Returns a scheduler with a request for each grammar; an empty one is none."""
    scheduler = build(
        max_batch_size=16, n_blocks=400, block_size=4, pipeline_depth=1, policy=policy
    )
    for index, grammar in enumerate(grammars):
        digest = grammar.encode() or None
        scheduler.submit(Request(RequestId(f"{index}{grammar}"), [1], 40, grammar_digest=digest))
    return scheduler


def admitted(scheduler: Scheduler) -> list[str]:
    """Runs an iteration and returns the requests that it admits."""
    batch = scheduler.select()
    assert batch is not None
    scheduler.apply(batch.iteration, [7] * len(batch.spans))
    return [span.request.request_id for span in batch.spans if span.is_admission]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_new_grammar_waits_while_another_one_is_compiled_and_holds_nobody_up(
    policy: Policy,
) -> None:
    scheduler = scheduler_with(policy, ["a", "b", "c", "", "a", "b", ""])
    assert admitted(scheduler) == ["0a", "3", "4a", "6"]
    assert admitted(scheduler) == ["1b", "5b"]
    assert admitted(scheduler) == ["2c"]


@pytest.mark.parametrize("policy", POLICIES)
def test_who_waited_for_its_turn_does_not_keep_those_behind_it_from_their_end(
    policy: Policy,
) -> None:
    scheduler = build(max_batch_size=16, n_blocks=4, block_size=4, pipeline_depth=1, policy=policy)
    scheduler.submit(Request(RequestId("a"), [1], 2, grammar_digest=b"a"))
    scheduler.submit(Request(RequestId("b"), [1], 15, grammar_digest=b"b"))  # needs all memory
    scheduler.submit(Request(RequestId("behind"), [1], 4))
    assert admitted(scheduler) == ["a", "behind"]
    assert [admitted(scheduler) for _ in range(4)] == [[], [], [], ["b"]]


@pytest.mark.parametrize("policy", POLICIES)
def test_grammars_that_ranks_have_forgotten_are_new(policy: Policy) -> None:
    names = [chr(ord("a") + index) for index in range(MAX_COMPILED_GRAMMARS + 1)]
    scheduler = scheduler_with(policy, names)
    for _ in names:
        admitted(scheduler)
    for grammar in (names[0], names[-1], names[-2]):
        scheduler.submit(Request(RequestId(grammar), [1], 4, grammar_digest=grammar.encode()))
    scheduler.submit(Request(RequestId("z"), [1], 4, grammar_digest=b"z"))
    assert admitted(scheduler) == [names[0], names[-1], names[-2]]
    assert admitted(scheduler) == ["z"]


def test_another_epoch_may_have_other_ranks() -> None:
    scheduler = scheduler_with(OrcaPolicy(max_batch_size=16), ["a", "b"])
    admitted(scheduler)
    admitted(scheduler)
    scheduler.suspend()
    again = Scheduler(
        scheduler.pool,
        scheduler.kv_manager,
        policy=OrcaPolicy(max_batch_size=16),
        pipeline_depth=1,
    )
    assert len(admitted(again)) == 1


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
