"""The error boundary of gRPC, and what a servicer's methods look like to a client."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from orcinus.v1 import inference_pb2, inference_pb2_grpc, scheduler_pb2

from services.common import errors, rpc, rpc_handlers
from services.common.address import parse
from tests.environments import NOWHERE, PROXIES
from tests.frontend.scheduler_process import hurried, scheduler_process
from tests.limits import HANG_S

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
TREE = [
    (errors.InvalidRequest("n", "must be 1"), grpc.StatusCode.INVALID_ARGUMENT),
    (errors.Unauthenticated("who?"), grpc.StatusCode.UNAUTHENTICATED),
    (errors.PermissionDenied("not you"), grpc.StatusCode.PERMISSION_DENIED),
    (errors.PoolFull("full", retry_after_s=1.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.Unavailable("gone"), grpc.StatusCode.UNAVAILABLE),
    (errors.StaleEpoch("old"), grpc.StatusCode.ABORTED),
    (errors.RequestFailed("ends the pipeline"), grpc.StatusCode.INTERNAL),
    (errors.RequestCancelled("no"), grpc.StatusCode.CANCELLED),
    (ZeroDivisionError("a bug"), grpc.StatusCode.INTERNAL),
]


class Servicer:
    """Raises what a test tells it to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def Generate(self, request: Any, context: Any) -> inference_pb2.GenerateResponse:
        if self.error is not None:
            raise self.error
        return inference_pb2.GenerateResponse(model=request.model)

    async def GenerateStream(
        self, request: Any, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateStreamResponse]:
        yield inference_pb2.GenerateStreamResponse(model=request.model)
        if self.error is not None:
            raise self.error

    async def Tokenize(self, request: Any, context: Any) -> inference_pb2.TokenizeResponse:
        return inference_pb2.TokenizeResponse()

    async def Detokenize(self, request: Any, context: Any) -> inference_pb2.DetokenizeResponse:
        return inference_pb2.DetokenizeResponse()

    async def Embed(self, request: Any, context: Any) -> inference_pb2.EmbedResponse:
        return inference_pb2.EmbedResponse()

    async def Score(self, request: Any, context: Any) -> inference_pb2.ScoreResponse:
        return inference_pb2.ScoreResponse()

    async def DescribeModel(self, request: Any, context: Any) -> Any:
        return inference_pb2.DescribeModelResponse()


@contextlib.asynccontextmanager
async def served(
    servicer: Servicer, options: rpc.Options = (), **handler: Any
) -> AsyncIterator[grpc.aio.Channel]:
    server = rpc.create_server(options)
    server.add_generic_rpc_handlers((rpc_handlers.service_handler(SERVICE, servicer, **handler),))
    address = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    async with rpc.connect(address) as channel:
        yield channel
    await server.stop(grace=0)


@pytest.mark.parametrize("variable", ["grpc_proxy", "https_proxy", "http_proxy"])
async def test_a_channel_goes_through_no_proxy(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, NOWHERE)
    async with served(Servicer()) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        assert (await stub.Generate(inference_pb2.GenerateRequest(model="m"))).model == "m"


@pytest.mark.parametrize(
    ("address", "hosts"),
    [
        ("[::]:0", ["127.0.0.1", "::1"]),
        ("0.0.0.0:0", ["127.0.0.1", "::1"]),
        ("localhost:0", ["127.0.0.1", "::1"]),
        ("127.0.0.1:0", ["127.0.0.1"]),
        ("[::1]:0", ["::1"]),
    ],
)
async def test_a_server_listens_at_all_addresses_that_its_host_stands_for(
    address: str, hosts: list[str]
) -> None:
    server = rpc.create_server()
    bound = parse(rpc.bind(server, address))
    assert bound.host == parse(address).host
    await server.start()
    reached = []
    for host in ("127.0.0.1", "::1"):
        with contextlib.suppress(ConnectionRefusedError):
            _, writer = await asyncio.open_connection(host, bound.port)
            writer.close()
            reached.append(host)
    await server.stop(grace=0)
    assert reached == hosts


async def test_an_address_that_is_taken_is_named() -> None:
    server = rpc.create_server()
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        address = f"localhost:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match=f"cannot listen on {address}"):
            rpc.bind(server, address)
    await server.stop(grace=0)


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


@pytest.mark.parametrize(("error", "code"), TREE, ids=lambda value: getattr(value, "name", ""))
async def test_each_error_has_its_status_on_unary_calls_and_streams(
    error: Exception, code: grpc.StatusCode
) -> None:
    async with served(Servicer(error)) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        caught = await failure(stub.Generate(inference_pb2.GenerateRequest()))
        assert caught.code() is code
        stream = stub.GenerateStream(inference_pb2.GenerateStreamRequest(model="m"))
        assert (await stream.read()).model == "m"
        assert (await failure(stream.read())).code() is code
    expected = error.message if isinstance(error, errors.OrcinusError) else "internal error"
    assert caught.details() == expected, "a bug tells clients nothing of our insides"


def test_every_error_of_the_tree_has_a_status() -> None:
    tree = {
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.OrcinusError)
    }
    assert set(rpc_handlers._CODES) == tree - {errors.OrcinusError}


async def test_details_name_the_field_and_the_delay() -> None:
    async with served(Servicer(errors.InvalidRequest("max_tokens", "is negative"))) as channel:
        status = rpc_status.from_call(await _generate(channel, b""))
        violation = error_details_pb2.BadRequest()
        assert status.details[0].Unpack(violation)
        assert violation.field_violations[0].field == "max_tokens"
    async with served(Servicer(errors.PoolFull("full", retry_after_s=1.5))) as channel:
        status = rpc_status.from_call(await _generate(channel, b""))
        retry = error_details_pb2.RetryInfo()
        assert status.details[0].Unpack(retry)
        assert retry.retry_delay.ToMilliseconds() == 1500


