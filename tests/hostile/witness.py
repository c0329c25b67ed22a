"""`python -m tests.hostile.witness TARGET [measure]`: sixteen honest streams.

Eight streams over HTTP, each on a new connection, and eight over gRPC ask one question after the
other, and compare each token with the answer that they got when nothing else was going on.

With `measure` they pause for nothing, and there are probes of the event loop. Every 20 ms a `GET
/health` on a connection that stays open, and a health check over gRPC, ask whether the frontend's
event loop turns. `GET /health` does nothing but wait for its turn there, so its latency, less the
time that the frontend's main thread and this process waited for a processor, is what stands for a
stall of the loop. The check over gRPC passes through threads of gRPC as well.

Orders: `begin`, and `end`, which is answered with what was seen.
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc
from orcinus.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2

from tests.hostile.helper import obey
from tests.hostile.target import Target

N_STREAMS = 8
"""Streams of each protocol."""
N_PROMPT, N_OUTPUT = 24, 48
"""Tokens of each question and answer."""
PROBE_S = 0.02
PAUSE_S = 0.5
"""Seconds from an answer to the next question where nothing is measured: a test needs streams that
are in flight, and not all of the processors."""
LIMIT_S = 60.0
"""Seconds after which an honest client gives up."""
RETRY_S = 0.1

Ask = Callable[[list[int]], AsyncIterator[list[int]]]


class Refused(Exception):
    """Raised when a question is not taken, or its connection closed before it is answered."""


class Broken(Exception):
    """Raised when an answer does not come to its end."""


@dataclass(slots=True)
class Seen:
    """All that the streams and the probes saw between two orders."""

    gaps_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    """Seconds from each question to its first token."""
    n_complete: int = 0
    wrong: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    http_stalls_s: list[float] = field(default_factory=list)
    grpc_stalls_s: list[float] = field(default_factory=list)
    n_probes_failed: int = 0

    def report(self) -> dict[str, Any]:
        """Returns it in figures."""
        return {
            "n_complete": self.n_complete,
            "wrong": self.wrong[:5],
            "broken": self.broken[:5],
            "refused": dict(self.refused),
            "gap_p99_s": _p99(self.gaps_s),
            "gap_max_s": max(self.gaps_s, default=0.0),
            "first_max_s": max(self.first_s, default=0.0),
            "stall_s": max(self.http_stalls_s, default=0.0),
            "stall_p99_s": _p99(self.http_stalls_s),
            "grpc_stall_s": max(self.grpc_stalls_s, default=0.0),
            "n_probes": len(self.http_stalls_s),
            "n_probes_failed": self.n_probes_failed,
        }


class Witness:
    """The honest clients of one system."""

    def __init__(self, target: Target, *, measures: bool) -> None:
        self._target = target
        self._measures = measures
        self._channel = grpc.aio.insecure_channel(target.grpc)
        self._probe_channel = grpc.aio.insecure_channel(
            target.grpc, options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._probe_channel)
        self._questions = [
            [4 + (7 * stream + 3 * place) % 4000 for place in range(N_PROMPT)]
            for stream in range(2 * N_STREAMS)
        ]
        self._expected: list[list[int]] = []
        self._seen = Seen()
        self._is_over = True
        self._tasks: list[asyncio.Task[None]] = []

    async def prepare(self) -> None:
        """Sends each question once, while the system has no other load."""
        for stream, question in enumerate(self._questions):
            answer = [token async for piece in self._ask(stream)(question) for token in piece]
            self._expected.append(answer)

    async def serve(self, order: str) -> Any:
        """Carries out an order of the tests."""
        return self.begin() if order == "begin" else await self.end()

    def begin(self) -> str:
        """Starts all streams and probes."""
        self._seen, self._is_over = Seen(), False
        clients: list[Coroutine[Any, Any, None]] = [
            self._ask_all_the_time(stream, pause_s=0 if self._measures else PAUSE_S)
            for stream in range(2 * N_STREAMS)
        ]
        if self._measures:
            clients += self._probes()
        self._tasks = [asyncio.create_task(client) for client in clients]
        return "begun"

    def _probes(self) -> list[Coroutine[Any, Any, None]]:
        return [
            self._probe(self._probe_http, self._seen.http_stalls_s),
            self._probe(self._probe_grpc, self._seen.grpc_stalls_s),
        ]

    async def end(self) -> dict[str, Any]:
        """Waits for the answers in progress, and returns the results."""
        self._is_over = True
        await asyncio.gather(*self._tasks)
        return self._seen.report()

    def _ask(self, stream: int) -> Ask:
        return self._ask_http if stream < N_STREAMS else self._ask_grpc

    async def _ask_all_the_time(self, stream: int, pause_s: float) -> None:
        """Asks a question over and over; the streams begin one after the other."""
        await asyncio.sleep(0.02 * stream)
        while not self._is_over:
            try:
                async with asyncio.timeout(LIMIT_S):
                    await self._compare(stream)
                await asyncio.sleep(pause_s)
            except Refused as error:
                self._seen.refused[str(error)] += 1
                await asyncio.sleep(RETRY_S)
            except (Broken, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                self._seen.broken.append(f"stream {stream}: {type(error).__name__}: {error}")
                await asyncio.sleep(RETRY_S)

    async def _compare(self, stream: int) -> None:
        loop, answer = asyncio.get_running_loop(), list[int]()
        before_s, times_s = loop.time(), self._seen.first_s
        async for piece in self._ask(stream)(self._questions[stream]):
            now_s = loop.time()
            times_s.append(now_s - before_s)
            before_s, times_s = now_s, self._seen.gaps_s
            answer += piece
        if answer != self._expected[stream]:
            self._seen.wrong.append(f"stream {stream}: {answer}")
        self._seen.n_complete += 1

    async def _ask_http(self, question: list[int]) -> AsyncIterator[list[int]]:
        body = json.dumps(
            {
                "prompt": question,
                "max_tokens": N_OUTPUT,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
                "stream": True,
            }
        )
        try:
            reader, writer = await self._target.connect()
        except OSError as error:
            raise Refused(type(error).__name__) from error
        try:
            writer.write(
                f"POST /v1/completions HTTP/1.1\r\nhost: {self._target.http}\r\n"
                f"{self._target.authorization}connection: close\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
                f"{body}".encode()
            )
            await self._check_status(reader)
            async for event in _events(reader):
                if "error" in event:
                    raise Broken(json.dumps(event["error"]))
                for choice in event["choices"]:
                    if choice["token_ids"]:
                        yield choice["token_ids"]
        finally:
            writer.transport.abort()

    async def _check_status(self, reader: asyncio.StreamReader) -> None:
        try:
            status = (await reader.readuntil(b"\r\n")).split()[1].decode()
        except (OSError, asyncio.IncompleteReadError) as error:
            raise Refused(type(error).__name__) from error
        if status != "200":
            raise Refused(status)

    async def _ask_grpc(self, question: list[int]) -> AsyncIterator[list[int]]:
        request = inference_pb2.GenerateStreamRequest(
            prompt=inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=question)),
            options=inference_pb2.GenerationOptions(
                max_tokens=N_OUTPUT,
                ignore_eos=True,
                return_token_ids=True,
                sampling=sampling_pb2.SamplingParams(temperature=0),
            ),
        )
        key = self._target.api_key
        metadata = () if key is None else (("authorization", f"Bearer {key}"),)
        has_begun = False
        try:
            async for message in self._stub.GenerateStream(request, metadata=metadata):
                has_begun = True
                if message.choice.token_ids:
                    yield list(message.choice.token_ids)
        except grpc.aio.AioRpcError as error:
            if not has_begun:
                raise Refused(error.code().name) from error
            raise Broken(f"{error.code().name}: {error.details()}") from error

    async def _probe(
        self, probe: Callable[[], contextlib.AbstractAsyncContextManager[Any]], stalls: list[float]
    ) -> None:
        """Asks every 20 ms; a probe that fails is tried again on a new connection."""
        while not self._is_over:
            try:
                async with probe() as ask:
                    while not self._is_over:
                        with stall(self._target.frontend_pid, stalls):
                            async with asyncio.timeout(LIMIT_S):
                                await ask()
                        await asyncio.sleep(PROBE_S)
            except (OSError, TimeoutError, asyncio.IncompleteReadError, grpc.aio.AioRpcError):
                self._seen.n_probes_failed += 1
                await asyncio.sleep(RETRY_S)

    @contextlib.asynccontextmanager
    async def _probe_http(self) -> AsyncIterator[Callable[[], Coroutine[Any, Any, None]]]:
        reader, writer = await self._target.connect()

        async def ask() -> None:
            writer.write(f"GET /health HTTP/1.1\r\nhost: {self._target.http}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length))

        try:
            yield ask
        finally:
            writer.transport.abort()

    @contextlib.asynccontextmanager
    async def _probe_grpc(self) -> AsyncIterator[Callable[[], Coroutine[Any, Any, None]]]:
        async def ask() -> None:
            await self._health.Check(health_pb2.HealthCheckRequest())

        yield ask


@contextlib.contextmanager
def stall(frontend_pid: int, stalls: list[float]) -> Any:
    """Records the seconds that the block took, also if it fails. Time in which the frontend and
    this process waited for a processor is subtracted."""
    start_s, waited_s = time.monotonic(), _waited_s(frontend_pid) + _waited_s(os.getpid())
    try:
        yield
    finally:
        waited_s = _waited_s(frontend_pid) + _waited_s(os.getpid()) - waited_s
        stalls.append(max(0.0, time.monotonic() - start_s - waited_s))


def _p99(values: list[float]) -> float:
    return float(np.percentile(values, 99)) if values else 0.0


def _waited_s(pid: int) -> float:
    """Seconds that a process's main thread was ready to run and did not; 0 when it has ended."""
    with contextlib.suppress(OSError):
        return 1e-9 * int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1])
    return 0.0


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Yields the events of a stream until its final event.

    Raises:
        Broken: the stream ended before the final event.
    """
    while line := await reader.readline():
        if line == b"data: [DONE]\n":
            return
        if line.startswith(b"data: "):
            yield json.loads(line[6:])
    raise Broken("the connection was closed")


async def main() -> None:
    """Serves orders until there are no more."""
    witness = Witness(Target.from_json(sys.argv[1]), measures="measure" in sys.argv[2:])
    await witness.prepare()
    await obey(witness.serve)


if __name__ == "__main__":
    asyncio.run(main())
