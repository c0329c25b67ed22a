"""A streaming client of Orcinus' gRPC API, which parses the messages after the run."""

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
from orcinus.v1 import inference_pb2, sampling_pb2

from benchmarks.serving.load import Answer, Reply
from benchmarks.workload import PlannedRequest

METHOD = "/orcinus.v1.InferenceService/GenerateStream"


class GrpcClient:
    """A client that sends generations over several channels in turn. The caller closes the
    channels."""

    def __init__(self, *channels: grpc.aio.Channel) -> None:
        self._methods: Iterator[Any] = itertools.cycle(
            [channel.unary_stream(METHOD) for channel in channels]  # bytes in, bytes out
        )

    def prepare(self, request: PlannedRequest) -> "Generation":
        """Returns the call for a request, with its message already serialized."""
        message = inference_pb2.GenerateStreamRequest(
            prompt=inference_pb2.Prompt(
                token_ids=inference_pb2.TokenIds(ids=request.prompt_token_ids)
            ),
            options=inference_pb2.GenerationOptions(
                max_tokens=request.n_output,
                ignore_eos=True,
                return_token_ids=True,
                sampling=sampling_pb2.SamplingParams(temperature=0, min_tokens=request.n_output),
            ),
        )
        return Generation(next(self._methods), message.SerializeToString())


class Generation:
    """A streaming call of the gRPC API. It is sent once, and its messages are parsed after the
    run."""

    def __init__(self, method: Any, message: bytes) -> None:
        self._method = method
        self._message = message
        self._pieces: list[tuple[float, bytes]] = []

    async def send(self) -> None:
        """Sends the call and waits until the answer is complete.

        Raises:
            ConnectionError: the call ended with a status other than OK.
        """
        loop = asyncio.get_running_loop()
        try:
            async for piece in self._method(self._message):
                self._pieces.append((loop.time(), piece))
        except grpc.aio.AioRpcError as error:
            raise ConnectionError(f"{error.code().name}: {error.details()}") from error

    def read(self) -> Reply:
        """Parses the received part of the answer and returns it."""
        answers: list[Answer] = []
        usage: inference_pb2.Usage | None = None
        for time_s, piece in self._pieces:
            message = inference_pb2.GenerateStreamResponse.FromString(piece)
            if message.HasField("usage"):
                usage = message.usage
            if message.choice.token_ids:
                answers.append(Answer(time_s, len(message.choice.token_ids)))
        return Reply(
            tuple(answers),
            n_prompt=None if usage is None else usage.prompt_tokens,
            n_output=None if usage is None else usage.completion_tokens,
        )
