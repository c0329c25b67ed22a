"""The stream to the scheduler: connecting, losing it, and connecting again."""

import asyncio
import math
import signal
from collections.abc import Callable, Sequence

import grpc.aio
import pytest
from orcinus.v1 import scheduler_pb2

from services.common import errors, rpc
from services.common.address import Address, parse
from services.frontend.link.backoff import Backoff
from services.frontend.link.known_pipeline import NO_PIPELINE, STOPPING
from services.frontend.link.scheduler_client import ATTEMPT_PAUSE_S, SchedulerClient
from services.frontend.link.scheduler_events import (
    Accepted,
    Completed,
    Event,
    Failed,
    OutputTokens,
    PromptLogprobs,
    ends_of,
    news_of,
)
from services.frontend.link.scheduler_stream import MAX_UNSENT
from services.frontend.link.submitted_request import MAX_EXTENSIONS
from services.frontend.request.finish_reason import FinishReason
from services.frontend.request.logprobs import Logprobs
from services.frontend.request.refusals import Refusal, Refusals
from tests.fake_scheduler import (
    PIPELINE,
    Behaviour,
    FakeRequest,
    FakeScheduler,
    keeps_quiet,
    logprobs_of,
    loses_pipeline_after,
    rejects,
    says,
    stalls_after,
)
from tests.frontend.conftest import client_of, connected, soon, start_all
from tests.frontend.fake_dns import fake_dns
from tests.frontend.scheduler_process import hurried, scheduler_process
from tests.limits import HANG_S

Inbox = asyncio.Queue[Event]


def submission(request_id: str = "r") -> scheduler_pb2.Submission:
    return scheduler_pb2.Submission(
        request_id=request_id, prompt_token_ids=[1, 2], max_new_tokens=8
    )


def submit(
    client: SchedulerClient, inbox: Inbox, request_id: str = "r", *, hold_s: float = 0.0
) -> None:
    until = asyncio.get_running_loop().time() + hold_s
    client.submit(submission(request_id), inbox, model=PIPELINE.model, until=until)


async def until_last(inbox: Inbox) -> list[Event]:
    events = [await soon(inbox.get())]
    while not events[-1].is_last:
        events.append(await soon(inbox.get()))
    return events


async def refused(client: SchedulerClient, why: str, request_id: str = "r") -> None:
    """Checks that a request which is not held fails at once."""
    inbox: Inbox = asyncio.Queue()
    submit(client, inbox, request_id)
    event = inbox.get_nowait()
    assert isinstance(event, Failed)
    assert isinstance(event.error, errors.Unavailable)
    assert why in event.error.message


async def until_shut(client: SchedulerClient) -> None:
    while client.pipeline.is_open:
        await soon(client.pipeline.wait_change())


async def test_events_of_a_request_reach_its_inbox() -> None:
    async with connected(FakeScheduler(says(7, 8))) as client:
        inbox: Inbox = asyncio.Queue()
        submit(client, inbox)
        assert await until_last(inbox) == [
            Accepted("r"),
            OutputTokens("r", (7,), 0),
            OutputTokens("r", (8,), 1),
            Completed("r", FinishReason.LENGTH),
        ]


async def test_all_tokens_are_noted_however_they_come() -> None:
    scheduler, noted = FakeScheduler(keeps_quiet), asyncio.Event()
    inbox: Inbox = asyncio.Queue()
    async with client_of(await scheduler.start(), on_tokens=noted.set) as client:
        await soon(client.pipeline.wait_open())
        submit(client, inbox)
        (request,) = await soon(scheduler.wait_requests())
        for token_id in (7, 8, 9):  # all but the first in columns
            request.tokens(token_id)
            await soon(noted.wait())
            noted.clear()
    await scheduler.stop()


async def test_requests_share_one_stream() -> None:
    scheduler = FakeScheduler(says(7))
    async with connected(scheduler) as client:
        inboxes: dict[str, Inbox] = {str(index): asyncio.Queue() for index in range(20)}
        for request_id, inbox in inboxes.items():
            submit(client, inbox, request_id)
        for request_id, inbox in inboxes.items():
            assert {event.request_id for event in await until_last(inbox)} == {request_id}
    assert scheduler.n_connections == 1


