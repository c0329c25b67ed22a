"""The life of a frontend: before it is connected, and while it stops."""

import asyncio
import itertools
import re
from collections import Counter
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from orcinus.v1 import inference_pb2, scheduler_pb2

from services.common import rpc
from services.common.health import READINESS, SERVING
from services.frontend.frontend import END_S
from tests.addresses import free_address
from tests.exposition import Samples
from tests.fake_scheduler import (
    FakeScheduler,
    echo,
    keeps_quiet,
    loses_pipeline_after,
    rejects,
    says,
    stalls_after,
)
from tests.frontend.conftest import InferenceClient, Site, running, soon
from tests.limits import HANG_S

OWN = (("grpc.use_local_subchannel_pool", 1),)
"""Gives each channel a connection of its own."""


async def wait_health(
    site: Site, status: int, *, service: str = "orcinus.v1.InferenceService"
) -> None:
    stub = health_pb2_grpc.HealthStub(site.inference.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=service))
    async with asyncio.timeout(HANG_S):
        while (await watch.read()).status != status:
            pass
    watch.cancel()


async def wait_ready(site: Site, is_ready: bool) -> None:
    async with asyncio.timeout(HANG_S):
        while (await site.http.get("/ready")).status_code != (200 if is_ready else 503):
            await asyncio.sleep(0.01)


async def shut(site: Site, shortfall: str = "") -> None:
    """Has the pipeline lost, as far as the frontend knows too."""
    site.scheduler.close(shortfall)
    async with asyncio.timeout(HANG_S):
        while site.model.scheduler.pipeline.is_open:
            await asyncio.sleep(0.01)


def complete(site: Site, **body: Any) -> asyncio.Task[httpx.Response]:
    return asyncio.ensure_future(site.http.post("/v1/completions", json={"prompt": "x"} | body))


async def test_before_the_first_pipeline_nothing_is_taken(tmp_path: Path) -> None:
    async with running(tmp_path, FakeScheduler(pipeline=None), is_open=False) as site:
        await soon(site.scheduler.wait_connections(1))
        await wait_health(site, health_pb2.HealthCheckResponse.NOT_SERVING)
        assert (await site.http.get("/health")).status_code == 200
        assert (await site.http.get("/ready")).status_code == 503
        assert (await site.http.get("/v1/models")).status_code == 503
        assert (await complete(site)).status_code == 503
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await site.inference.describe_model()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_model_is_still_described_while_the_pipeline_is_lost(tmp_path: Path) -> None:
    async with running(tmp_path) as site:
        await site.scheduler.stand_by()
        await wait_ready(site, False)
        assert (await site.http.get("/v1/models")).json()["data"][0]["id"] == "test-model"
        assert (await site.inference.describe_model()).model == "test-model"
        assert (await complete(site)).status_code == 503


async def test_stream_that_is_lost_ends_requests_and_comes_back(tmp_path: Path) -> None:
    async with running(tmp_path) as site:
        site.scheduler.behaviour = keeps_quiet
        waiting = complete(site)
        await site.scheduler.wait_requests()
        site.scheduler.drop_connections()
        assert (await waiting).status_code == 503
        site.scheduler.behaviour = says(*site.tokens("a"))
        await soon(site.scheduler.wait_connections(2))
        await wait_ready(site, True)
        assert (await complete(site)).status_code == 200


async def test_readiness_outlasts_a_change_of_leaders_for_as_long_as_requests_are_held(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, hold_s=0.5) as site:
        names = health_pb2.HealthCheckResponse
        await wait_health(site, names.SERVING)
        await shut(site)  # a leader whose pipeline forms again
        assert (await soon(complete(site))).status_code == 503
        await wait_health(site, names.NOT_SERVING)  # or does not
        assert (await site.http.get("/ready")).status_code == 503
        site.scheduler.open()
        await wait_ready(site, True)
        assert (await complete(site)).status_code == 200
        await site.scheduler.stand_by()  # no scheduler leads
        began = asyncio.get_running_loop().time()
        await wait_health(site, names.NOT_SERVING)
        assert asyncio.get_running_loop().time() - began > 0.3
        assert (await site.http.get("/ready")).status_code == 503
        await site.scheduler.lead()
        await wait_health(site, names.SERVING)
        assert (await site.http.get("/ready")).status_code == 200


