"""The life of a frontend: before it is connected, and while it stops."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from orcinus.v1 import inference_pb2

from tests.fake_scheduler import keeps_quiet, says
from tests.frontend.conftest import PATIENCE_S, Site, running


async def wait_health(site: Site, status: int) -> None:
    stub = health_pb2_grpc.HealthStub(site.inference.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service="orcinus.v1.InferenceService"))
    async with asyncio.timeout(PATIENCE_S):
        while (await watch.read()).status != status:
            pass
    watch.cancel()


def complete(site: Site, **body: Any) -> asyncio.Task[httpx.Response]:
    return asyncio.ensure_future(site.http.post("/v1/completions", json={"prompt": "x"} | body))


async def test_without_a_scheduler_nothing_is_taken(tmp_path: Path) -> None:
    async with running(tmp_path) as site:
        site.scheduler.pipeline = None
        site.scheduler.drop_connections()
        await wait_health(site, health_pb2.HealthCheckResponse.NOT_SERVING)
        assert (await site.http.get("/health")).status_code == 200
        assert (await site.http.get("/ready")).status_code == 503
        assert (await site.http.get("/v1/models")).status_code == 503
        assert (await complete(site)).status_code == 503
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await site.inference.describe_model()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_stream_that_is_lost_ends_requests_and_comes_back(tmp_path: Path) -> None:
    async with running(tmp_path) as site:
        site.scheduler.behaviour = keeps_quiet
        waiting = complete(site)
        await site.scheduler.wait_requests()
        site.scheduler.drop_connections()
        assert (await waiting).status_code == 503
        site.scheduler.behaviour = says(*site.tokens("a"))
        await wait_health(site, health_pb2.HealthCheckResponse.SERVING)
        assert (await complete(site)).status_code == 200


async def test_stopping_refuses_new_requests_and_finishes_running_ones(tmp_path: Path) -> None:
    async with running(tmp_path) as site:
        proceed = asyncio.Event()

        async def answer_later(request: Any) -> None:
            request.accept()
            await proceed.wait()
            await says(*site.tokens("done"))(request)

        site.scheduler.behaviour = answer_later
        whole = complete(site, max_tokens=20)
        streamed = complete(site, max_tokens=20, stream=True)
        await site.scheduler.wait_requests(2)
        site.stop.set()
        await wait_health(site, health_pb2.HealthCheckResponse.NOT_SERVING)
        assert (await complete(site)).status_code == 503
        assert (await site.http.get("/ready")).status_code == 503
        prompt = inference_pb2.Prompt(text="x")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await site.inference.generate(inference_pb2.GenerateRequest(prompt=prompt))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not whole.done()
        proceed.set()
        assert (await whole).json()["choices"][0]["text"] == "done"
        assert (await streamed).text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("drain_s", [0.05, 1000.0], ids=["time-is-up", "second-signal"])
async def test_stopping_ends_what_does_not_finish(tmp_path: Path, drain_s: float) -> None:
    async with running(tmp_path, drain_s=drain_s) as site:
        site.scheduler.behaviour = keeps_quiet
        whole = complete(site)
        prompt = inference_pb2.Prompt(text="x")
        call = site.inference.stream(inference_pb2.GenerateStreamRequest(prompt=prompt))
        await site.scheduler.wait_requests(2)
        site.stop.set()
        await wait_health(site, health_pb2.HealthCheckResponse.NOT_SERVING)
        if drain_s > 1:
            site.stop.set()
        assert (await whole).status_code == 503
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_answers_in_flight_are_bounded(tmp_path: Path) -> None:
    async with running(tmp_path, max_in_flight=2, drain_s=0.0) as site:
        site.scheduler.behaviour = keeps_quiet
        waiting = complete(site, n=2)
        await site.scheduler.wait_requests(2)
        refused = await complete(site)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        site.stop.set()
        assert (await waiting).status_code == 503


async def test_checkpoint_without_a_template_takes_no_conversations(tmp_path: Path) -> None:
    async with running(tmp_path, template=None) as site:
        body = {"messages": [{"role": "user", "content": "x"}]}
        response = await site.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages"
        assert "chat template" in response.json()["error"]["message"]
        assert not (await site.inference.describe_model()).has_chat_template
