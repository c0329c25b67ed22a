"""A frontend whose model is asleep: ready, with answers about the model, and it holds requests."""

from pathlib import Path

import pytest
from orcinus.v1 import scheduler_pb2

from tests.fake_scheduler import PIPELINE, FakeScheduler
from tests.frontend.conftest import running, soon
from tests.limits import HANG_S

ASLEEP = scheduler_pb2.SLEEP_STATE_ASLEEP
STARTING = scheduler_pb2.SLEEP_STATE_STARTING
STREAM = {"model": PIPELINE.model, "prompt": "hello", "max_tokens": 4, "stream": True}


def asleep() -> FakeScheduler:
    scheduler = FakeScheduler(pipeline=None)
    scheduler.note_sleep(ASLEEP)
    return scheduler


async def test_a_frontend_is_ready_and_answers_questions_while_the_model_sleeps(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, asleep()) as site:
        assert (await site.http.get("/ready")).status_code == 200
        (model,) = (await site.http.get("/v1/models")).json()["data"]
        assert (model["id"], model["state"]) == (PIPELINE.model, "asleep")
        assert model["max_model_len"] == PIPELINE.max_model_len
        described = await soon(site.inference.describe_model())
        assert described.vocab_size == PIPELINE.vocab_size
        tokens = await site.http.post("/tokenize", json={"prompt": "hello"})
        assert tokens.status_code == 200
        serving = await site.http.get("/serving")
        assert serving.status_code == 503
        assert serving.json()["reason"].startswith("the model is asleep")


async def test_a_wrong_request_does_not_wake_the_model(tmp_path: Path) -> None:
    async with running(tmp_path, asleep()) as site:
        answer = await site.http.post("/v1/completions", json={**STREAM, "temperature": -1})
        assert answer.status_code == 400
        assert not any(site.scheduler.demands)


async def test_a_stream_is_held_with_comments_until_the_model_serves(tmp_path: Path) -> None:
    async with running(tmp_path, asleep(), wake_s=HANG_S, comment_s=0.05) as site:
        async with site.http.stream("POST", "/v1/completions", json=STREAM) as stream:
            lines = stream.aiter_lines()
            await soon(site.scheduler.wait_demand(1))
            site.scheduler.note_sleep(STARTING)
            assert (await soon(anext(lines))).startswith(":")
            (model,) = (await site.http.get("/v1/models")).json()["data"]
            assert model["state"] == "starting"
            site.scheduler.open()
            rest = [line async for line in lines]
        assert "data: [DONE]" in rest


async def test_a_request_is_not_held_for_longer_than_a_start_may_take(tmp_path: Path) -> None:
    async with running(tmp_path, asleep(), wake_s=0.1, hold_s=HANG_S) as site:
        answer = await site.http.post("/v1/completions", json={**STREAM, "stream": False})
        assert answer.status_code == 503


@pytest.mark.parametrize("hold_s", [0.0, HANG_S], ids=["not ready", "still ready"])
async def test_a_frontend_that_loses_the_scheduler_of_a_sleeping_model_is_ready_for_a_while(
    tmp_path: Path, hold_s: float
) -> None:
    async with running(tmp_path, asleep(), hold_s=hold_s) as site:
        await site.scheduler.stop()
        serving = await site.http.get("/serving")
        while "no pipeline" not in serving.json()["reason"]:
            serving = await site.http.get("/serving")
        assert (await site.http.get("/ready")).status_code == (200 if hold_s else 503)