async def test_nothing_can_be_submitted_before_the_pipeline_is_described() -> None:
    scheduler = FakeScheduler(pipeline=None)
    async with client_of(await scheduler.start()) as client:
        await soon(scheduler.wait_connections(1))
        assert not client.pipeline.is_open
        await refused(client, "no pipeline")
        with pytest.raises(errors.Unavailable):
            _ = client.pipeline.last
    await scheduler.stop()


async def test_description_reaches_the_frontend() -> None:
    async with connected(FakeScheduler()) as client:
        pipeline = await client.pipeline.wait_open()
        assert pipeline == client.pipeline.last
        assert pipeline.model == "test-model"
        assert pipeline.eos_token_ids == (1,)


async def test_cancelled_request_ends_at_the_scheduler_and_its_late_tokens_are_dropped() -> None:
    scheduler = FakeScheduler(keeps_quiet)
    async with connected(scheduler) as client:
        inbox: Inbox = asyncio.Queue()
        submit(client, inbox)
        assert await soon(inbox.get()) == Accepted("r")
        (request,) = await soon(scheduler.wait_requests())
        client.cancel("r")
        await soon(request.cancelled.wait())
        request.tokens(9)
        scheduler.behaviour = says(7)
        following: Inbox = asyncio.Queue()
        submit(client, following, "next")
        await until_last(following)  # everything before it has been delivered, or dropped
        assert inbox.empty()


async def test_cancelling_what_has_ended_says_nothing() -> None:
    scheduler = FakeScheduler(says(7))
    async with connected(scheduler) as client:
        inbox: Inbox = asyncio.Queue()
        submit(client, inbox)
        await until_last(inbox)
        client.cancel("r")
        submit(client, inbox, "next")
        await until_last(inbox)  # what was said before it has arrived
        assert scheduler.cancellations == []


@pytest.mark.thorough
async def test_scheduler_that_does_not_keep_up_gets_cancellations_and_no_more_requests() -> None:
    scheduler = FakeScheduler(keeps_quiet)
    async with connected(scheduler) as client:
        inbox: Inbox = asyncio.Queue()
        for number in range(MAX_UNSENT):  # nothing is sent meanwhile
            submit(client, inbox, str(number))
        await refused(client, "does not keep up", "more")
        client.cancel("0")
        first, *_ = await soon(scheduler.wait_requests())
        await soon(first.cancelled.wait())
        assert len(scheduler.requests) == MAX_UNSENT
        scheduler.behaviour = says(7)
        following: Inbox = asyncio.Queue()
        submit(client, following, "next")
        await until_last(following)


async def test_requests_of_a_lost_stream_fail_and_the_client_comes_back() -> None:
    scheduler = FakeScheduler(keeps_quiet)
    async with connected(scheduler) as client:
        inbox: Inbox = asyncio.Queue()
        submit(client, inbox)
        await soon(scheduler.wait_requests())
        scheduler.drop_connections()
        *_, last = await until_last(inbox)
        assert isinstance(last, Failed)
        assert isinstance(last.error, errors.Unavailable)
        await soon(client.pipeline.wait_open())
        assert scheduler.n_connections == 2
        scheduler.behaviour = says(7)
        submit(client, inbox)
        *_, last = await until_last(inbox)
        assert last == Completed("r", FinishReason.LENGTH)


async def test_client_waits_for_a_scheduler_that_starts_later() -> None:
    early = FakeScheduler()
    address = await early.start()
    async with client_of(address) as client:
        await soon(client.pipeline.wait_open())
        await early.stop()
        await until_shut(client)
        await refused(client, "no pipeline")
        assert client.pipeline.last.model == "test-model"
        late = FakeScheduler()
        await late.start(address)
        await soon(client.pipeline.wait_open())
        await late.stop()


