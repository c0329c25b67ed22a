"""Spans of calls, whatever kind of method they go to and however they end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from opentelemetry.trace import SpanKind, StatusCode
from orcinus.v1 import inference_pb2, scheduler_pb2

from services.common import errors, rpc, rpc_handlers, semconv
from services.common.rpc_tracing import server_spans
from services.common.tracing import current_ids
from tests.common.test_rpc import SERVICE, TREE, Servicer
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

SCHEDULER = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]
PARENT = (("traceparent", TRACEPARENT),)


@contextlib.asynccontextmanager
async def served(
    servicer: object, spans: RecordedSpans, service: Any = SERVICE
) -> AsyncIterator[grpc.aio.Channel]:
    server = rpc.create_server()
    observe = server_spans(spans.tracing, is_known=lambda _: True)
    handler = rpc_handlers.service_handler(service, servicer, observe=observe)
    server.add_generic_rpc_handlers((handler,))
    address = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    async with rpc.connect(address) as channel:
        yield channel
    await server.stop(grace=0)


async def until(spans: RecordedSpans, n_spans: int = 1) -> None:
    async with asyncio.timeout(HANG_S):
        while len(spans.all()) < n_spans:
            await asyncio.sleep(0.01)


def unary(channel: grpc.aio.Channel, method: str, **call: Any) -> Any:
    call_method: Any = channel.unary_unary(rpc.method_path(SERVICE, method))
    return call_method(b"", **call)


def stream(channel: grpc.aio.Channel) -> Any:
    call_method: Any = channel.unary_stream(rpc.method_path(SERVICE, "GenerateStream"))
    return call_method(b"")


async def test_a_call_continues_the_trace_of_its_client() -> None:
    spans = RecordedSpans()
    async with served(Servicer(), spans) as channel:
        await unary(channel, "Generate", metadata=PARENT)
    [span] = spans.all()
    assert span.name == "orcinus.v1.InferenceService/Generate"
    assert span.kind is SpanKind.SERVER
    assert (trace_id(span), parent_id(span)) == (TRACE_ID, PARENT_ID)
    assert span.status.status_code is StatusCode.UNSET
    assert attributes(span) == {
        semconv.RPC_SYSTEM: "grpc",
        semconv.RPC_METHOD: "orcinus.v1.InferenceService/Generate",
        semconv.RPC_STATUS: "OK",
    }


async def test_a_client_that_does_not_record_is_not_recorded() -> None:
    spans = RecordedSpans()
    async with served(Servicer(), spans) as channel:
        await unary(channel, "Generate", metadata=(("traceparent", UNSAMPLED),))
        await unary(channel, "Generate", metadata=(("traceparent", "nonsense"),))
    [span] = spans.all()
    assert parent_id(span) == ""


@pytest.mark.parametrize(("error", "code"), TREE, ids=lambda x: getattr(x, "name", ""))
async def test_only_errors_of_the_server_are_errors(
    error: Exception, code: grpc.StatusCode
) -> None:
    spans = RecordedSpans()
    async with served(Servicer(error), spans) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await unary(channel, "Generate")
    [span] = spans.all()
    is_ours = isinstance(error, errors.Unavailable | errors.RequestFailed | ZeroDivisionError)
    assert attributes(span)[semconv.RPC_STATUS] == code.name
    assert attributes(span).get(semconv.ERROR_TYPE) == (code.name if is_ours else None)
    assert (span.status.status_code is StatusCode.ERROR) is is_ours
    assert not span.events


async def test_an_error_in_a_stream_is_seen() -> None:
    spans = RecordedSpans()
    async with served(Servicer(errors.Unavailable("gone")), spans) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in stream(channel):
                pass
    assert attributes(spans.all()[0])[semconv.RPC_STATUS] == "UNAVAILABLE"


class Slow(Servicer):
    """Never ends by itself."""

    async def Generate(self, request: Any, context: Any) -> Any:
        await asyncio.sleep(60)

    async def GenerateStream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        while True:
            yield inference_pb2.GenerateStreamResponse(model="x")
            await asyncio.sleep(0)


async def test_a_deadline_is_an_error_and_a_cancellation_is_none() -> None:
    spans = RecordedSpans()
    async with served(Slow(), spans) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await unary(channel, "Generate", timeout=0.2)
        await until(spans, 1)
        call = unary(channel, "Generate")
        await asyncio.sleep(0.2)
        call.cancel()
        await until(spans, 2)
    late, gone = spans.all()
    assert attributes(late)[semconv.RPC_STATUS] == "DEADLINE_EXCEEDED"
    assert late.status.status_code is StatusCode.ERROR
    assert attributes(gone)[semconv.RPC_STATUS] == "CANCELLED"
    assert gone.status.status_code is StatusCode.UNSET


async def test_a_stream_whose_client_stops_reading_and_leaves_ends_its_span(
    caplog: pytest.LogCaptureFixture,
) -> None:
    spans = RecordedSpans()
    async with served(Slow(), spans) as channel:
        call = stream(channel)
        await call.read()
        await asyncio.sleep(0.5)  # until the server waits for us to read
        call.cancel()
        await until(spans)
    assert attributes(spans.all()[0])[semconv.RPC_STATUS] == "CANCELLED"
    assert "detach" not in caplog.text


class Conversation:
    """A servicer that reads and writes through the context."""

    def __init__(self) -> None:
        self.ids: list[tuple[str, str] | None] = []

    async def Connect(self, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            self.ids.append(current_ids())
            await context.write(scheduler_pb2.ConnectResponse(is_closed=message.HasField("action")))


async def test_a_conversation_has_one_span_which_is_current_in_it() -> None:
    spans, servicer = RecordedSpans(), Conversation()
    async with served(servicer, spans, SCHEDULER) as channel:
        call: Any = channel.stream_stream(rpc.method_path(SCHEDULER, "Connect"))(metadata=PARENT)
        for _ in range(3):
            await call.write(b"")
            await call.read()
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        await until(spans)
    [span] = spans.all()
    assert span.name == "orcinus.v1.SchedulerService/Connect"
    assert servicer.ids == [(trace_id(span), span_id(span))] * 3
