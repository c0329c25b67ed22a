"""The state of a stream over gRPC that may come over several connections; the module makes no
connections.

Messages are of the classes that the caller has generated from `inference.proto`, so this package
has none of its own. As over HTTP, a stream that shows tokens can be resumed at any frontend: the
request is sent again together with the name, the seed and the tokens that have come.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from orcinus_client.attempts import Attempts, Retry
from orcinus_client.errors import (
    ApiError,
    ClientError,
    ConnectionLost,
    InvalidRequest,
    Overloaded,
    PermissionDenied,
    RequestFailed,
    TimedOut,
    Unauthenticated,
    Unavailable,
)
from orcinus_client.request import trace_headers

CHANNEL_OPTIONS = (("grpc.keepalive_time_ms", 30_000), ("grpc.keepalive_timeout_ms", 60_000))
"""Options of a channel that notices within 90 s that a frontend's host is silent. Without them a
stream whose frontend is gone may be waited for without end."""

DETAILS = "grpc-status-details-bin"
"""Key of the metadata with which a server explains an error."""

CODES: dict[grpc.StatusCode, type[ApiError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.ABORTED: Unavailable,
}


class GrpcStream:
    """The received part of a stream, as far as it is needed to resume the stream."""

    def __init__(self, request: Any) -> None:
        self._request = type(request)()
        self._request.CopyFrom(request)
        self._request.options.return_token_ids = True
        self._so_far = type(request.resumption)()
        self.is_done = False

    def begin(self) -> Any:
        """Begins another connection; returns the request for it."""
        if self._so_far.request_id:
            options = self._request.options
            n = options.n if options.HasField("n") else 1
            self._answer(n * (len(self._request.prompts) or 1) - 1)  # those without a token, too
            self._request.resumption.CopyFrom(self._so_far)
        return self._request

    def take(self, response: Any) -> None:
        """Notes a message of the stream."""
        self._so_far.request_id = response.request_id
        if response.HasField("seed"):
            self._so_far.seed = response.seed
        if response.HasField("choice"):
            answer = self._answer(response.choice.index)
            answer.token_ids.extend(response.choice.token_ids)
            answer.is_finished = answer.is_finished or bool(response.choice.finish_reason)
        self.is_done = response.HasField("usage")

    def _answer(self, index: int) -> Any:
        answers = self._so_far.answers
        while len(answers) <= index:
            answers.add()
        return answers[index]


class GrpcCall:
    """A call of `GenerateStream`, over one connection after another."""

    def __init__(
        self,
        request: Any,
        stubs: Sequence[Any],
        *,
        api_key: str | None,
        retry: Retry | None,
        timeout_s: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stubs` has one stub of the service for each frontend."""
        if not stubs:
            raise ValueError("a stream needs a stub of InferenceService")
        self._stream = GrpcStream(request)
        self._attempts = Attempts(stubs, retry or Retry())
        self._api_key = api_key
        self._clock = clock
        self._ends_at = None if timeout_s is None else clock() + timeout_s

    @property
    def is_done(self) -> bool:
        """Whether the stream is complete."""
        return self._stream.is_done

    def begin(self) -> Any:
        """Begins another connection; returns the stream of the stub's method."""
        metadata = list(trace_headers().items())
        if self._api_key is not None:
            metadata.append(("authorization", f"Bearer {self._api_key}"))
        left_s = None if self._ends_at is None else max(0.0, self._ends_at - self._clock())
        method = self._attempts.frontend.GenerateStream
        return method(self._stream.begin(), metadata=metadata, timeout=left_s)

    def take(self, response: Any) -> None:
        """Notes a message of the stream."""
        self._stream.take(response)
        self._attempts.note_success()

    def end(self) -> None:
        """Notes that the connection has ended; raises ConnectionLost if the stream is not
        complete."""
        if not self.is_done:
            raise ConnectionLost("the stream ended without its last message")

    def fail(self, error: ClientError) -> float:
        """Notes that the connection has failed; returns the seconds to wait before the next
        connection.

        Raises:
            ClientError: `error`, if another connection cannot continue the stream.
        """
        return self._attempts.fail(error)


def error_of(error: grpc.RpcError) -> ClientError:
    """Returns the error of this package for an error of gRPC."""
    code, text = error.code(), f"{error.code().name}: {error.details()}"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return TimedOut(text)
    if code is grpc.StatusCode.UNKNOWN:  # what some versions call a connection that broke
        return ConnectionLost(text)
    field, retry_after_s = _details(error)
    return CODES.get(code, RequestFailed)(
        text, code=code.name, field=field, retry_after_s=retry_after_s
    )


def _details(error: grpc.RpcError) -> tuple[str | None, float | None]:
    """Returns the field that an error names and the seconds after which to try again."""
    field, retry_after_s = None, None
    metadata: Any = error.trailing_metadata()
    for key, value in metadata or ():
        if key != DETAILS:
            continue
        for detail in status_pb2.Status.FromString(value).details:
            wrong, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
            if detail.Unpack(wrong) and wrong.field_violations:
                field = wrong.field_violations[0].field
            if detail.Unpack(retry):
                retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
    return field, retry_after_s