async def test_closing_ends_requests_as_unavailable() -> None:
    scheduler = FakeScheduler(keeps_quiet)
    async with connected(scheduler) as client:
        inbox: Inbox = asyncio.Queue()
        submit(client, inbox)
        client.close()
        (last,) = await until_last(inbox)
        assert isinstance(last, Failed)
        submit(client, inbox, "held", hold_s=HANG_S)
        (last,) = await until_last(inbox)
        assert isinstance(last, Failed)
        assert last.error.message == STOPPING
        with pytest.raises(errors.Unavailable, match=STOPPING):
            await client.pipeline.wait_open()
        with pytest.raises(errors.Unavailable, match=STOPPING):
            _ = client.pipeline.last


async def test_closed_client_takes_no_pipeline_any_more() -> None:
    client = SchedulerClient("127.0.0.1:1")
    description = scheduler_pb2.ConnectResponse(pipeline=PIPELINE)
    client._apply(description)
    assert client.pipeline.is_open
    client.close()
    client._apply(description)
    assert not client.pipeline.is_open


async def test_client_follows_the_scheduler_that_leads() -> None:
    first, second = FakeScheduler(says(7)), FakeScheduler(says(8), is_leading=False)
    async with client_of(await start_all(first, second)) as client:
        inbox: Inbox = asyncio.Queue()
        for leader, token_id in [(first, 7), (second, 8)] * 2:
            await leader.lead()
            submit(client, inbox, hold_s=HANG_S)
            assert OutputTokens("r", (token_id,), 0) in await until_last(inbox)
            await leader.stand_by()
            await until_shut(client)
    assert (len(first.requests), len(second.requests)) == (2, 2)
    await first.stop()
    await second.stop()


async def test_client_turns_to_another_scheduler_when_the_leader_dies() -> None:
    first, second = FakeScheduler(keeps_quiet), FakeScheduler(says(8), is_leading=False)
    async with client_of(await start_all(first, second)) as client:
        inbox: Inbox = asyncio.Queue()
        submit(client, inbox, hold_s=HANG_S)
        assert await soon(inbox.get()) == Accepted("r")
        await first.stop()
        await second.lead()
        assert [type(event) for event in await until_last(inbox)] == [
            Accepted,
            OutputTokens,
            Completed,
        ]
    await second.stop()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_client_waits_for_a_name_that_does_not_resolve_yet(host: str) -> None:
    scheduler = FakeScheduler()
    port = parse(await scheduler.start(str(Address(host, 0)))).port
    async with (
        fake_dns() as (dns, where),
        client_of(f"dns://{where}/scheduler.orcinus.svc:{port}") as client,
    ):
        await soon(dns.asked.wait())
        assert not client.pipeline.is_open
        dns.addresses = [host]
        await soon(client.pipeline.wait_open())
    await scheduler.stop()


async def test_requests_are_held_so_long_after_a_pipeline_was_lost_whoever_leads() -> None:
    scheduler = FakeScheduler(pipeline=None)
    async with client_of(await scheduler.start()) as client:
        await soon(scheduler.wait_connections(1))
        assert client.pipeline.hold_deadline(5.0) == -math.inf
        scheduler.open()
        await soon(client.pipeline.wait_open())
        scheduler.close()
        assert client.pipeline.hold_deadline(5.0) == math.inf
        await until_shut(client)
        now = asyncio.get_running_loop().time()
        deadline = client.pipeline.hold_deadline(5.0)
        assert now < deadline <= now + 5.0
        await scheduler.stand_by()
        while client._has_leader:
            await soon(client.pipeline.wait_change())
        assert client.pipeline.hold_deadline(5.0) == deadline
        await scheduler.lead()
        await soon(scheduler.wait_connections(2))
        while not client._has_leader:
            await soon(client.pipeline.wait_change())
        assert client.pipeline.hold_deadline(5.0) == deadline
    await scheduler.stop()


