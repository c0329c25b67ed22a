"""gRPC as all services use it: one set of limits, handlers made from descriptors, one error
boundary.

Handlers are built from the service's descriptor instead of the generated registration function,
for two reasons. A request that cannot be parsed becomes INVALID_ARGUMENT instead of INTERNAL. And
a method may be declared raw: it then moves bytes without decoding them, which is how controllers
pass plans on.

A servicer's methods are named as in the proto. Those with a single request are `(request,
context)`, coroutines or async generators; those with a stream of requests are coroutines
`(context)` that read and write through the context.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from services.common import errors

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 2**20
"""Largest message either side takes. What a client may send is limited, much lower, by its
handler."""

KEEPALIVE_S = 30

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    *CHANNEL_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_S * 1000 // 2),
    ("grpc.so_reuseport", 0),
]

EPOCH_METADATA = "orcinus-epoch"

_CODES: dict[type[errors.OrcinusError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.PoolFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.StaleEpoch: grpc.StatusCode.ABORTED,
    errors.RequestCancelled: grpc.StatusCode.CANCELLED,
}


def connect(address: str) -> grpc.aio.Channel:
    """A channel to `host:port` with the limits of this project."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def create_server() -> grpc.aio.Server:
    """A server with the limits of this project and nothing on it yet."""
    return grpc.aio.server(options=SERVER_OPTIONS)


def bind(server: grpc.aio.Server, address: str) -> str:
    """Binds `host:port` (port 0 takes a free one) and returns the address clients can use.

    Raises:
        OSError: the address is taken or is not one of this machine's.
    """
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from error
    return f"{address.rpartition(':')[0]}:{port}"


def service_handler(
    service: ServiceDescriptor, servicer: object, *, raw: Collection[str] = ()
) -> grpc.GenericRpcHandler:
    """The handlers of one service; methods in `raw` take and give bytes."""
    handlers = {
        method.name: _method_handler(
            method, getattr(servicer, method.name), is_raw=method.name in raw
        )
        for method in service.methods
    }
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def method_path(service: ServiceDescriptor, method: str) -> str:
    """The name of a method on the wire, for calls that send bytes."""
    return f"/{service.full_name}/{method}"


def epoch_metadata(epoch: int) -> tuple[tuple[str, str], ...]:
    """Metadata that places a stream in an epoch."""
    return ((EPOCH_METADATA, str(epoch)),)


def epoch_of(context: Any) -> int:
    """The epoch that a stream names in its metadata.

    Raises:
        InvalidRequest: there is none, or it is not a number.
    """
    for key, value in context.invocation_metadata() or ():
        if key == EPOCH_METADATA and str(value).isdecimal():
            return int(value)
    raise errors.InvalidRequest(EPOCH_METADATA, "metadata must name an epoch")


def _method_handler(
    method: MethodDescriptor, behaviour: Callable[..., Any], *, is_raw: bool
) -> "grpc.RpcMethodHandler[Any, Any]":
    request_class, response_class = (
        GetMessageClass(method.input_type),
        GetMessageClass(method.output_type),
    )
    serialise = None if is_raw else response_class.SerializeToString
    if method.client_streaming:
        deserialise = None if is_raw else request_class.FromString
        make = (
            grpc.stream_stream_rpc_method_handler
            if method.server_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(_stream_request(behaviour), deserialise, serialise)
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(
            _unary_stream(behaviour, request_class), None, serialise
        )
    return grpc.unary_unary_rpc_method_handler(
        _unary_unary(behaviour, request_class), None, serialise
    )


def _unary_unary(behaviour: Callable[..., Any], request_class: type[Message]) -> Callable[..., Any]:
    async def handle(data: bytes, context: Any) -> Any:
        async with _error_boundary(behaviour, context):
            return await behaviour(_parse(data, request_class), context)

    return handle


def _unary_stream(
    behaviour: Callable[..., Any], request_class: type[Message]
) -> Callable[..., AsyncIterator[Any]]:
    async def handle(data: bytes, context: Any) -> AsyncIterator[Any]:
        async with _error_boundary(behaviour, context):
            async for response in behaviour(_parse(data, request_class), context):
                yield response

    return handle


def _stream_request(behaviour: Callable[..., Any]) -> Callable[..., Any]:
    async def handle(_requests: object, context: Any) -> Any:
        async with _error_boundary(behaviour, context):
            return await behaviour(context)

    return handle


@contextlib.asynccontextmanager
async def _error_boundary(behaviour: Callable[..., Any], context: Any) -> AsyncIterator[None]:
    """Where errors become statuses. A bug is logged and tells the caller nothing of our insides."""
    try:
        yield
    except errors.OrcinusError as error:
        await _abort(context, error)
    except grpc.aio.AbortError:
        raise
    except Exception:
        log.exception("bug in %s", behaviour.__qualname__)
        await context.abort(grpc.StatusCode.INTERNAL, "internal error")


def _parse(data: bytes, request_class: type[Message]) -> Message:
    try:
        return request_class.FromString(data)
    except DecodeError:
        name = request_class.DESCRIPTOR.name
        raise errors.InvalidRequest(
            "request", f"not a valid {name}; its strings must be UTF-8"
        ) from None


async def _abort(context: Any, error: errors.OrcinusError) -> NoReturn:
    code = _CODES[type(error)]
    status = status_pb2.Status(code=code_pb2.Code.Value(code.name), message=error.message)
    if isinstance(error, errors.InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.message
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, errors.PoolFull):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        status.details.add().Pack(retry)
    try:
        await context.abort_with_status(rpc_status.to_status(status))
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError as gone:
        # The call is over already, by its deadline or its caller: there is nobody to tell.
        raise asyncio.CancelledError from gone
    raise AssertionError("abort returned")
