"""The stream to the scheduler: connecting, losing it, and connecting again."""

import asyncio

import pytest
from orcinus.v1 import scheduler_pb2

from services.common import errors
from services.frontend.scheduler_client import MAX_UNSENT, Backoff, Inbox, SchedulerClient
from services.frontend.scheduler_events import (
    Accepted,
    Event,
    Failed,
    Finished,
    FinishReason,
    Tokens,
    events_of,
)
from tests.fake_scheduler import PIPELINE, FakeScheduler, keeps_quiet, says
from tests.frontend.conftest import client_of, connected, soon


def submission(request_id: str = "r") -> scheduler_pb2.Submission:
    return scheduler_pb2.Submission(
        request_id=request_id, prompt_token_ids=[1, 2], max_new_tokens=8
    )


async def until_last(inbox: Inbox) -> list[Event]:
    events = [await soon(inbox.get())]
    while not events[-1].is_last:
        events.append(await soon(inbox.get()))
    return events


async def test_events_of_a_request_reach_its_inbox() -> None:
    async with connected(FakeScheduler(says(7, 8))) as client:
        inbox: Inbox = asyncio.Queue()
        client.submit(submission(), inbox)
        assert await until_last(inbox) == [
            Accepted("r"),
            Tokens("r", (7,)),
            Tokens("r", (8,)),
            Finished("r", FinishReason.LENGTH),
        ]


async def test_requests_share_one_stream() -> None:
    scheduler = FakeScheduler(says(7))
    async with connected(scheduler) as client:
        inboxes: dict[str, Inbox] = {str(index): asyncio.Queue() for index in range(20)}
        for request_id, inbox in inboxes.items():
            client.submit(submission(request_id), inbox)
        for request_id, inbox in inboxes.items():
            assert {event.request_id for event in await until_last(inbox)} == {request_id}
    assert scheduler.n_connections == 1


async def test_nothing_can_be_submitted_before_the_pipeline_is_described() -> None:
    scheduler = FakeScheduler(pipeline=None)
    async with client_of(await scheduler.start()) as client:
        await soon(scheduler.wait_connections(1))
        assert not client.is_connected
        with pytest.raises(errors.Unavailable):
            client.submit(submission(), asyncio.Queue())
    await scheduler.stop()


async def test_description_reaches_the_frontend() -> None:
    async with connected(FakeScheduler()) as client:
        assert client.pipeline.model == "test-model"
        assert client.pipeline.eos_token_ids == (1,)


async def test_cancelled_request_ends_at_the_scheduler_and_its_late_tokens_are_dropped() -> None:
    scheduler = FakeScheduler(keeps_quiet)
    async with connected(scheduler) as client:
        inbox: Inbox = asyncio.Queue()
        client.submit(submission(), inbox)
        assert await soon(inbox.get()) == Accepted("r")
        (request,) = await soon(scheduler.wait_requests())
        client.cancel("r")
        await soon(request.cancelled.wait())
        request.tokens(9)
        scheduler.behaviour = says(7)
        following: Inbox = asyncio.Queue()
        client.submit(submission("next"), following)
        await until_last(following)  # everything before it has been delivered, or dropped
        assert inbox.empty()


async def test_cancelling_what_has_ended_says_nothing() -> None:
    scheduler = FakeScheduler(says(7))
    async with connected(scheduler) as client:
        inbox: Inbox = asyncio.Queue()
        client.submit(submission(), inbox)
        await until_last(inbox)
        client.cancel("r")
        client.submit(submission("next"), inbox)
        await until_last(inbox)  # what was said before it has arrived
        assert scheduler.cancellations == []


async def test_scheduler_that_does_not_keep_up_gets_cancellations_and_no_more_requests() -> None:
    scheduler = FakeScheduler(keeps_quiet)
    async with connected(scheduler) as client:
        inbox: Inbox = asyncio.Queue()
        for number in range(MAX_UNSENT):  # nothing is sent meanwhile
            client.submit(submission(str(number)), inbox)
        with pytest.raises(errors.Unavailable, match="does not keep up"):
            client.submit(submission("more"), inbox)
        client.cancel("0")
        first, *_ = await soon(scheduler.wait_requests())
        await soon(first.cancelled.wait())
        assert len(scheduler.requests) == MAX_UNSENT
        scheduler.behaviour = says(7)
        following: Inbox = asyncio.Queue()
        client.submit(submission("next"), following)
        await until_last(following)