async def test_scheduler_that_stands_still_is_noticed() -> None:
    def connect(address: str, options: rpc.Options = ()) -> grpc.aio.Channel:
        return rpc.connect(address, hurried(options))

    async with (
        scheduler_process() as (process, address),
        client_of(address, connect) as client,
    ):
        await soon(client.pipeline.wait_open())
        process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(HANG_S):  # 0.25 s to ping, 0.2 s to wait
            while client.pipeline.is_open:
                await client.pipeline.wait_change()


async def test_what_runs_goes_on_when_submissions_are_closed_and_others_wait() -> None:
    scheduler = FakeScheduler(keeps_quiet)
    async with connected(scheduler) as client:
        running: Inbox = asyncio.Queue()
        submit(client, running)
        (request,) = await soon(scheduler.wait_requests())
        scheduler.close()
        await until_shut(client)
        waiting: Inbox = asyncio.Queue()
        submit(client, waiting, "later", hold_s=HANG_S)
        request.last_token(7, scheduler_pb2.COMPLETION_REASON_LENGTH)
        *_, last = await until_last(running)
        assert last == Completed("r", FinishReason.LENGTH)
        assert waiting.empty()
        assert len(scheduler.requests) == 1
        scheduler.behaviour = says(8)
        scheduler.open()
        assert OutputTokens("later", (8,), 0) in await until_last(waiting)
        assert scheduler.n_connections == 1


async def test_request_without_tokens_is_submitted_again_when_its_stream_is_lost() -> None:
    scheduler = FakeScheduler(keeps_quiet)
    async with connected(scheduler) as client:
        inbox: Inbox = asyncio.Queue()
        submit(client, inbox, hold_s=HANG_S)
        assert await soon(inbox.get()) == Accepted("r")
        scheduler.behaviour = says(7)
        scheduler.drop_connections()
        assert await until_last(inbox) == [
            Accepted("r"),
            OutputTokens("r", (7,), 0),
            Completed("r", FinishReason.LENGTH),
        ]
        first, second = (request.submission for request in scheduler.requests)
        assert (first.is_resubmitted, second.is_resubmitted) == (False, True)
        second.is_resubmitted = False
        assert first == second


async def goes_on_after(loss: Callable[[FakeScheduler], None]) -> FakeScheduler:
    """Loses a scheduler after one token, and checks that the request goes on after it."""
    scheduler = FakeScheduler(stalls_after(7))
    async with connected(scheduler, resume_s=HANG_S) as client:
        inbox: Inbox = asyncio.Queue()
        submit(client, inbox)
        assert [await soon(inbox.get()) for _ in range(2)] == [
            Accepted("r"),
            OutputTokens("r", (7,), 0),
        ]
        scheduler.behaviour = says(7, 8)
        loss(scheduler)
        assert await until_last(inbox) == [
            Accepted("r"),
            OutputTokens("r", (8,), 1),
            Completed("r", FinishReason.LENGTH),
        ]
        assert list(scheduler.requests[1].submission.generated_token_ids) == [7]
    return scheduler


async def test_request_with_tokens_goes_on_after_them_when_its_stream_is_lost() -> None:
    await goes_on_after(FakeScheduler.drop_connections)


async def test_request_with_tokens_goes_on_after_them_when_its_scheduler_leads_no_more() -> None:
    unavailable = scheduler_pb2.COMPLETION_REASON_UNAVAILABLE
    await goes_on_after(lambda scheduler: scheduler.requests[0].complete(unavailable))


async def test_next_scheduler_is_told_losses_until_there_are_two_tokens_and_their_build() -> None:
    scheduler = FakeScheduler(keeps_quiet)
    async with connected(scheduler, resume_s=HANG_S) as client:
        inbox: Inbox = asyncio.Queue()
        submit(client, inbox)
        (first,) = await soon(scheduler.wait_requests())
        first.suspend(2)
        await soon(inbox.get())
        first.accept()  # this event comes after the suspension
        await soon(inbox.get())
        scheduler.drop_connections()
        second = (await soon(scheduler.wait_requests(2)))[1]
        assert second.submission.n_losses == 2
        second.built_by("b")
        second.tokens(7)
        second.tokens(8)
        assert [type(await soon(inbox.get())) for _ in range(3)] == [
            Accepted,
            OutputTokens,
            OutputTokens,
        ]
        scheduler.behaviour = says(7, 8, 9)
        scheduler.drop_connections()
        third = (await soon(scheduler.wait_requests(3)))[2]
        assert third.submission.n_losses == 0
        assert (second.submission.build, third.submission.build) == ("", "b")
        await until_last(inbox)


