"""gRPC's reflection service, by which tools discover the API, with limits on its use.

The servicer of the library `grpcio-reflection` does not limit the number of streams, the size of
requests or the time of a stream. The library has only the version `v1alpha`. The messages of the
version `v1` are in another package, but have the same fields and the same bytes on the wire. So one
servicer serves both versions.
"""

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from google.protobuf.descriptor import FileDescriptor
from grpc_reflection.v1alpha import reflection, reflection_pb2

from services.common import errors, rpc_handlers


def _v1() -> FileDescriptor:
    """Returns the description of the reflection service's version `v1`, made from the description
    of `v1alpha`. Registers it in this process as well, so that tools which list the service can ask
    for its description."""
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    text = text_format.MessageToString(file)
    for name in ("reflection.v1", "reflection/v1"):
        text = text.replace(f"{name}alpha", name)
    text_format.Parse(text, file := descriptor_pb2.FileDescriptorProto())
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    return pool.FindFileByName(file.name)


SERVICES = tuple(
    file.services_by_name["ServerReflection"] for file in (_v1(), reflection_pb2.DESCRIPTOR)
)
"""Descriptors of the reflection service, one for each version."""

RAW_METHODS = frozenset({"ServerReflectionInfo"})

MAX_STREAMS = 4
"""Largest number of streams at a time. A tool opens one stream for a short time."""

MAX_QUESTION_BYTES = 4096
"""Largest size of a request to the reflection service, in bytes. A request is a name, which the
response repeats."""

RETRY_AFTER_S = 5.0

Question = reflection_pb2.ServerReflectionRequest


class ReflectionServicer:
    """Implements the one method of the reflection service."""

    def __init__(
        self, service_names: tuple[str, ...], make_exchange: rpc_handlers.MakeExchange
    ) -> None:
        self._library = reflection.aio.ReflectionServicer(service_names)
        self._make_exchange = make_exchange
        self._n_streams = 0

    async def ServerReflectionInfo(self, context: Any) -> None:
        """Answers each request of a stream.

        Raises:
            InvalidRequest: a message is not a reflection request, or is larger than
            MAX_QUESTION_BYTES.
            PoolFull: there are too many streams.
            TimedOut: the client did not send a request, or did not read a response, in time.
        """
        if self._n_streams >= MAX_STREAMS:
            raise errors.PoolFull(
                "too many clients ask for reflection; try again", retry_after_s=RETRY_AFTER_S
            )
        self._n_streams += 1
        # A stream whose answers are not read outlives this method: it lasts until its client goes.
        context.add_done_callback(self._forget_stream)
        exchange = self._make_exchange(context)
        context.add_done_callback(exchange.close)
        while (data := await exchange.receive(Question)) is not grpc.aio.EOF:
            if len(data) > MAX_QUESTION_BYTES:
                raise errors.TooLarge(
                    "request", f"must not be larger than {MAX_QUESTION_BYTES} bytes"
                )
            question = rpc_handlers.parse(data, Question)
            async for answer in self._library.ServerReflectionInfo(_only(question), context):
                await exchange.write(answer.SerializeToString())

    def _forget_stream(self, _: object) -> None:
        self._n_streams -= 1


async def _only(question: Any) -> AsyncIterator[Any]:
    yield question
