"""Requests for vectors in the scheduling core: they end with their prompts, and no token is sampled
for them."""

from collections import Counter

import pytest

from services.scheduler.core.batch import Batch
from services.scheduler.core.clients.client import ServedClient
from services.scheduler.core.order.fair_batch import Allowances
from services.scheduler.core.policies import PolicyOptions
from services.scheduler.core.policies.checked import CheckedPolicy
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.policies.registry import POLICIES
from services.scheduler.core.request import FinishReason, Request, RequestId
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.span_logprobs import SpanLogprobs
from tests.scheduler.core.workload import build

MOVES = [(1, False), (1, True), (3, False)]


def scheduler(pipeline_depth: int, token_hand_off: bool) -> Scheduler:
    return build(
        max_batch_size=4,
        n_blocks=16,
        block_size=4,
        pipeline_depth=pipeline_depth + token_hand_off,
        token_hand_off=token_hand_off,
        policy=ChunkedPolicy(max_batch_size=4, max_batch_tokens=8),
        has_prefix_cache=True,
    )


def request(name: str, n_prompt: int, max_new_tokens: int = 0) -> Request:
    return Request(RequestId(name), range(10, 10 + n_prompt), max_new_tokens)


def sent(core: Scheduler) -> list[Batch]:
    """Selects batches until there is none."""
    return [batch for batch in iter(core.select, None)]


@pytest.mark.parametrize(("pipeline_depth", "token_hand_off"), MOVES)
def test_a_prompt_is_cut_and_ends_with_its_last_span(
    pipeline_depth: int, token_hand_off: bool
) -> None:
    core = scheduler(pipeline_depth, token_hand_off)
    core.submit(request("vector", 19))
    spans, updates, in_flight = [], [], sent(core)
    while in_flight:
        batch = in_flight.pop(0)
        spans += [(span.start_position, span.n_tokens, span.is_sampled) for span in batch.spans]
        is_last = spans[-1][0] + spans[-1][1] == 19 and not in_flight
        vectors = {0: SpanLogprobs(vector=b"1234")} if is_last else {}
        updates += core.apply(batch.iteration, [], vectors)
        in_flight += sent(core)
    assert spans == [(0, 8, False), (8, 8, False), (16, 3, False)]
    (update,) = updates
    assert (update.token_id, update.finish_reason) == (None, FinishReason.STOP)
    assert update.logprobs == SpanLogprobs(vector=b"1234")
    assert len(core.pool) == 0
    assert core.kv_manager.n_reserved_slots == 0


def test_a_vector_shares_a_batch_with_a_decode() -> None:
    core = scheduler(1, token_hand_off=False)
    core.submit(request("answer", 3, max_new_tokens=4))
    assert core.select() is not None
    core.apply(1, [7])
    core.submit(request("vector", 5))
    batch = core.select()
    assert batch is not None
    assert [(span.request.request_id, span.is_sampled) for span in batch.spans] == [
        ("answer", True),
        ("vector", False),
    ]
    updates = core.apply(2, [8], {1: SpanLogprobs(vector=b"1234")})
    assert [(one.token_id, one.finish_reason) for one in updates] == [
        (8, None),
        (None, FinishReason.STOP),
    ]


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("token_hand_off", [False, True])
def test_vectors_and_answers_end_under_every_policy(policy: str, token_hand_off: bool) -> None:
    options = PolicyOptions(max_batch_size=3, max_batch_tokens=8)
    core = build(
        max_batch_size=3,
        n_blocks=40,
        block_size=4,
        pipeline_depth=1 + token_hand_off,
        token_hand_off=token_hand_off,
        policy=POLICIES[policy].of(options),
    )
    asked = [request(str(i), 3 + 4 * i, max_new_tokens=0 if i % 3 else 4) for i in range(8)]
    for one in asked:
        core.submit(one)
    in_flight = sent(core)
    n_ended = 0
    while in_flight:
        batch = in_flight.pop(0)
        updates = core.apply(batch.iteration, [7] * batch.n_sampled)
        n_ended += sum(update.finish_reason is not None for update in updates)
        in_flight += sent(core)
    assert n_ended == len(asked)
    assert [len(one.generated_token_ids) for one in asked] == [4, 0, 0, 4, 0, 0, 4, 0]


def test_a_prompt_that_is_suspended_begins_anew() -> None:
    core = scheduler(1, token_hand_off=False)
    core.submit(request("vector", 12))
    assert core.select() is not None
    core.apply(1, [])
    assert core.select() is not None
    begun, ends = core.suspend()
    assert ([one.request_id for one in begun], ends) == (["vector"], [])
    assert begun[0].n_scheduled == 0


def test_a_cancelled_prompt_ends_when_its_batch_returns() -> None:
    core = scheduler(1, token_hand_off=False)
    asked = request("vector", 5)
    core.submit(asked)
    assert core.select() is not None
    assert core.cancel(asked) == []
    (update,) = core.apply(1, [], {0: SpanLogprobs(vector=b"1234")})
    assert (update.finish_reason, update.logprobs) == (FinishReason.CANCELLED, None)


def whole(name: str, n_prompt: int) -> Request:
    return Request(RequestId(name), range(10, 10 + n_prompt), 0, runs_whole=True, cache_scope=None)


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("token_hand_off", [False, True])
def test_prompts_of_an_encoder_run_whole_under_every_policy(
    policy: str, token_hand_off: bool
) -> None:
    options = PolicyOptions(max_batch_size=3, max_batch_tokens=8)
    core = build(
        max_batch_size=3,
        n_blocks=40,
        block_size=4,
        pipeline_depth=1 + token_hand_off,
        token_hand_off=token_hand_off,
        policy=CheckedPolicy(POLICIES[policy].of(options)),
    )
    lengths = [5, 2, 4, 8, 1, 7, 3, 2]
    asked = [whole(str(i), n) for i, n in enumerate(lengths)]
    for one in asked:
        core.submit(one)
    spans, n_ended, in_flight = {}, 0, sent(core)
    while in_flight:
        batch = in_flight.pop(0)
        for span in batch.spans:
            assert span.request not in spans
            spans[span.request] = (span.start_position, span.n_tokens)
        n_ended += len(core.apply(batch.iteration, []))
        in_flight += sent(core)
    assert n_ended == len(asked)
    assert [spans[one] for one in asked] == [(0, n) for n in lengths]


def test_short_prompts_of_an_encoder_begin_together_in_their_order() -> None:
    core = scheduler(1, token_hand_off=False)
    for i, n_prompt in enumerate((3, 2, 5, 1)):
        core.submit(whole(str(i), n_prompt))
    batches = []
    while (batch := core.select()) is not None:
        batches.append([span.request.request_id for span in batch.spans])
        core.apply(batch.iteration, [])
    assert batches == [["0", "1"], ["2", "3"]]


def test_a_fair_limit_does_not_cut_a_prompt_of_an_encoder() -> None:
    client, other = (ServedClient(), ServedClient())
    allowances = Allowances({}, {client: 4}, Counter({client: 3, other: 1}), None)
    asked = [whole(str(i), n_prompt) for i, n_prompt in enumerate((3, 7, 2, 5))]
    for one, its_client in zip(asked, (client, client, client, other), strict=True):
        one.client = its_client
    taken = {
        one.request_id: allowances.take(one, one.n_tokens)
        for one in allowances.riders(asked, max_running=9)
    }
    assert taken == {"0": 3, "1": 7, "3": 5}
