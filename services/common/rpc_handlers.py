"""gRPC handlers of a servicer, made from its descriptor, with one error boundary around them.

Handlers are built from the service's descriptor instead of the generated registration function, for
two reasons. A request that cannot be parsed becomes INVALID_ARGUMENT instead of INTERNAL. And a
method may be declared raw: a raw method takes and returns bytes without decoding them. Controllers
forward plans in this way.

A servicer's methods are named as in the proto. A method with a single request is a coroutine or an
async generator `(request, context)`. A method with a stream of requests is a coroutine `(context)`
that reads and writes through the context.

A service may restrict each method to callers with certain roles, which callers prove by their
certificates (`tls.py`). The role is checked once per call, before the method starts. A service may
also have a hook, `admit`, which checks each call's metadata. Both checks are made before a request
is received: a message that the server does not read stays with the sender, so a refused call costs
no memory. A service may name an observer, which returns a context manager for each call. The call
runs in this context manager, which sees errors before they become statuses. Finally, a service may
set time limits for receiving and sending messages (`exchange.py`).
"""

import asyncio
import contextlib
import logging
import traceback
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from services.common import errors
from services.common.exchange import Exchange

log = logging.getLogger(__name__)

CALLER_NAMES = "peer_dns"
"""gRPC's key for the DNS names in a caller's verified certificate. The key is absent in plaintext.
"""

