"""Streams over gRPC that go on when the connection or the frontend is lost, for threads and for
asyncio.

    stubs = [InferenceServiceStub(grpc.insecure_channel(it, CHANNEL_OPTIONS)) for it in addresses]
    for piece in generate_stream(GenerateStreamRequest(prompt=prompt), *stubs):
        print(piece.choice.text, end="")
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import grpc

from orcinus_client.attempts import Retry
from orcinus_client.errors import ClientError
from orcinus_client.grpc_stream import CHANNEL_OPTIONS, GrpcCall, error_of

__all__ = ["CHANNEL_OPTIONS", "async_generate_stream", "generate_stream"]


def generate_stream(
    request: Any,
    *stubs: Any,
    api_key: str | None = None,
    retry: Retry | None = None,
    timeout_s: float | None = None,
) -> Iterator[Any]:
    """Yields the messages of `GenerateStream`. A stream that breaks is resumed at the next stub;
    `timeout_s` limits all connections together.

    Raises:
        ClientError: the request is refused or has failed, or all attempts to resume failed.
    """
    call = GrpcCall(request, stubs, api_key=api_key, retry=retry, timeout_s=timeout_s)
    while not call.is_done:
        try:
            yield from _connection(call)
        except ClientError as error:
            time.sleep(call.fail(error))


def _connection(call: GrpcCall) -> Iterator[Any]:
    stream = call.begin()
    try:
        for response in stream:
            call.take(response)
            yield response
    except grpc.RpcError as error:
        raise error_of(error) from error
    finally:
        stream.cancel()
    call.end()


async def async_generate_stream(
    request: Any,
    *stubs: Any,
    api_key: str | None = None,
    retry: Retry | None = None,
    timeout_s: float | None = None,
) -> AsyncGenerator[Any, None]:
    """Yields the messages of `GenerateStream` as `generate_stream` does; the stubs are of channels
    of `grpc.aio`."""
    call = GrpcCall(request, stubs, api_key=api_key, retry=retry, timeout_s=timeout_s)
    while not call.is_done:
        try:
            async with aclosing(_async_connection(call)) as responses:
                async for response in responses:
                    yield response
        except ClientError as error:
            await asyncio.sleep(call.fail(error))


async def _async_connection(call: GrpcCall) -> AsyncGenerator[Any, None]:
    stream = call.begin()
    try:
        async for response in stream:
            call.take(response)
            yield response
    except grpc.RpcError as error:
        raise error_of(error) from error
    finally:
        stream.cancel()
    call.end()