@pytest.mark.parametrize("data", [b"\xff\xff", b"\x0a\x02\xc3\x28"], ids=["garbage", "bad UTF-8"])
async def test_a_request_that_cannot_be_parsed_is_the_clients_mistake(data: bytes) -> None:
    async with served(Servicer()) as channel:
        error = await _generate(channel, data)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "GenerateRequest" in (error.details() or "")


NOBODY = {method.name: {"nobody"} for method in SERVICE.methods}


def refuse(context: Any) -> None:
    raise errors.Unauthenticated("who?")


@pytest.mark.parametrize(
    ("handler", "code"),
    [
        ({"admit": refuse}, grpc.StatusCode.UNAUTHENTICATED),
        ({"callers": NOBODY}, grpc.StatusCode.PERMISSION_DENIED),
        ({"callers": NOBODY, "admit": refuse}, grpc.StatusCode.PERMISSION_DENIED),
    ],
    ids=["hook", "role", "role first"],
)
@pytest.mark.parametrize("method", [method.name for method in SERVICE.methods])
async def test_a_caller_is_refused_before_his_request_is_received(
    method: str, handler: dict[str, Any], code: grpc.StatusCode
) -> None:
    async with served(Servicer(), **handler) as channel:
        # On the wire a single request is a stream of one; here nothing of it is ever sent.
        call: Any = channel.stream_stream(rpc.method_path(SERVICE, method))()
        error = await asyncio.wait_for(failure(call.read()), HANG_S)
        assert error.code() is code
        call = channel.unary_unary(rpc.method_path(SERVICE, method))
        error = await asyncio.wait_for(failure(call(b"\xff")), HANG_S)
        assert error.code() is code, "what he sends is not looked at"


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_a_call_without_a_request_is_the_clients_mistake(method: str) -> None:
    async with served(Servicer()) as channel:
        call: Any = channel.stream_stream(rpc.method_path(SERVICE, method))()
        await call.done_writing()
        error = await asyncio.wait_for(failure(call.read()), HANG_S)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details() == f"request: the call has no {method}Request"


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns what was logged, but for what gRPC's poller says of the loop of a test before."""
    return [text for text in caplog.messages if "PollerCompletionQueue" not in text]


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
@pytest.mark.parametrize("how", ["cancelled", "deadline"])
async def test_a_call_that_ends_before_its_request_leaves_nothing(
    method: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    has_come, has_gone = asyncio.Event(), asyncio.Event()

    def watch(context: Any) -> None:
        context.add_done_callback(lambda _: has_gone.set())
        has_come.set()

    async with served(Servicer(), admit=watch) as channel:
        timeout = 0.3 if how == "deadline" else None
        call: Any = channel.stream_stream(rpc.method_path(SERVICE, method))(timeout=timeout)
        async with asyncio.timeout(HANG_S):
            await has_come.wait()
            if how == "cancelled":
                call.cancel()
            await has_gone.wait()
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        assert (await stub.Generate(inference_pb2.GenerateRequest(model="m"))).model == "m"
    assert not complaints(caplog)


async def test_options_of_a_server_override_the_limits_of_the_project(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served(Servicer(), [("grpc.max_receive_message_length", 1000)]) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        caught = await failure(stub.Generate(inference_pb2.GenerateRequest(model="m" * 1000)))
        assert caught.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await stub.Generate(inference_pb2.GenerateRequest(model="m" * 900))
    assert not complaints(caplog)


async def test_a_peer_that_stands_still_is_noticed() -> None:
    scheduler = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]
    async with (
        scheduler_process() as (process, address),
        rpc.connect(address, hurried(rpc.CHANNEL_OPTIONS)) as channel,
    ):
        call: Any = channel.stream_stream(rpc.method_path(scheduler, "Connect"))()
        assert await asyncio.wait_for(call.read(), HANG_S)
        process.send_signal(signal.SIGSTOP)
        error = await asyncio.wait_for(
            failure(call.read()), HANG_S
        )  # 0.25 s to ping, 0.2 s to wait
        assert error.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.thorough
async def test_the_pings_of_a_quiet_channel_are_welcome_and_a_stop_is_noticed_in_ten_seconds() -> (
    None
):
    scheduler = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]
    async with scheduler_process() as (process, address), rpc.connect(address) as channel:
        call: Any = channel.stream_stream(rpc.method_path(scheduler, "Connect"))()
        assert await asyncio.wait_for(call.read(), HANG_S)
        reading = asyncio.ensure_future(failure(call.read()))
        done, _ = await asyncio.wait([reading], timeout=6 * rpc.KEEPALIVE_S)
        assert not done, "the server took its pings for too many"
        process.send_signal(signal.SIGSTOP)
        error = await asyncio.wait_for(reading, HANG_S)
        assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_an_address_in_use_is_an_os_error() -> None:
    first, second = rpc.create_server(), rpc.create_server()
    address = rpc.bind(first, "127.0.0.1:0")
    await first.start()
    with pytest.raises(OSError, match=address):
        rpc.bind(second, address)
    await first.stop(grace=0)


async def _generate(channel: grpc.aio.Channel, data: bytes) -> Any:
    call: Any = channel.unary_unary(rpc.method_path(SERVICE, "Generate"))
    return await asyncio.wait_for(failure(call(data)), HANG_S)
