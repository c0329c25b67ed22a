"""Calls of RPCs with the bytes of their messages, and how they end."""

from collections.abc import Iterator
from typing import NamedTuple

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from tests.fuzz import hints, messages
from tests.fuzz.choices import Choices
from tests.fuzz.hints import Metadata
from tests.fuzz.messages import Hints
from tests.limits import HANG_S

FOREVER_S = 0.05
"""Deadline of calls that nothing but their caller ends."""

BUGS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}
"""Statuses with which no call may end, whatever it sends."""


class Call(NamedTuple):
    """A call with the bytes of its messages, one unless its requests are a stream."""

    method: MethodDescriptor
    requests: list[bytes]
    metadata: Metadata

    def __repr__(self) -> str:
        return f"{self.method.full_name} {self.requests} {self.metadata}"


def call_of(choices: Choices, method: MethodDescriptor, known: Hints, *, n_most: int = 5) -> Call:
    """Returns a call of a method, with at most so many messages if it takes a stream of them."""

    def request() -> bytes:
        return messages.wire(choices, method.input_type, known)

    n_more = n_most - 1 if method.client_streaming else 0
    return Call(method, [request(), *choices.several(n_more, request)], hints.metadata(choices))


def answer_of(channel: grpc.Channel, call: Call, *, is_endless: bool = False) -> grpc.StatusCode:
    """Makes a call, reads all that comes, and returns how it ended; a call that is not endless
    must end by itself."""
    method = call.method
    stub: grpc.StreamStreamMultiCallable[bytes, bytes]
    stub = channel.stream_stream(f"/{method.containing_service.full_name}/{method.name}")
    answers: Iterator[bytes] = stub(
        iter(call.requests),
        timeout=FOREVER_S if is_endless else HANG_S,
        metadata=tuple(call.metadata),
    )
    code: grpc.StatusCode = grpc.StatusCode.OK
    try:
        for answer in answers:
            GetMessageClass(method.output_type).FromString(answer)
    except grpc.RpcError as error:
        code = error.code()
    assert is_endless or code is not grpc.StatusCode.DEADLINE_EXCEEDED, "it hangs"
    return code
