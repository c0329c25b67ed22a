"""Clients that record the answers that they get, and resume streams whose connection broke.

When a frontend is lost, its connections break. The client then sends the same request, with the
tokens that it has, to another frontend. Any other error must not reach the client, and counts as a
lost stream.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import httpx
from orcinus.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2

from tests.faults.checker import End, Event, Failure, StreamId, Tokens
from tests.faults.workload import Question

RETRY_S = 0.1
LIMIT_S = 120.0
"""Seconds after which a client that hears nothing gives up."""
REASONS = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
}
BROKEN = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN}
STATUS_DETAILS = "grpc-status-details-bin"
SAMPLING = {descriptor.name for descriptor in sampling_pb2.SamplingParams.DESCRIPTOR.fields}


class ConnectionBroke(Exception):
    """Raised when a frontend is gone, or was not there."""


class Refused(Exception):
    """Raised when an answer ends with an error."""


@dataclass
class Progress:
    """The part of a request's answer that a client has, with all data that are needed to resume the
    request at another frontend."""

    question: Question
    request: str
    """Name of this sending of the question in the log."""
    token_ids: list[list[int]] = field(default_factory=list)
    is_finished: list[bool] = field(default_factory=list)
    request_id: str = ""
    seed: int | None = None
    last_event_id: str | None = None

    def __post_init__(self) -> None:
        self.token_ids = [[] for _ in range(self.question.n_answers)]
        self.is_finished = [False] * self.question.n_answers


@dataclass
class Log:
    """All that clients of a run have written down."""

    events: list[Event] = field(default_factory=list)
    n_resumed: int = 0
    decoding: dict[StreamId, float] = field(default_factory=dict)
    """Streams that have begun and not ended, with the time of their last token."""
    n_begun: int = 0
    """Requests that were sent so far."""
    receipts: dict[StreamId, dict[str, Any]] = field(default_factory=dict)
    """The receipt of each answer that has one."""

    def write(self, event: Event) -> None:
        self.events.append(event)
        if not isinstance(event, Tokens):
            self.decoding.pop(event.stream, None)
        elif event.token_ids:
            self.decoding[event.stream] = event.time_s


class Clients:
    """Sends questions to one frontend's address."""

    def __init__(self, http: str, grpc_address: str, log: Log) -> None:
        self.log = log
        self._http = httpx.AsyncClient(
            base_url=http,
            timeout=httpx.Timeout(LIMIT_S, connect=5.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )
        options = [
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 500),
        ]
        self._channel = grpc.aio.insecure_channel(grpc_address, options=options)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def close(self) -> None:
        await self._http.aclose()
        await self._channel.close()

    async def ask(self, question: Question, request: str) -> None:
        """Sends a question and writes down all that comes, to the end or to a failure."""
        progress = Progress(question, request)
        self.log.n_begun += 1
        receive = self._receive_grpc if question.protocol == "grpc" else self._receive_http
        try:
            async with asyncio.timeout(None) as limit:
                await self._ask_until_complete(progress, receive, limit)
        except TimeoutError:
            self._write_failures(progress, f"nothing for {LIMIT_S:g} s")
        except Refused as error:
            self._write_failures(progress, str(error))

    async def _ask_until_complete(
        self,
        progress: Progress,
        receive: Callable[[Progress], AsyncGenerator[None]],
        limit: asyncio.Timeout,
    ) -> None:
        """Sends a request, and resumes it when the connection breaks. Each new token extends the
        time limit."""
        loop = asyncio.get_running_loop()
        limit.reschedule(loop.time() + LIMIT_S)
        has_news = False
        while True:
            try:
                async with aclosing(receive(progress)) as pieces:
                    async for _ in pieces:
                        has_news = True
                        limit.reschedule(loop.time() + LIMIT_S)
            except ConnectionBroke:
                self.log.n_resumed += has_news
                has_news = False
                await asyncio.sleep(RETRY_S)
            else:
                return

    def _write_failures(self, progress: Progress, error: str) -> None:
        for index, is_finished in enumerate(progress.is_finished):
            if not is_finished:
                stream = StreamId(progress.request, index)
                self.log.write(Failure(stream, error, time.monotonic()))

    def _take(
        self, progress: Progress, index: int, token_ids: list[int], text: str, *, start: int
    ) -> None:
        """Writes down a piece of an answer, and remembers it for the next frontend."""
        stream = StreamId(progress.request, index)
        self.log.write(Tokens(stream, start, tuple(token_ids), text, time.monotonic()))
        progress.token_ids[index] += token_ids

    def _finish(self, progress: Progress, index: int, reason: str) -> None:
        self.log.write(End(StreamId(progress.request, index), reason, time.monotonic()))
        progress.is_finished[index] = True

    def _keep_receipt(self, progress: Progress, index: int, receipt: dict[str, Any] | None) -> None:
        if receipt is not None:
            self.log.receipts[StreamId(progress.request, index)] = receipt

    async def _receive_http(self, progress: Progress) -> AsyncGenerator[None]:
        """Takes a stream of server-sent events, to its end."""
        path = "/v1/chat/completions" if progress.question.protocol == "chat" else "/v1/completions"
        body, headers = resumed_over_http(progress)
        try:
            async with self._http.stream("POST", path, json=body, headers=headers) as response:
                if response.status_code != httpx.codes.OK:
                    raise error_of((await response.aread()).decode())
                async for event_id, data in events_of(response.aiter_lines()):
                    if data == "[DONE]":
                        return
                    self._take_event(progress, event_id, data)
                    yield
        except httpx.TransportError as error:
            raise ConnectionBroke from error
        raise ConnectionBroke  # a stream without [DONE] has not ended

    def _take_event(self, progress: Progress, event_id: str | None, data: str) -> None:
        """Takes an event that has come as a whole."""
        chunk = json.loads(data)
        if "error" in chunk:
            raise error_of(data)
        progress.last_event_id = event_id
        progress.request_id = chunk["id"]
        progress.seed = chunk.get("seed", progress.seed)
        for choice in chunk["choices"]:
            self._take_choice(progress, choice)

    def _take_choice(self, progress: Progress, choice: dict[str, Any]) -> None:
        index, token_ids = choice["index"], choice["token_ids"]
        text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        # By what the server says, not by what this client has counted.
        end = position_of(progress.last_event_id, index)
        start = len(progress.token_ids[index]) if end is None else end - len(token_ids)
        self._take(progress, index, token_ids, text, start=start)
        if choice["finish_reason"] is not None:
            self._finish(progress, index, choice["finish_reason"])
            self._keep_receipt(progress, index, choice.get("receipt"))

    async def _receive_grpc(self, progress: Progress) -> AsyncGenerator[None]:
        """Takes the messages of a stream, to its end."""
        call = self._stub.GenerateStream(request_over_grpc(progress))
        has_usage = False
        try:
            async for message in call:
                progress.request_id = message.request_id
                if message.HasField("seed"):
                    progress.seed = message.seed
                if message.HasField("choice"):
                    self._take_message(progress, message.choice)
                has_usage |= message.HasField("usage")
                yield
        except grpc.aio.AioRpcError as error:
            if is_broken(error):
                raise ConnectionBroke from error
            raise Refused(f"{error.code().name}: {error.details()}") from error
        if not has_usage:
            raise ConnectionBroke

    def _take_message(self, progress: Progress, choice: inference_pb2.Choice) -> None:
        start = len(progress.token_ids[choice.index])
        self._take(progress, choice.index, list(choice.token_ids), choice.text, start=start)
        if choice.finish_reason:
            self._finish(progress, choice.index, REASONS[choice.finish_reason])
            self._keep_receipt(progress, choice.index, json.loads(choice.receipt or "null"))


