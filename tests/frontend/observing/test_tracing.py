"""The spans that a frontend records of its clients' calls."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode
from orcinus.v1 import inference_pb2, scheduler_pb2

from services.common import semconv
from tests.fake_scheduler import (
    echo,
    keeps_quiet,
    loses_pipeline_after,
    rejects,
    says,
    stalls_after,
)
from tests.frontend.conftest import Site, running, soon
from tests.frontend.test_public_access import ALICE, ALICE_METADATA, key_file
from tests.limits import HANG_S
from tests.recorded_spans import (
    PARENT_ID,
    TRACE_ID,
    TRACEPARENT,
    UNSAMPLED,
    RecordedSpans,
    attributes,
    parent_id,
    span_id,
    trace_id,
)

REQUEST = "text_completion test-model"
HEADERS = {"traceparent": TRACEPARENT}


@pytest.fixture
def spans() -> RecordedSpans:
    return RecordedSpans()


@pytest_asyncio.fixture
async def site(tmp_path: Path, spans: RecordedSpans) -> AsyncIterator[Site]:
    async with running(tmp_path, traces=spans.tracing) as site:
        yield site


async def until(spans: RecordedSpans, n_spans: int) -> tuple[ReadableSpan, ...]:
    async with asyncio.timeout(HANG_S):
        while len(spans.all()) < n_spans:
            await asyncio.sleep(0.01)
    return spans.all()


async def complete(site: Site, **body: Any) -> Any:
    headers = body.pop("headers", HEADERS)
    return await site.http.post("/v1/completions", json={"prompt": "x", **body}, headers=headers)


def request_of(text: str = "x") -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(prompt=inference_pb2.Prompt(text=text))


async def test_a_completion_continues_the_trace_of_its_client(
    site: Site, spans: RecordedSpans
) -> None:
    body = {"max_tokens": 4, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "seed": 3}
    body |= {"presence_penalty": -0.5, "frequency_penalty": 1}
    answer = (await complete(site, **body)).json()
    request, server = await until(spans, 2)
    assert (server.name, server.kind) == ("POST /v1/completions", SpanKind.SERVER)
    assert (trace_id(server), parent_id(server)) == (TRACE_ID, PARENT_ID)
    assert (request.name, parent_id(request)) == (REQUEST, span_id(server))
    assert (
        attributes(server).items()
        >= {
            semconv.HTTP_METHOD: "POST",
            semconv.HTTP_ROUTE: "/v1/completions",
            semconv.HTTP_STATUS: 200,
        }.items()
    )
    seen = attributes(request)
    assert 0 < seen.pop(semconv.TIME_TO_FIRST_CHUNK) < 5  # type: ignore[operator]
    assert seen == {
        semconv.OPERATION: "text_completion",
        semconv.GEN_AI_PROVIDER: "orcinus",
        semconv.REQUEST_MODEL: "test-model",
        semconv.REQUEST_MAX_TOKENS: 4,
        semconv.REQUEST_TEMPERATURE: 0.5,
        semconv.REQUEST_TOP_K: 7,
        semconv.REQUEST_TOP_P: 0.9,
        semconv.REQUEST_PRESENCE_PENALTY: -0.5,
        semconv.REQUEST_FREQUENCY_PENALTY: 1,
        semconv.REQUEST_SEED: 3,
        semconv.RESPONSE_ID: answer["id"].removeprefix("cmpl-"),
        semconv.RESPONSE_MODEL: "test-model",
        semconv.INPUT_TOKENS: answer["usage"]["prompt_tokens"],
        semconv.OUTPUT_TOKENS: 4,
        semconv.FINISH_REASONS: ("length",),
    }
    [submitted] = site.scheduler.requests
    assert span_id(request) in submitted.submission.trace.traceparent
    assert TRACE_ID in submitted.submission.trace.traceparent


async def test_grpc_says_the_same(site: Site, spans: RecordedSpans) -> None:
    await site.inference.generate(request_of(), metadata=tuple(HEADERS.items()))
    request, server = await until(spans, 2)
    assert (server.name, server.kind) == ("orcinus.v1.InferenceService/Generate", SpanKind.SERVER)
    assert (trace_id(server), parent_id(server)) == (TRACE_ID, PARENT_ID)
    assert (request.name, parent_id(request)) == (REQUEST, span_id(server))


TWO_STATES = [("traceparent", TRACEPARENT), ("tracestate", "b=1"), ("tracestate", "a=2")]


@pytest.mark.parametrize("by", ["http", "grpc"])
async def test_states_of_two_headers_are_joined(site: Site, spans: RecordedSpans, by: str) -> None:
    if by == "http":
        await complete(site, headers=TWO_STATES)
    else:
        await site.inference.generate(request_of(), metadata=tuple(TWO_STATES))
    _, server = await until(spans, 2)
    assert trace_id(server) == TRACE_ID
    assert site.scheduler.requests[0].submission.trace.tracestate == "b=1,a=2"


async def test_two_parents_begin_a_new_trace(site: Site, spans: RecordedSpans) -> None:
    """Over gRPC the library keeps the last of them, so that a server sees only one."""
    await complete(site, headers=[("traceparent", UNSAMPLED), ("traceparent", TRACEPARENT)])
    _, server = await until(spans, 2)
    assert trace_id(server) != TRACE_ID
    assert parent_id(server) == ""


async def test_the_client_s_name_of_a_request_is_in_its_spans(
    site: Site, spans: RecordedSpans
) -> None:
    name = {"x-request-id": "client-7"}
    await complete(site, headers=HEADERS | name)
    for span in await until(spans, 2):
        assert attributes(span)[semconv.CLIENT_REQUEST_ID] == "client-7"
    await site.inference.generate(request_of(), metadata=tuple((HEADERS | name).items()))
    request = (await until(spans, 4))[2]
    assert attributes(request)[semconv.CLIENT_REQUEST_ID] == "client-7"


async def test_a_chat_is_called_so(site: Site, spans: RecordedSpans) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "max_tokens": 1, "n": 2}
    assert (await site.http.post("/v1/chat/completions", json=body)).status_code == 200
    request, _ = await until(spans, 2)
    assert request.name == "chat test-model"
    assert attributes(request)[semconv.OPERATION] == "chat"
    assert attributes(request)[semconv.REQUEST_CHOICES] == 2
    assert attributes(request)[semconv.FINISH_REASONS] == ("length", "length")
    contexts = {request.submission.trace.traceparent for request in site.scheduler.requests}
    assert len(contexts) == 1, "both answers belong to the one request"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_what_a_client_does_not_record_is_not_recorded(
    site: Site, spans: RecordedSpans, stream: bool
) -> None:
    response = await complete(site, stream=stream, headers={"traceparent": UNSAMPLED})
    assert response.status_code == 200
    assert not spans.all()
    assert not site.scheduler.requests[0].submission.HasField("trace")


async def test_strangers_do_not_choose_what_is_recorded(tmp_path: Path) -> None:
    spans = RecordedSpans(ALWAYS_OFF)
    keys = key_file(tmp_path)
    async with running(tmp_path, traces=spans.tracing, api_keys_file=keys) as site:
        for path in ("/v1/completions", "/nowhere"):
            assert (await site.http.post(path, headers=HEADERS)).is_client_error
        with pytest.raises(grpc.aio.AioRpcError):
            await site.inference.generate(request_of(), metadata=tuple(HEADERS.items()))
        assert not spans.all()
        anthropics = {"x-api-key": ALICE["authorization"].removeprefix("Bearer ")}
        for shown in (ALICE, anthropics):
            assert (await complete(site, headers={**HEADERS, **shown})).status_code == 200
        await site.inference.generate(request_of(), metadata=(*HEADERS.items(), *ALICE_METADATA))
        assert len(await until(spans, 6)) == 6


async def test_the_sampler_decides_where_no_client_has(tmp_path: Path) -> None:
    spans = RecordedSpans(ALWAYS_OFF)
    async with running(tmp_path, traces=spans.tracing) as site:
        assert (await complete(site, headers={})).status_code == 200
        assert not spans.all()
        assert (await complete(site)).status_code == 200
        assert spans.names() == [REQUEST, "POST /v1/completions"]


async def test_probes_and_unknown_paths(site: Site, spans: RecordedSpans) -> None:
    await site.http.get("/health")
    await site.http.get("/ready")
    await site.http.get("/v1/models/test-model")
    await site.http.request("BREW", "/coffee/1")
    assert [name for name in spans.names() if name != "HTTP"] == ["GET /v1/models/{model:path}"]


async def test_a_stream_lasts_until_its_last_event(site: Site, spans: RecordedSpans) -> None:
    site.scheduler.behaviour = stalls_after(*site.tokens("ab"))
    async with site.http.stream(
        "POST", "/v1/completions", json={"prompt": "x", "stream": True}, headers=HEADERS
    ) as response:
        lines = response.aiter_lines()
        await soon(anext(lines))
        assert not spans.all()
    request, server = await until(spans, 2)
    assert semconv.OUTPUT_TOKENS in attributes(request)
    assert [span.status.status_code for span in (request, server)] == [StatusCode.UNSET] * 2


async def test_a_client_that_goes_away_is_no_error(site: Site, spans: RecordedSpans) -> None:
    site.scheduler.behaviour = keeps_quiet
    asking = asyncio.ensure_future(complete(site))
    await soon(site.scheduler.wait_requests())
    asking.cancel()
    spans_seen = await until(spans, 2)
    assert [span.status.status_code for span in spans_seen] == [StatusCode.UNSET] * 2


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"min_tokens": 9, "max_tokens": 5}, 400, "InvalidRequest"),
        ({"seed": 2**80}, 400, None),
        ({"model": "other"}, 404, "UnknownModel"),
    ],
    ids=["a rule", "not a number that fits", "another model"],
)
async def test_a_mistake_of_the_client_is_no_error(
    site: Site, spans: RecordedSpans, body: dict[str, Any], status: int, reason: str | None
) -> None:
    assert (await complete(site, **body)).status_code == status
    *requests, server = spans.all()
    assert attributes(server)[semconv.HTTP_STATUS] == status
    for span in spans.all():
        assert span.status.status_code is StatusCode.UNSET
    if reason is not None:
        [request] = requests
        [event] = request.events
        assert (event.name, dict(event.attributes or {})) == ("refused", {semconv.REASON: reason})
        assert "other" not in request.name, "clients make names up"


async def test_a_full_pool_is_no_error_and_a_lost_pipeline_is_one(
    site: Site, spans: RecordedSpans
) -> None:
    site.scheduler.behaviour = rejects(scheduler_pb2.REJECTION_REASON_POOL_FULL)
    assert (await complete(site)).status_code == 429
    request, _ = spans.all()
    assert request.status.status_code is StatusCode.UNSET
    spans.clear()
    site.scheduler.behaviour = loses_pipeline_after(*site.tokens("a"))
    assert (await complete(site)).status_code == 503
    request, server = spans.all()
    for span, error in ((request, "Unavailable"), (server, "503")):
        assert span.status.status_code is StatusCode.ERROR
        assert attributes(span)[semconv.ERROR_TYPE] == error


async def test_an_error_in_a_stream_is_the_request_s(site: Site, spans: RecordedSpans) -> None:
    site.scheduler.behaviour = loses_pipeline_after(*site.tokens("ab"))
    stream = inference_pb2.GenerateStreamRequest(prompt=inference_pb2.Prompt(text="x"))
    with pytest.raises(grpc.aio.AioRpcError):
        async for _ in site.inference.stream(stream):
            pass
    request, server = await until(spans, 2)
    assert attributes(request)[semconv.ERROR_TYPE] == "Unavailable"
    assert attributes(server)[semconv.RPC_STATUS] == "UNAVAILABLE"


async def test_what_is_sent_again_keeps_its_trace(tmp_path: Path, spans: RecordedSpans) -> None:
    async with running(tmp_path, traces=spans.tracing, hold_s=5.0) as site:
        site.scheduler.behaviour = keeps_quiet
        asking = asyncio.ensure_future(complete(site))
        await soon(site.scheduler.wait_requests())
        site.scheduler.behaviour = says(*site.tokens("a"))
        site.scheduler.drop_connections()
        assert (await soon(asking)).status_code == 200
        first, second = site.scheduler.requests
        assert second.submission.is_resubmitted
        second.submission.ClearField("is_resubmitted")
        assert first.submission == second.submission
        request = spans.one(REQUEST)
        assert span_id(request) in second.submission.trace.traceparent
        events = [(event.name, dict(event.attributes or {})) for event in request.events]
        assert [name for name, _ in events] == ["held", "resubmitted"]
        assert events[0][1][semconv.REASON] == events[1][1][semconv.REASON]
        assert request.status.status_code is StatusCode.UNSET


async def test_resumed_stream_is_told_by_its_span(tmp_path: Path, spans: RecordedSpans) -> None:
    request_id = "6921f3aa" + "0" * 24
    async with running(tmp_path, traces=spans.tracing) as site:
        site.scheduler.behaviour = says(*site.tokens("abc"))
        body = {
            "prompt": "x",
            "max_tokens": 3,
            "stream": True,
            "return_token_ids": True,
            "resumption": {"seed": 5, "token_ids": [site.tokens("ab")]},
        }
        headers = {"Last-Event-ID": f"{request_id}:2"}
        response = await site.http.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == 200
        span = attributes(spans.one(REQUEST))
    assert span[semconv.RESPONSE_ID] == request_id
    assert span[semconv.REQUEST_SEED] == 5
    assert span[semconv.RESUMED_TOKENS] == 2
    assert span[semconv.OUTPUT_TOKENS] == 3


async def test_without_traces_nothing_is_made_of_a_client_s_context(tmp_path: Path) -> None:
    async with running(tmp_path) as site:
        site.scheduler.behaviour = echo
        assert (await complete(site)).status_code == 200
        assert not site.scheduler.requests[0].submission.HasField("trace")
