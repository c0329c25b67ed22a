"""A model that is asleep or starts: what a frontend's link knows, and what it tells."""

import asyncio
import math

import pytest
from orcinus.v1 import scheduler_pb2

from services.common import errors
from services.frontend.link.scheduler_client import SchedulerClient
from tests.fake_scheduler import PIPELINE, FakeScheduler, keeps_quiet
from tests.frontend.conftest import client_of, connected, soon

ASLEEP = scheduler_pb2.SLEEP_STATE_ASLEEP
STARTING = scheduler_pb2.SLEEP_STATE_STARTING


async def until_state(client: SchedulerClient, state: str) -> None:
    while client.pipeline.state != state:
        await soon(client.pipeline.wait_change())


async def test_a_frontend_that_comes_while_the_model_sleeps_knows_the_model() -> None:
    scheduler = FakeScheduler(pipeline=None)
    scheduler.note_sleep(ASLEEP)
    async with client_of(await scheduler.start()) as client:
        await until_state(client, "asleep")
        assert client.pipeline.last.model == PIPELINE.model
        assert client.pipeline.hold_deadline(0.0) == math.inf
        assert client.pipeline.trouble == "the model is asleep"
        scheduler.note_sleep(STARTING)
        await until_state(client, "starting")
        scheduler.open()
        await until_state(client, "serving")
        assert client.pipeline.trouble == ""
    await scheduler.stop()


async def test_a_model_that_never_served_makes_no_frontend_ready() -> None:
    scheduler = FakeScheduler(pipeline=None)
    scheduler.sleep = scheduler_pb2.Sleep(state=STARTING)
    async with client_of(await scheduler.start()) as client:
        while not client.pipeline.is_sleeping:
            await soon(client.pipeline.wait_change())
        assert client.pipeline.state == "starting"
        assert client.pipeline.hold_deadline(60.0) == -math.inf
        with pytest.raises(errors.Unavailable):
            _ = client.pipeline.last
    await scheduler.stop()


async def test_the_number_of_held_requests_is_told_while_the_model_sleeps() -> None:
    scheduler = FakeScheduler()
    async with connected(scheduler) as client:
        assert scheduler.demands == []
        scheduler.note_sleep(ASLEEP)
        await soon(scheduler.wait_demand(0))
        waiting = [asyncio.create_task(client.pipeline.wait_open()) for _ in range(3)]
        await soon(scheduler.wait_demand(3))
        waiting.pop().cancel()
        await soon(scheduler.wait_demand(2))
        scheduler.open()
        await soon(asyncio.gather(*waiting))
        told = list(scheduler.demands)
        scheduler.note_sleep(ASLEEP)  # later numbers begin anew
        await soon(scheduler.wait_demand(0))
        assert scheduler.demands == [*told, 0]


async def test_requests_that_a_lost_scheduler_had_wake_the_model_at_the_next_one() -> None:
    scheduler = FakeScheduler(keeps_quiet)
    async with connected(scheduler, resume_s=60.0) as client:
        submission = scheduler_pb2.Submission(
            request_id="a", prompt_token_ids=[1], max_new_tokens=8
        )
        client.submit(submission, asyncio.Queue(), model=PIPELINE.model, until=None)
        await soon(scheduler.wait_requests())
        scheduler.pipeline = None
        scheduler.sleep = scheduler_pb2.Sleep(state=ASLEEP, pipeline=PIPELINE)
        scheduler.drop_connections()
        await soon(scheduler.wait_demand(1))
        client.cancel("a")
        await soon(scheduler.wait_demand(0))


async def test_without_its_scheduler_a_sleeping_model_is_unavailable_after_a_while() -> None:
    scheduler = FakeScheduler(pipeline=None)
    scheduler.note_sleep(ASLEEP)
    async with client_of(await scheduler.start()) as client:
        await until_state(client, "asleep")
        now = asyncio.get_running_loop().time()
        await scheduler.stop()
        await until_state(client, "unavailable")
        assert now + 60.0 <= client.pipeline.hold_deadline(60.0) < math.inf