async def test_request_that_was_taken_waits_from_the_loss_and_not_from_its_arrival() -> None:
    scheduler = FakeScheduler(keeps_quiet)
    async with connected(scheduler, resume_s=0.5) as client:
        loop = asyncio.get_running_loop()
        inbox: Inbox = asyncio.Queue()
        submit(client, inbox)
        assert await soon(inbox.get()) == Accepted("r")
        await asyncio.sleep(0.3)
        scheduler.pipeline = None
        lost_at = loop.time()
        scheduler.drop_connections()
        (last,) = await until_last(inbox)
        assert isinstance(last, Failed)
        assert isinstance(last.error, errors.Unavailable)
        assert loop.time() - lost_at >= 0.45


async def test_request_that_stays_with_its_scheduler_waits_no_longer_for_a_pipeline() -> None:
    scheduler = FakeScheduler(keeps_quiet)
    async with connected(scheduler, resume_s=0.2) as client:
        stalled: Inbox = asyncio.Queue()
        running: Inbox = asyncio.Queue()
        submit(client, stalled, "stalled")
        submit(client, running, "running")
        requests = await soon(scheduler.wait_requests(2))
        scheduler.close()
        for request in requests:
            request.suspend(1)
        await until_shut(client)
        requests[1].tokens(7)
        (_, last) = await until_last(stalled)
        assert isinstance(last, Failed)
        assert isinstance(last.error, errors.Unavailable)
        await soon(requests[0].cancelled.wait())
        requests[1].last_token(8, scheduler_pb2.COMPLETION_REASON_LENGTH)
        assert (await until_last(running))[-1] == Completed("running", FinishReason.LENGTH)


async def test_tokens_that_came_before_are_dropped_and_a_gap_is_an_error() -> None:
    client = SchedulerClient("127.0.0.1:1")
    client._apply(scheduler_pb2.ConnectResponse(pipeline=PIPELINE))
    inbox: Inbox = asyncio.Queue()
    submit(client, inbox)

    def bring(start: int, *token_ids: int) -> None:
        update = scheduler_pb2.TokenUpdate(request_id="r", token_ids=token_ids, start=start)
        client._apply(scheduler_pb2.ConnectResponse(tokens=[update]))

    bring(0, 7, 8)
    bring(1, 8, 9)
    assert [inbox.get_nowait() for _ in range(2)] == [
        OutputTokens("r", (7, 8), 0),
        OutputTokens("r", (9,), 2),
    ]
    other: Inbox = asyncio.Queue()
    submit(client, other, "other")
    bring(4, 5)
    failed = inbox.get_nowait()
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, errors.RequestFailed)
    assert "tokens from 4 on" in failed.error.message
    assert other.empty(), "it is no other request's fault"
    submit(client, inbox)
    bring(0, 7, 8)
    bring(1, 9)
    assert inbox.get_nowait() == OutputTokens("r", (7, 8), 0)
    assert isinstance(inbox.get_nowait(), Failed)
    client.close()