async def test_requests_of_a_lost_stream_fail_and_the_client_comes_back() -> None:
    scheduler = FakeScheduler(keeps_quiet)
    async with connected(scheduler) as client:
        inbox: Inbox = asyncio.Queue()
        client.submit(submission(), inbox)
        await soon(scheduler.wait_requests())
        scheduler.drop_connections()
        *_, last = await until_last(inbox)
        assert isinstance(last, Failed)
        assert isinstance(last.error, errors.Unavailable)
        await soon(client.wait_ready())
        assert scheduler.n_connections == 2
        scheduler.behaviour = says(7)
        client.submit(submission(), inbox)
        *_, last = await until_last(inbox)
        assert last == Finished("r", FinishReason.LENGTH)


async def test_client_waits_for_a_scheduler_that_starts_later() -> None:
    early = FakeScheduler()
    address = await early.start()
    async with client_of(address) as client:
        await soon(client.wait_ready())
        await early.stop()
        await soon(client.wait_lost())
        with pytest.raises(errors.Unavailable):
            _ = client.pipeline
        late = FakeScheduler()
        await late.start(address)
        await soon(client.wait_ready())
        await late.stop()


async def test_closing_ends_requests_as_unavailable() -> None:
    scheduler = FakeScheduler(keeps_quiet)
    async with connected(scheduler) as client:
        inbox: Inbox = asyncio.Queue()
        client.submit(submission(), inbox)
        client.close()
        (last,) = await until_last(inbox)
        assert isinstance(last, Failed)
        with pytest.raises(errors.Unavailable, match="stopping"):
            client.submit(submission("other"), inbox)


def test_closed_client_takes_no_pipeline_any_more() -> None:
    client = SchedulerClient("127.0.0.1:1")
    description = scheduler_pb2.ConnectResponse(pipeline=PIPELINE)
    client._apply(description)
    assert client.is_connected
    client.close()
    client._apply(description)
    assert not client.is_connected


def test_pauses_grow_up_to_a_limit() -> None:
    backoff = Backoff(first_s=1.0, max_s=8.0)
    for n_failures, longest in ((1, 1), (2, 2), (3, 4), (4, 8), (50, 8), (5000, 8)):
        assert longest / 2 <= backoff.pause_s(n_failures) <= longest


REASONS = scheduler_pb2.CompletionReason.values()


@pytest.mark.parametrize("reason", REASONS, ids=scheduler_pb2.CompletionReason.keys())
def test_every_completion_ends_a_request(reason: scheduler_pb2.CompletionReason) -> None:
    completion = scheduler_pb2.Completion(request_id="r", reason=reason)
    (event,) = events_of(scheduler_pb2.ConnectResponse(completed=[completion]))
    assert event.is_last
    if isinstance(event, Failed):
        assert isinstance(event.error, errors.Unavailable)
        assert event.error.message


@pytest.mark.parametrize(
    ("field", "message", "expected"),
    [
        ("max_tokens", "too many", "max_tokens: too many"),
        ("", "seed: too many", "prompt: seed: too many"),
        ("", "", "prompt: refused by the scheduler"),
    ],
    ids=["named", "unnamed", "silent"],
)
def test_field_that_the_scheduler_refuses_is_named(field: str, message: str, expected: str) -> None:
    invalid = scheduler_pb2.REJECTION_REASON_INVALID
    rejected = scheduler_pb2.Rejection(request_id="r", reason=invalid, message=message, field=field)
    (event,) = events_of(scheduler_pb2.ConnectResponse(rejected=[rejected]))
    assert isinstance(event, Failed)
    assert isinstance(event.error, errors.InvalidRequest)
    assert event.error.field == (field or "prompt")
    assert event.error.message == expected


def test_retry_delay_of_a_full_pool_is_kept_or_made_up() -> None:
    full = scheduler_pb2.Rejection(reason=scheduler_pb2.REJECTION_REASON_POOL_FULL)
    patient = scheduler_pb2.Rejection(reason=scheduler_pb2.REJECTION_REASON_POOL_FULL)
    patient.retry_after.FromMilliseconds(2500)
    delays = []
    for event in events_of(scheduler_pb2.ConnectResponse(rejected=[full, patient])):
        assert isinstance(event, Failed)
        assert isinstance(event.error, errors.PoolFull)
        delays.append(event.error.retry_after_s)
    assert delays == [1.0, 2.5]