_CODES: dict[type[errors.OrcinusError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ContextOverflow: grpc.StatusCode.INVALID_ARGUMENT,
    errors.TooLarge: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unsupported: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnknownModel: grpc.StatusCode.NOT_FOUND,
    errors.UnknownAdapter: grpc.StatusCode.NOT_FOUND,
    errors.TimedOut: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.PoolFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.StaleEpoch: grpc.StatusCode.ABORTED,
    errors.RequestFailed: grpc.StatusCode.INTERNAL,
    errors.RequestCancelled: grpc.StatusCode.CANCELLED,
}

Request = TypeVar("Request", bound=Message)

Observe = Callable[[str, Any], contextlib.AbstractContextManager[None]]
"""A function that observes calls.

Its arguments are a method's name, `orcinus.v1.XService/Method`, and the call's context; it returns
a context manager in which the call runs.
"""

MakeExchange = Callable[[Any], Exchange]
"""A function from a call's context to the object that receives and sends the call's messages."""


def service_handler(
    service: ServiceDescriptor,
    servicer: object,
    *,
    raw: Collection[str] = (),
    callers: Mapping[str, Collection[str]] | None = None,
    admit: Callable[[Any], object] | None = None,
    observe: Observe | None = None,
    exchange: MakeExchange = Exchange,
) -> grpc.GenericRpcHandler:
    """Returns the gRPC handlers of one service. Methods in `raw` take and return bytes.

    `callers` has the roles that may call each method. Without `callers` every peer may call all
    methods. `admit` is called with the context of each call, and raises an error to refuse the
    call. `observe` returns the context manager in which a call runs. `exchange` makes, for each
    call, the object that receives the request and sends the responses. It is not used for methods
    with a stream of requests: these receive and send their messages themselves.
    """
    handlers = {
        descriptor.name: _method_handler(
            descriptor,
            _Method(
                f"{service.full_name}/{descriptor.name}",
                getattr(servicer, descriptor.name),
                None if callers is None else frozenset(callers[descriptor.name]),
                admit,
                observe,
                exchange,
            ),
            is_raw=descriptor.name in raw,
        )
        for descriptor in service.methods
    }
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def parse(data: bytes, request_class: type[Request]) -> Request:
    """Parses `data` as a request, and returns it. Raises InvalidRequest if `data` is not a message
    of the class `request_class`."""
    try:
        return request_class.FromString(data)
    except DecodeError:
        name = request_class.DESCRIPTOR.name
        raise errors.InvalidRequest(
            "request", f"not a valid {name}; its strings must be UTF-8"
        ) from None


def status_of(error: BaseException | None, context: Any) -> grpc.StatusCode:
    """Returns the gRPC status with which a call ends. `error` is the error of the call's method, or
    None if there was none."""
    if error is None:
        return grpc.StatusCode.OK
    if isinstance(error, errors.OrcinusError):
        return _CODES[type(error)]
    if isinstance(error, Exception):
        return grpc.StatusCode.INTERNAL
    time_left = context.time_remaining()  # its task was cancelled, or its stream closed
    if time_left is not None and time_left <= 0:
        return grpc.StatusCode.DEADLINE_EXCEEDED
    return grpc.StatusCode.CANCELLED


@dataclass(frozen=True, slots=True)
class _Method:
    """A method of a servicer, the roles that may call the method, and the functions that are
    applied to each call of it."""

    name: str
    behaviour: Callable[..., Any]
    callers: frozenset[str] | None
    admit: Callable[[Any], object] | None
    observe: Observe | None
    exchange: MakeExchange

    def observed(self, context: Any) -> contextlib.AbstractContextManager[None]:
        """Returns the context manager in which a call must run to be observed. If the method has no
        observer, the context manager does nothing."""
        if self.observe is None:
            return contextlib.nullcontext()
        return self.observe(self.name, context)

    def check_caller(self, context: Any) -> None:
        """Raises PermissionDenied unless the caller's certificate has one of the roles that may
        call this method."""
        if self.callers is None:
            return
        names = [name.decode() for name in context.auth_context().get(CALLER_NAMES, ())]
        if self.callers.isdisjoint(names):
            caller = ", ".join(names) or "a caller without a certificate"
            raise errors.PermissionDenied(
                f"{self.name} is for {', '.join(sorted(self.callers))}, not for {caller}"
            )


def _method_handler(
    descriptor: MethodDescriptor, method: _Method, *, is_raw: bool
) -> "grpc.RpcMethodHandler[Any, Any]":
    request_class, response_class = (
        GetMessageClass(descriptor.input_type),
        GetMessageClass(descriptor.output_type),
    )
    serialise = None if is_raw else response_class.SerializeToString
    if descriptor.client_streaming:
        deserialise = None if is_raw else partial(parse, request_class=request_class)
        make = (
            grpc.stream_stream_rpc_method_handler
            if descriptor.server_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(_stream_request(method), deserialise, serialise)
    if descriptor.server_streaming:
        return grpc.stream_stream_rpc_method_handler(
            _unary_stream(method, request_class), None, serialise
        )
    return grpc.stream_unary_rpc_method_handler(
        _unary_unary(method, request_class), None, serialise
    )


def _unary_unary(method: _Method, request_class: type[Message]) -> Callable[..., Any]:
    async def handle(_requests: object, context: Any) -> Any:
        exchange = method.exchange(context)
        context.add_done_callback(exchange.close)
        async with _error_boundary(method, context):
            # In one expression: a request is not held while its answer waits for a reader.
            response = await method.behaviour(await _read(exchange, request_class), context)
            exchange.hand_over(response)
            await exchange.send_metadata()
            return response

    return handle


def _unary_stream(method: _Method, request_class: type[Message]) -> Callable[..., Any]:
    async def handle(_requests: object, context: Any) -> None:
        exchange = method.exchange(context)
        context.add_done_callback(exchange.close)
        async with (
            _error_boundary(method, context),
            # Closed here: a call may end while its method waits for the client to read.
            contextlib.aclosing(
                method.behaviour(await _read(exchange, request_class), context)
            ) as responses,
        ):
            async for response in responses:
                await exchange.write(response)

    return handle


def _stream_request(method: _Method) -> Callable[..., Any]:
    async def handle(_requests: object, context: Any) -> Any:
        async with _error_boundary(method, context):
            return await method.behaviour(context)

    return handle


@contextlib.asynccontextmanager
async def _error_boundary(method: _Method, context: Any) -> AsyncIterator[None]:
    """Refuses calls without permission, and converts errors to gRPC statuses.

    A bug is logged, and the caller learns nothing about the server's internals.
    """
    try:
        with method.observed(context):
            method.check_caller(context)
            if method.admit is not None:
                method.admit(context)
            yield
    except errors.OrcinusError as error:
        await _abort(context, error)
    except grpc.aio.AbortError:
        raise
    except Exception:
        log.exception("bug in %s", method.behaviour.__qualname__)
        await context.abort(grpc.StatusCode.INTERNAL, "internal error")


async def _read(exchange: Exchange, request_class: type[Message]) -> Message:
    """Receives the single request of a call.

    gRPC sends a single request as a stream of one message. Because the request is read as a stream,
    it is received only when the server asks for it, after the caller has been admitted.
    """
    data = await exchange.receive(request_class)
    if data is grpc.aio.EOF:
        name = request_class.DESCRIPTOR.name
        raise errors.InvalidRequest("request", f"the call has no {name}")
    return parse(data, request_class)


async def _abort(context: Any, error: errors.OrcinusError) -> NoReturn:
    # gRPC keeps the error for a while, and with it would keep the request.
    traceback.clear_frames(error.__traceback__)
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
    rich = rpc_status.to_status(status)
    metadata = (*(rich.trailing_metadata or ()), *(context.trailing_metadata() or ()))
    try:
        await context.abort_with_status(rich._replace(trailing_metadata=metadata))
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError as gone:
        # The call is over already, by its deadline or by its caller, so no status can be sent.
        raise asyncio.CancelledError from gone
    raise AssertionError("abort returned")