async def test_a_frontend_that_holds_requests_is_ready_and_does_not_serve(tmp_path: Path) -> None:
    names = health_pb2.HealthCheckResponse
    async with running(tmp_path, hold_s=60) as site:
        await wait_health(site, names.SERVING, service=SERVING)
        await shut(site, "pod-1 does not fit: block_size 16, not 32")
        assert (await site.http.get("/ready")).status_code == 200
        answer = await site.http.get("/serving")
        assert answer.status_code == 503
        assert answer.json()["status"] == "not serving"
        assert re.fullmatch(
            "no pipeline for [0-9]+ s: pod-1 does not fit: block_size 16, not 32",
            answer.json()["reason"],
        )
        assert Samples.of(site.frontend._registry).sum("orcinus_serving") == 0
        await wait_health(site, names.NOT_SERVING, service=SERVING)
        site.scheduler.open()
        await wait_health(site, names.SERVING, service=SERVING)
        assert (await site.http.get("/serving")).status_code == 200
        assert Samples.of(site.frontend._registry).sum("orcinus_serving") == 1


async def test_probes_are_answered_on_their_own_port(tmp_path: Path) -> None:
    address = free_address()
    pipeline = FakeScheduler(pipeline=None)
    async with (
        running(tmp_path, pipeline, is_open=False, health_address=address) as site,
        rpc.connect(address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)

        async def wait_status(name: str, status: int) -> None:
            watch = stub.Watch(health_pb2.HealthCheckRequest(service=name))
            while (await soon(watch.read())).status != status:
                pass
            watch.cancel()

        names = health_pb2.HealthCheckResponse
        await wait_status("startup", names.SERVING)
        await wait_status("liveness", names.SERVING)
        for name in ("readiness", "", "orcinus.v1.InferenceService"):
            await wait_status(name, names.NOT_SERVING)
        await soon(site.scheduler.wait_connections(1))
        site.scheduler.open()
        for name in ("readiness", "", "orcinus.v1.InferenceService"):
            await wait_status(name, names.SERVING)


async def test_requests_are_held_until_there_is_a_pipeline(tmp_path: Path) -> None:
    scheduler = FakeScheduler(pipeline=None)
    async with running(tmp_path, scheduler, is_open=False, hold_s=HANG_S) as site:
        await soon(scheduler.wait_connections(1))
        held = [complete(site), complete(site, stream=True)]
        prompt = inference_pb2.Prompt(text="x")
        call = site.inference.generate(inference_pb2.GenerateRequest(prompt=prompt))
        gone = complete(site)
        late = site.inference.generate(inference_pb2.GenerateRequest(prompt=prompt), timeout=0.1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await late
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        while site.frontend._admission.n_in_flight > 3:
            await asyncio.sleep(0.01)
        scheduler.open()
        assert [(await soon(response)).status_code for response in held] == [200, 200]
        assert (await soon(call)).choices
        assert len(scheduler.requests) == 3


async def test_held_requests_are_bounded(tmp_path: Path) -> None:
    scheduler = FakeScheduler(pipeline=None)
    settings: dict[str, Any] = {"hold_s": HANG_S, "max_in_flight": 2, "drain_s": 0.0}
    async with running(tmp_path, scheduler, is_open=False, **settings) as site:
        held = [complete(site) for _ in range(3)]
        done, _ = await asyncio.wait(held, return_when=asyncio.FIRST_COMPLETED, timeout=HANG_S)
        assert [response.result().status_code for response in done] == [429]
        site.stop.set()
        assert sorted([(await soon(r)).status_code for r in held]) == [429, 503, 503]


async def test_held_requests_that_meet_a_full_pool_have_their_turn(tmp_path: Path) -> None:
    scheduler = FakeScheduler(pipeline=None)
    n_running = 0

    async def two_at_once(request: Any) -> None:
        nonlocal n_running
        if n_running == 2:
            full = scheduler_pb2.REJECTION_REASON_POOL_FULL
            request.reject(full, "full", retry_after_s=0.2)
            return
        n_running += 1
        request.accept()
        await asyncio.sleep(0.05)
        n_running -= 1
        await says(5)(request)

    scheduler.behaviour = two_at_once
    async with running(tmp_path, scheduler, is_open=False, hold_s=HANG_S) as site:
        await soon(scheduler.wait_connections(1))
        held = [complete(site) for _ in range(5)]
        while site.frontend._admission.n_in_flight < 5:
            await asyncio.sleep(0.01)
        scheduler.open()
        assert [(await soon(response)).status_code for response in held] == [200] * 5
        assert len(scheduler.requests) > 5


async def test_requests_that_find_a_full_pool_at_once_are_refused_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, hold_s=HANG_S) as site:
        site.scheduler.behaviour = rejects(scheduler_pb2.REJECTION_REASON_POOL_FULL)
        assert (await soon(complete(site))).status_code == 429
        assert len(site.scheduler.requests) == 1


PROMPTS: list[Any] = [
    {"prompt": "x" * 60_000},
    {"prompt": ["x" * 30_000, "x" * 30_000]},
    {"prompt": [5] * 2_000},
    {"prompt": "x", "model": "x" * 60_000},
    {"messages": [{"role": "user", "content": "x" * 60_000}]},
    {"messages": [{"role": "user", "content": "x", "name": "x" * 60_000}]},
]


@pytest.mark.parametrize("body", PROMPTS, ids=["text", "texts", "tokens", "model", "chat", "name"])
async def test_held_requests_are_bounded_in_bytes(tmp_path: Path, body: dict[str, Any]) -> None:
    scheduler = FakeScheduler(pipeline=None)
    settings: dict[str, Any] = {"hold_s": HANG_S, "max_in_flight_bytes": 100_000}
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with running(tmp_path, scheduler, is_open=False, **settings) as site:
        await soon(scheduler.wait_connections(1))
        held = [asyncio.ensure_future(site.http.post(path, json=body)) for _ in range(2)]
        done, (waiting,) = await asyncio.wait(
            held, return_when=asyncio.FIRST_COMPLETED, timeout=HANG_S
        )
        assert [response.result().status_code for response in done] == [429]
        small = complete(site, max_tokens=1)
        while site.frontend._admission.n_in_flight < 2:
            await asyncio.sleep(0.01)
        scheduler.open()
        assert (await soon(small)).status_code == 200
        assert (await soon(waiting)).status_code != 429
        assert site.frontend._budget.n_bytes == 0


async def test_request_that_is_larger_than_the_budget_is_taken_alone(tmp_path: Path) -> None:
    async with running(tmp_path, max_in_flight_bytes=1) as site:
        proceed = asyncio.Event()

        async def answers_later(request: Any) -> None:
            await proceed.wait()
            await echo(request)

        site.scheduler.behaviour = answers_later
        first = complete(site)
        await soon(site.scheduler.wait_requests())
        assert (await soon(complete(site))).status_code == 429
        proceed.set()
        assert (await soon(first)).status_code == 200
        assert (await soon(complete(site))).status_code == 200


async def test_frontend_that_drains_keeps_its_held_requests(tmp_path: Path) -> None:
    async with running(tmp_path, hold_s=HANG_S) as site:
        await shut(site)
        held = complete(site)
        while site.frontend._admission.n_in_flight == 0:
            await asyncio.sleep(0.01)
        site.stop.set()
        await wait_ready(site, False)
        site.scheduler.open()
        assert (await soon(held)).status_code == 200


async def test_leaders_change_under_load_without_a_failed_request(tmp_path: Path) -> None:
    first, second = FakeScheduler(), FakeScheduler(is_leading=False)
    async with running(tmp_path, first, second, hold_s=HANG_S) as site:
        proceed = asyncio.Event()

        async def takes_long(request: Any) -> None:
            request.accept()
            request.tokens(*site.tokens("a"))
            await proceed.wait()
            await says(*site.tokens("b"))(request)

        first.behaviour = takes_long
        running_on = [complete(site, max_tokens=4) for _ in range(5)]
        await soon(first.wait_requests(5))
        first.behaviour = second.behaviour = echo
        statuses: Counter[int] = Counter()
        is_over = asyncio.Event()

        async def keep_asking() -> None:
            while not is_over.is_set():
                statuses[(await complete(site)).status_code] += 1

        load = [asyncio.ensure_future(keep_asking()) for _ in range(8)]
        await soon(first.wait_requests(50))
        first.close()  # it hands over: no new requests, and what runs may finish
        while not all(request.ended.is_set() for request in first.requests[5:]):
            await asyncio.sleep(0.01)
        proceed.set()
        await soon(first.wait_ended())
        await first.stand_by()
        await second.lead()
        await soon(second.wait_requests(50))
        is_over.set()
        await soon(asyncio.gather(*load))
        assert {(await soon(response)).json()["choices"][0]["text"] for response in running_on} == {
            "ab"
        }
        assert statuses.keys() == {200}


async def test_leader_that_dies_takes_nothing_along(tmp_path: Path) -> None:
    first, second = FakeScheduler(keeps_quiet), FakeScheduler(is_leading=False)
    async with running(tmp_path, first, second, resume_s=HANG_S) as site:
        waiting = [complete(site), complete(site, stream=True), complete(site, n=2, stream=True)]
        await soon(first.wait_requests(4))
        first.behaviour = stalls_after(*site.tokens("a"))
        begun = complete(site)
        prompt = inference_pb2.Prompt(text="x")
        streamed = site.inference.stream(inference_pb2.GenerateStreamRequest(prompt=prompt))
        assert (await soon(streamed.read())).choice.text == "a"
        await soon(first.wait_requests(6))
        while first.requests[4].n_tokens == 0:
            await asyncio.sleep(0.01)
        second.behaviour = says(*site.tokens("ab"))
        await first.stop()
        await second.lead()
        assert (await soon(begun)).json()["choices"][0]["text"] == "ab"
        assert (await soon(streamed.read())).choice.text == "b"
        for response in waiting:
            assert (await soon(response)).status_code == 200
            assert "error" not in response.result().text
        assert len(second.requests) == 6


async def test_answers_without_tokens_are_submitted_again_beside_those_with(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, hold_s=HANG_S) as site:
        failures = iter([False, True])

        async def fails_once(request: Any) -> None:
            if next(failures, False):
                await loses_pipeline_after()(request)
            else:
                await says(*site.tokens("ab"))(request)

        site.scheduler.behaviour = fails_once
        answer = await soon(complete(site, n=2, max_tokens=5))
        assert [choice["text"] for choice in answer.json()["choices"]] == ["ab", "ab"]
        assert len(site.scheduler.requests) == 3


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
        await wait_ready(site, False)
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


@pytest.mark.parametrize("drain_s", [END_S + 0.05, 1000.0], ids=["time-is-up", "second-signal"])
async def test_stopping_ends_what_does_not_finish(tmp_path: Path, drain_s: float) -> None:
    async with running(tmp_path, drain_s=drain_s) as site:
        site.scheduler.behaviour = keeps_quiet
        whole = complete(site)
        prompt = inference_pb2.Prompt(text="x")
        call = site.inference.stream(inference_pb2.GenerateStreamRequest(prompt=prompt))
        await site.scheduler.wait_requests(2)
        site.stop.set()
        await wait_ready(site, False)
        if drain_s > 2 * END_S:
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


async def test_the_time_to_linger_ends_before_the_process_must(tmp_path: Path) -> None:
    async with running(tmp_path, linger_s=1000.0, drain_s=5.1) as site:
        site.scheduler.behaviour = keeps_quiet
        waiting = complete(site)
        await soon(site.scheduler.wait_requests())
        site.stop.set()
        assert (await soon(waiting)).status_code == 503


async def test_second_signal_ends_the_time_to_linger(tmp_path: Path) -> None:
    async with running(tmp_path, linger_s=1000.0, drain_s=2000.0) as site:
        site.scheduler.behaviour = keeps_quiet
        waiting = complete(site)
        await soon(site.scheduler.wait_requests())
        site.stop.set()
        await wait_ready(site, False)
        site.scheduler.behaviour = echo
        lingering = await soon(complete(site))
        assert lingering.status_code == 200
        assert lingering.headers["connection"] == "close"
        site.stop.set()
        assert (await soon(waiting)).status_code == 503


async def probe(site_address: str, service: str) -> int:
    """Returns the status that Kubernetes' probe gets."""
    async with rpc.connect(site_address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        stub = health_pb2_grpc.HealthStub(channel)
        return int((await stub.Check(request, timeout=HANG_S)).status)


async def test_a_frontend_that_lingers_passes_the_probe_and_sends_others_away(
    tmp_path: Path,
) -> None:
    """Kubernetes sends requests to a pod that ends if it is ready and no other pod is."""
    names = health_pb2.HealthCheckResponse
    health_address = free_address()
    settings: dict[str, Any] = {"hold_s": 0.0, "health_address": health_address}
    async with running(tmp_path, linger_s=1000.0, **settings) as site:
        site.stop.set()
        await wait_health(site, names.NOT_SERVING)
        assert (await site.http.get("/ready")).status_code == 503
        assert await probe(health_address, READINESS) == names.SERVING
        assert (await soon(complete(site))).status_code == 200
        await shut(site)  # it is no more ready than other frontends without a pipeline
        async with asyncio.timeout(HANG_S):
            while await probe(health_address, READINESS) == names.SERVING:
                await asyncio.sleep(0.01)
        site.stop.set()


async def test_a_frontend_that_drains_fails_the_probe(tmp_path: Path) -> None:
    names = health_pb2.HealthCheckResponse
    health_address = free_address()
    async with running(tmp_path, drain_s=1000.0, health_address=health_address) as site:
        site.scheduler.behaviour = keeps_quiet
        waiting = complete(site)
        await soon(site.scheduler.wait_requests())
        site.stop.set()
        async with asyncio.timeout(HANG_S):
            while await probe(health_address, READINESS) == names.SERVING:
                await asyncio.sleep(0.01)
        assert not waiting.done()
        site.stop.set()
        assert (await soon(waiting)).status_code == 503


class Balancer:
    """A Service in small: sends each new connection to a place that says it is ready."""

    def __init__(self, *places: tuple[Site, str]) -> None:
        self._places = itertools.cycle(places)
        self._pumps: set[asyncio.Task[None]] = set()
        self._connections: list[asyncio.StreamWriter] = []

    async def listen(self) -> tuple[asyncio.Server, str]:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        return server, f"{host}:{port}"

    async def close(self) -> None:
        for writer in self._connections:
            writer.close()
        await asyncio.gather(*self._pumps)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = next(address for site, address in self._places if site.frontend._models.is_ready)
        host, _, port = address.rpartition(":")
        there, back = await asyncio.open_connection(host, int(port))
        self._connections += [writer, back]
        for source, sink in ((reader, back), (there, writer)):
            pump = asyncio.ensure_future(_pump(source, sink))
            self._pumps.add(pump)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
    sink.close()


@pytest.mark.thorough
async def test_rollout_of_a_frontend_fails_no_request(tmp_path: Path) -> None:
    """Clients that keep their connections, of both protocols, and some that take their time."""
    settings: dict[str, Any] = {"linger_s": 1.0, "hold_s": HANG_S}
    async with AsyncExitStack() as stack:
        sites = [await stack.enter_async_context(running(tmp_path, **settings)) for _ in range(2)]
        leaving, staying = sites

        async def answers_slowly(request: Any) -> None:
            request.accept()
            await asyncio.sleep(0.02 if len(request.submission.prompt_token_ids) < 10 else 1.5)
            await says(*staying.tokens("ab"))(request)

        for site in sites:
            site.scheduler.behaviour = answers_slowly
        web = Balancer(*((site, site.frontend.http_address) for site in sites))
        wire = Balancer(*((site, site.frontend.grpc_address) for site in sites))
        (web_server, web_address), (wire_server, wire_address) = (
            await web.listen(),
            await wire.listen(),
        )
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://{web_address}", timeout=HANG_S)
        )
        clients = [
            InferenceClient(await stack.enter_async_context(rpc.connect(wire_address, OWN)))
            for _ in range(4)
        ]
        is_over = asyncio.Event()
        outcomes: Counter[str] = Counter()

        async def ask_http(text: str) -> None:
            while not is_over.is_set():
                response = await http.post("/v1/completions", json={"prompt": text})
                outcomes[f"HTTP {response.status_code}"] += 1

        async def ask_grpc(client: InferenceClient, text: str) -> None:
            prompt = inference_pb2.Prompt(text=text)
            while not is_over.is_set():
                await client.generate(inference_pb2.GenerateRequest(prompt=prompt))
                outcomes["gRPC"] += 1

        short, long = "x", "x" * 30
        load = [asyncio.ensure_future(ask_http(text)) for text in [short] * 8 + [long] * 2]
        load += [
            asyncio.ensure_future(ask_grpc(client, text))
            for client in clients
            for text in [short] * 2 + [long]
        ]
        await soon(leaving.scheduler.wait_requests(20))
        leaving.stop.set()
        while not leaving.frontend._admission.is_stopping:
            await asyncio.sleep(0.01)
        n_requests = len(leaving.scheduler.requests)
        await soon(staying.scheduler.wait_requests(len(staying.scheduler.requests) + 50))
        assert len(leaving.scheduler.requests) == n_requests
        is_over.set()
        await soon(asyncio.gather(*load))
        assert outcomes.keys() == {"HTTP 200", "gRPC"}
        web_server.close()
        wire_server.close()
        await web.close()
        await wire.close()