def error_of(message: str) -> Exception:
    """Returns what an error over HTTP means to a client."""
    return ConnectionBroke() if is_leaving(message) else Refused(message)


async def events_of(lines: AsyncIterator[str]) -> AsyncGenerator[tuple[str | None, str]]:
    """Yields id and data of each server-sent event; one is complete with its empty line."""
    event_id, data = None, ""
    async for line in lines:
        name, _, value = line.partition(": ")
        if name == "id":
            event_id = value
        elif name == "data":
            data = value
        elif not line:
            yield event_id, data


def resumed_over_http(progress: Progress) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the body and the headers that ask for the missing part of an answer. At first the
    whole answer is missing."""
    body = progress.question.body
    if progress.last_event_id is None:
        return body, {}
    resumption = {"seed": progress.seed, "token_ids": progress.token_ids}
    return {**body, "resumption": resumption}, {"Last-Event-ID": progress.last_event_id}


def position_of(event_id: str | None, index: int) -> int | None:
    """Returns the number of tokens that a client with this event has of an answer, by its id:
    `REQUEST:12,7f,-`."""
    if event_id is None:
        return None
    mark = event_id.partition(":")[2].partition(";")[0].split(",")[index]
    return 0 if mark == "-" else int(mark.removesuffix("f"))


def request_over_grpc(progress: Progress) -> inference_pb2.GenerateStreamRequest:
    """Returns the message that asks for the missing part of an answer. At first the whole answer is
    missing."""
    question = progress.question
    sampling = {name: value for name, value in question.options.items() if name in SAMPLING}
    others = {name: value for name, value in question.options.items() if name not in SAMPLING}
    request = inference_pb2.GenerateStreamRequest(
        prompt=inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=question.prompt)),
        options=inference_pb2.GenerationOptions(
            return_token_ids=True,
            sampling=sampling_pb2.SamplingParams(**sampling),
            **others,
        ),
    )
    if progress.seed is not None:
        answers = [
            inference_pb2.AnswerSoFar(token_ids=token_ids, is_finished=is_finished)
            for token_ids, is_finished in zip(progress.token_ids, progress.is_finished, strict=True)
        ]
        request.resumption.CopyFrom(
            inference_pb2.Resumption(
                request_id=progress.request_id, seed=progress.seed, answers=answers
            )
        )
    return request


def is_broken(error: grpc.aio.AioRpcError) -> bool:
    """Returns whether an error shows that a frontend is gone or is stopping. Errors that a frontend
    sends on purpose have details. Errors that gRPC in this process makes for a broken connection
    have none."""
    if STATUS_DETAILS in dict(error.trailing_metadata() or ()):
        return is_leaving(error.details() or "")
    return error.code() in BROKEN


def is_leaving(message: str) -> bool:
    """Returns whether the message of an error says that the frontend was told to stop."""
    return "the server is stopping" in message