async def test_log_probabilities_come_once_and_with_their_tokens() -> None:
    client = SchedulerClient("127.0.0.1:1")
    client._apply(scheduler_pb2.ConnectResponse(pipeline=PIPELINE))
    inbox: Inbox = asyncio.Queue()

    def begin() -> None:
        asking = scheduler_pb2.Submission(
            request_id="r",
            prompt_token_ids=[1, 2, 3, 4],
            max_new_tokens=8,
            n_logprobs=1,
            n_prompt_logprobs=0,
        )
        client.submit(asking, inbox, model=PIPELINE.model, until=math.inf)

    def bring(position: int, prompt: Sequence[int], start: int, *token_ids: int) -> None:
        update = scheduler_pb2.TokenUpdate(request_id="r", token_ids=token_ids, start=start)
        if prompt:
            update.prompt_logprobs.add(position=position, logprobs=logprobs_of(prompt, 0))
        if token_ids:
            update.logprobs = logprobs_of(token_ids, 1)
        client._apply(scheduler_pb2.ConnectResponse(tokens=[update]))

    begin()
    bring(1, [2, 3], 0)
    bring(1, [2], 0)  # after a loss they come again, in other pieces
    bring(2, [3, 4], 0, 7, 8)
    bring(1, [2, 3, 4], 1, 8, 9)
    assert [inbox.get_nowait() for _ in range(inbox.qsize())] == [
        PromptLogprobs("r", 1, Logprobs.parse(logprobs_of([2, 3], 0))),
        PromptLogprobs("r", 3, Logprobs.parse(logprobs_of([4], 0))),
        OutputTokens("r", (7, 8), 0, Logprobs.parse(logprobs_of([7, 8], 1))),
        OutputTokens("r", (9,), 2, Logprobs.parse(logprobs_of([9], 1))),
    ]
    client.cancel("r")
    nothing = scheduler_pb2.TokenUpdate(request_id="r", token_ids=[7], start=0)
    wrongs: list[Callable[[], None]] = [
        lambda: bring(2, [3], 0),
        lambda: bring(1, [2], 0, 7),
        lambda: client._apply(scheduler_pb2.ConnectResponse(tokens=[nothing])),
    ]
    for wrong in wrongs:
        begin()
        wrong()
        failed = [inbox.get_nowait() for _ in range(inbox.qsize())][-1]
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, errors.RequestFailed)
    client.close()


async def test_scheduler_that_does_not_say_where_tokens_belong_is_left() -> None:
    async def forgets(request: FakeRequest) -> None:
        request.accept()
        update = scheduler_pb2.TokenUpdate(request_id=request.request_id, token_ids=[7])
        request._send(scheduler_pb2.ConnectResponse(tokens=[update]))

    scheduler = FakeScheduler(forgets)
    async with connected(scheduler, resume_s=HANG_S) as client:
        inbox: Inbox = asyncio.Queue()
        submit(client, inbox)
        await soon(scheduler.wait_requests(1))
        scheduler.behaviour = says(7)
        assert [event for event in await until_last(inbox) if isinstance(event, OutputTokens)] == [
            OutputTokens("r", (7,), 0)
        ]
        assert scheduler.n_connections == 2


async def test_request_that_takes_schedulers_along_gets_no_more_time() -> None:
    scheduler = FakeScheduler(loses_pipeline_after())
    async with connected(scheduler, resume_s=0.4) as client:
        inbox: Inbox = asyncio.Queue()
        began = asyncio.get_running_loop().time()
        submit(client, inbox)
        *_, last = await until_last(inbox)
        assert isinstance(last, Failed)
        assert isinstance(last.error, errors.Unavailable)
        assert 0.4 < asyncio.get_running_loop().time() - began < HANG_S
        assert len(scheduler.requests) > MAX_EXTENSIONS


UNAVAILABLE = scheduler_pb2.REJECTION_REASON_UNAVAILABLE


@pytest.mark.parametrize(
    "failure",
    [rejects(UNAVAILABLE), loses_pipeline_after()],
    ids=["rejected", "completed"],
)
async def test_request_that_fails_as_unavailable_is_tried_again_with_pauses(
    failure: Behaviour,
) -> None:
    scheduler = FakeScheduler(failure)
    async with connected(scheduler) as client:
        inbox: Inbox = asyncio.Queue()
        began = asyncio.get_running_loop().time()
        submit(client, inbox, hold_s=HANG_S)
        await soon(scheduler.wait_requests(3))
        scheduler.behaviour = says(7)
        assert (await until_last(inbox))[-1] == Completed("r", FinishReason.LENGTH)
        assert len(scheduler.requests) == 4
        assert asyncio.get_running_loop().time() - began > 2.5 * ATTEMPT_PAUSE_S


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (scheduler_pb2.REJECTION_REASON_INVALID, errors.InvalidRequest),
        (scheduler_pb2.REJECTION_REASON_POOL_FULL, errors.PoolFull),
    ],
    ids=["invalid", "full"],
)
async def test_other_refusals_are_final(
    reason: scheduler_pb2.RejectionReason, error: type[errors.OrcinusError]
) -> None:
    scheduler = FakeScheduler(rejects(reason))
    async with connected(scheduler) as client:
        inbox: Inbox = asyncio.Queue()
        submit(client, inbox, hold_s=HANG_S)
        (last,) = await until_last(inbox)
        assert isinstance(last, Failed)
        assert isinstance(last.error, error)


