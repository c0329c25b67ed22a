"""A leader whose model may sleep: real controllers with fake ranks, a frontend on a real socket,
and a number of workers for which the test plays the cluster."""

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from orcinus.v1 import scheduler_pb2

from services.common.errors import Unavailable
from services.scheduler.known_model import KnownModel
from tests.exposition import Samples
from tests.fakes import fake_stage
from tests.limits import HANG_S
from tests.scheduler.leading import FewWorkers, Scene, scene

ASLEEP = scheduler_pb2.SLEEP_STATE_ASLEEP
STARTING = scheduler_pb2.SLEEP_STATE_STARTING
TEXT = '{"model": "demo", "vocabSize": 512, "maxModelLen": 128, "eosTokenIds": [2]}'


def may_sleep(
    workers: FewWorkers, known: str = TEXT, **settings: float
) -> AbstractAsyncContextManager[Scene]:
    options: dict[str, Any] = {"start_timeout_s": 0.5, "sleep_after_s": 0.1, **settings}
    return scene(
        1,
        workers=workers,
        known=known,
        worker_deployment="workers",
        min_pipelines=0,
        max_pipelines=2,
        **options,
    )


async def until_set(workers: FewWorkers, n_workers: int) -> None:
    async with asyncio.timeout(HANG_S):
        while workers.n_workers != n_workers:
            await asyncio.sleep(0.01)


async def test_a_leader_without_workers_stays_while_its_model_sleeps() -> None:
    workers = FewWorkers()
    async with may_sleep(workers) as it:
        sleep = await it.sleep(ASLEEP)
        assert (sleep.pipeline.model, sleep.pipeline.max_model_len) == ("demo", 128)
        ended, _ = await asyncio.wait((it.leading,), timeout=1.5)  # three times its limit
        assert not ended
        assert workers.n_workers == 0
        assert Samples.of(it.registry).sum("orcinus_pipelines_wanted") == 0


async def test_held_requests_wake_the_model_and_it_sleeps_again() -> None:
    workers = FewWorkers()
    async with may_sleep(workers, start_timeout_s=HANG_S) as it:
        await it.sleep(ASLEEP)
        await it.hold(2)
        await it.sleep(STARTING)
        await until_set(workers, 1)
        async with fake_stage(answers=True) as stage:
            it.stages.add(stage.address)
            await it.until_open()
            assert it.service.n_held == 0  # frontends submit the two, or tell of them again
            await it.submit("a", n_tokens=3)
            assert await it.outcome() == (3, scheduler_pb2.COMPLETION_REASON_LENGTH)
            await until_set(workers, 0)
            it.stages.remove(stage.address)
        sleep = await it.sleep(ASLEEP)  # the pipeline has ended with its worker
        assert sleep.pipeline == it.service.known.pipeline
        assert sleep.pipeline.max_model_len != 128  # it is the one that served


async def test_a_model_that_starts_for_too_long_ends_the_leader() -> None:
    async def wake_in_vain() -> None:
        async with may_sleep(FewWorkers()) as it:
            await it.sleep(ASLEEP)
            await it.hold(1)
            await asyncio.wait_for(asyncio.shield(it.leading), HANG_S)

    with pytest.raises(Unavailable, match=r"no pipeline within 0\.5 s"):
        await wake_in_vain()


async def test_a_leader_that_never_saw_a_worker_starts_a_pipeline_once() -> None:
    workers = FewWorkers()
    async with may_sleep(workers, known="", start_timeout_s=HANG_S) as it:
        assert not (await it.sleep(STARTING)).HasField("pipeline")
        await until_set(workers, 1)
        async with fake_stage(answers=True) as stage:
            it.stages.add(stage.address)
            await it.until_open()
            await until_set(workers, 0)


def test_what_is_known_of_a_model_survives_as_a_text(caplog: pytest.LogCaptureFixture) -> None:
    known, next_one = KnownModel(), KnownModel()
    assert known.to_text() == ""
    known.restore("not JSON")
    known.restore('{"vocabSize": "many"}')
    assert not known.is_known
    assert len(caplog.records) == 2
    known.restore('{"model": "demo", "vocabSize": 512, "ofALaterVersion": 1}')
    assert known.is_known
    next_one.restore(known.to_text())
    assert next_one.pipeline == known.pipeline
    next_one.restore('{"model": "other"}')
    assert next_one.pipeline.model == "demo"