@pytest.mark.parametrize(
    ("reason", "refusal"),
    [
        (scheduler_pb2.REJECTION_REASON_KEY_RATE, Refusal.KEY_RATE),
        (scheduler_pb2.REJECTION_REASON_KEY_IN_FLIGHT, Refusal.KEY_IN_FLIGHT),
    ],
    ids=["rate", "in flight"],
)
async def test_refusals_for_a_keys_limits_say_when_to_come_back_and_are_counted(
    reason: scheduler_pb2.RejectionReason, refusal: Refusal
) -> None:
    scheduler = FakeScheduler(rejects(reason, "too many tokens", retry_after_s=7))
    refusals = Refusals()
    async with client_of(await scheduler.start(), refusals=refusals) as client:
        await soon(client.pipeline.wait_open())
        inbox: Inbox = asyncio.Queue()
        submit(client, inbox, hold_s=HANG_S)
        (last,) = await until_last(inbox)
        assert isinstance(last, Failed)
        assert isinstance(last.error, errors.PoolFull)
        assert (last.error.message, last.error.retry_after_s) == ("too many tokens", 7)
    await scheduler.stop()
    assert refusals[refusal] == refusals.total() == 1


FULL = rejects(scheduler_pb2.REJECTION_REASON_POOL_FULL, "full", retry_after_s=0.3)


@pytest.mark.parametrize("why", ["held", "resubmitted", "held elsewhere"])
async def test_request_that_was_held_waits_for_room_in_a_full_pool(why: str) -> None:
    scheduler = FakeScheduler(keeps_quiet)
    async with connected(scheduler) as client:
        loop = asyncio.get_running_loop()
        inbox: Inbox = asyncio.Queue()
        until = loop.time() + HANG_S
        if why == "held":
            scheduler.close()
            await until_shut(client)
        elsewhere = why == "held elsewhere"
        scheduler.behaviour = keeps_quiet if why == "resubmitted" else FULL
        began = loop.time()
        client.submit(submission(), inbox, model=PIPELINE.model, until=until, was_held=elsewhere)
        if why == "held":
            scheduler.open()
        elif why == "resubmitted":
            assert await soon(inbox.get()) == Accepted("r")
            scheduler.behaviour = FULL
            scheduler.drop_connections()
        n_before = 1 if why == "resubmitted" else 0
        await soon(scheduler.wait_requests(n_before + 2))
        scheduler.behaviour = says(7)
        assert (await until_last(inbox))[-1] == Completed("r", FinishReason.LENGTH)
        assert len(scheduler.requests) == n_before + 3
        assert loop.time() - began >= 0.5, "the scheduler said when to come back, twice"


async def test_pool_that_stays_full_refuses_what_was_held_when_its_time_is_up() -> None:
    scheduler = FakeScheduler(FULL, pipeline=None)
    async with client_of(await scheduler.start()) as client:
        await soon(scheduler.wait_connections(1))
        inbox: Inbox = asyncio.Queue()
        submit(client, inbox, hold_s=0.8)
        scheduler.open()
        (last,) = await until_last(inbox)
        assert isinstance(last, Failed)
        assert isinstance(last.error, errors.PoolFull)
        assert last.error.retry_after_s == 0.3
        assert 2 <= len(scheduler.requests) <= 4
    await scheduler.stop()


async def test_request_is_held_no_longer_than_it_may() -> None:
    scheduler = FakeScheduler(pipeline=None)
    async with client_of(await scheduler.start()) as client:
        inbox: Inbox = asyncio.Queue()
        loop = asyncio.get_running_loop()
        began = loop.time()
        submit(client, inbox, hold_s=0.2)
        (last,) = await until_last(inbox)
        assert isinstance(last, Failed)
        assert last.error.message == NO_PIPELINE
        with pytest.raises(errors.Unavailable, match=NO_PIPELINE):
            await client.pipeline.wait_open(loop.time() + 0.1)
        assert loop.time() - began >= 0.25
    await scheduler.stop()


async def test_request_that_is_cancelled_while_it_is_held_is_never_sent() -> None:
    scheduler = FakeScheduler(says(7), pipeline=None)
    async with client_of(await scheduler.start()) as client:
        await soon(scheduler.wait_connections(1))
        inbox: Inbox = asyncio.Queue()
        submit(client, inbox, "held", hold_s=HANG_S)
        client.cancel("held")
        scheduler.open()
        await soon(client.pipeline.wait_open())
        submit(client, inbox, "next")
        assert {event.request_id for event in await until_last(inbox)} == {"next"}
        assert scheduler.cancellations == []
    await scheduler.stop()


async def test_request_for_one_model_is_not_submitted_to_another() -> None:
    scheduler = FakeScheduler()
    async with connected(scheduler) as client:
        scheduler.close()
        await until_shut(client)
        inbox: Inbox = asyncio.Queue()
        submit(client, inbox, hold_s=HANG_S)
        other = scheduler_pb2.PipelineDescription()
        other.CopyFrom(PIPELINE)
        other.model = "another-model"
        scheduler.open(other)
        (last,) = await until_last(inbox)
        assert isinstance(last, Failed)
        assert "another model" in last.error.message
        assert not scheduler.requests


def test_pauses_grow_up_to_a_limit() -> None:
    backoff = Backoff(first_s=1.0, max_s=8.0)
    for n_failures, longest in ((1, 1), (2, 2), (3, 4), (4, 8), (50, 8), (5000, 8)):
        assert longest / 2 <= backoff.pause_s(n_failures) <= longest


REASONS = scheduler_pb2.CompletionReason.values()

FINAL = {
    scheduler_pb2.COMPLETION_REASON_FAILED: errors.RequestFailed,
    scheduler_pb2.COMPLETION_REASON_TIMED_OUT: errors.TimedOut,
}


@pytest.mark.parametrize("reason", REASONS, ids=scheduler_pb2.CompletionReason.keys())
def test_every_completion_ends_a_request(reason: scheduler_pb2.CompletionReason) -> None:
    completion = scheduler_pb2.Completion(request_id="r", reason=reason)
    (event,) = ends_of(scheduler_pb2.ConnectResponse(completed=[completion]))
    assert event.is_last
    if isinstance(event, Failed):
        expected = FINAL.get(reason, errors.Unavailable)
        assert isinstance(event.error, expected)
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
    (event,) = news_of(scheduler_pb2.ConnectResponse(rejected=[rejected]))
    assert isinstance(event, Failed)
    assert isinstance(event.error, errors.InvalidRequest)
    assert event.error.field == (field or "prompt")
    assert event.error.message == expected


def test_retry_delay_of_a_full_pool_is_kept_or_made_up() -> None:
    full = scheduler_pb2.Rejection(reason=scheduler_pb2.REJECTION_REASON_POOL_FULL)
    patient = scheduler_pb2.Rejection(reason=scheduler_pb2.REJECTION_REASON_POOL_FULL)
    patient.retry_after.FromMilliseconds(2500)
    delays = []
    for event in news_of(scheduler_pb2.ConnectResponse(rejected=[full, patient])):
        assert isinstance(event, Failed)
        assert isinstance(event.error, errors.PoolFull)
        delays.append(event.error.retry_after_s)
    assert delays == [1.0, 2.5]
