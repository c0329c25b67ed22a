"""A real local system: starts the system, sends requests to it, and records its iterations.

Each request asks for an exact number of tokens, which are streamed, as for most clients. The
messages of a stream are decoded after the stream has ended, because this process shares the machine
with the measured system.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import grpc.aio
from orcinus.v1 import inference_pb2, sampling_pb2, watch_pb2, watch_pb2_grpc

from services.common import rpc
from services.local.child import ChildDied
from services.local.launcher import Launcher
from services.local.settings import LocalSettings

START_TIMEOUT_S = 120.0
SETTLE_S = 0.6
"""Seconds to wait for the records of the last iterations. The wait is needed because stages report
their timings every quarter of a second."""
METHOD = "/orcinus.v1.InferenceService/GenerateStream"

Record = watch_pb2.IterationEvent
Result = TypeVar("Result")


class SystemFailed(Exception):
    """A system did not start, ended, or refused a request. The message says why."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request to send: the tokens of the prompt, and the exact number of tokens to generate."""

    token_ids: Sequence[int]
    n_output: int


@dataclass(slots=True)
class TimedReply:
    """The times at which a request was sent and at which each of its tokens arrived, by the event
    loop's clock."""

    sent_s: float
    token_times_s: list[float] = field(default_factory=list)
    is_complete: bool = False


class System:
    """A running local system, with channels to its frontend and its scheduler."""

    def __init__(
        self, frontend: grpc.aio.Channel, scheduler: grpc.aio.Channel, *, http_url: str
    ) -> None:
        self.http_url = http_url
        """URL of the OpenAI API, without its path."""
        self.n_slots = 0
        """Number of K/V slots of the system. It is set by the first `with` block of `recorded`."""
        self._generate: Any = frontend.unary_stream(METHOD)  # bytes in, bytes out
        self._watch = watch_pb2_grpc.WatchServiceStub(scheduler).Watch

    async def ask(self, prompt: Prompt, reply: TimedReply | None = None) -> TimedReply:
        """Sends a request and returns the complete reply. If `reply` is given, it is filled and
        returned. So the caller has the times of the received tokens even if it cancels the call.

        Raises:
            SystemFailed: the request was refused or failed, or has the wrong number of tokens.
        """
        message = inference_pb2.GenerateStreamRequest(
            prompt=inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=prompt.token_ids)),
            options=inference_pb2.GenerationOptions(
                max_tokens=prompt.n_output,
                ignore_eos=True,
                return_token_ids=True,
                sampling=sampling_pb2.SamplingParams(temperature=0, min_tokens=prompt.n_output),
            ),
        ).SerializeToString()
        loop = asyncio.get_running_loop()
        reply = TimedReply(0.0) if reply is None else reply
        reply.sent_s = loop.time()
        pieces: list[tuple[float, bytes]] = []
        try:
            async for piece in self._generate(message):
                pieces.append((loop.time(), piece))
        except grpc.aio.AioRpcError as error:
            raise SystemFailed(f"a request failed: {error.details()}") from error
        finally:
            for time_s, piece in pieces:
                choice = inference_pb2.GenerateStreamResponse.FromString(piece).choice
                reply.token_times_s += [time_s] * len(choice.token_ids)
        if len(reply.token_times_s) != prompt.n_output:
            raise SystemFailed(
                f"{len(reply.token_times_s)} tokens came instead of {prompt.n_output}"
            )
        reply.is_complete = True
        return reply

    @contextlib.asynccontextmanager
    async def recorded(self) -> AsyncIterator[list[Record]]:
        """Records all iterations that run during the `with` block. Yields a list to which the
        records are added. The list is complete when the block has ended."""
        records: list[Record] = []
        call = self._watch(watch_pb2.WatchRequest())
        await call.initial_metadata()

        async def collect() -> None:
            async for message in call:
                for event in message.events:
                    if event.HasField("epoch"):
                        self.n_slots = event.epoch.n_slots
                    elif event.HasField("iteration"):
                        records.append(event.iteration)

        collecting = asyncio.create_task(collect())
        try:
            yield records
            await asyncio.wait((collecting,), timeout=SETTLE_S)
        finally:
            call.cancel()
            collecting.cancel()
            await asyncio.gather(collecting, return_exceptions=True)


class TuneLauncher(Launcher):
    """A launcher that remembers the address of the scheduler. Tests use a subclass that starts
    other ranks."""

    scheduler_address = ""

    def frontend_options(self, *schedulers: str) -> dict[str, object]:
        """Returns the frontend's options, and remembers the address of the scheduler."""
        [self.scheduler_address] = schedulers
        return super().frontend_options(*schedulers)


@contextlib.asynccontextmanager
async def running(
    settings: LocalSettings, launcher_class: type[TuneLauncher] = TuneLauncher
) -> AsyncIterator[System]:
    """Starts a system and yields it. At the end of the `with` block, ends all processes of the
    system.

    Raises:
        SystemFailed: the system did not start.
    """
    async with launcher_class(settings) as launcher:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                endpoints = await _unless_dead(launcher, launcher.start(lambda *_: None))
        except TimeoutError:
            raise SystemFailed(f"does not serve after {START_TIMEOUT_S:g} s") from None
        async with (
            rpc.connect(endpoints.grpc) as frontend,
            rpc.connect(launcher.scheduler_address) as scheduler,
        ):
            yield System(frontend, scheduler, http_url=f"http://{endpoints.http}")


async def _unless_dead(launcher: Launcher, work: Awaitable[Result]) -> Result:
    """Waits for `work` and returns its result.

    Raises:
        SystemFailed: a process of the system cannot be started, or ended before the work was done.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task, launcher.death), return_when=asyncio.FIRST_COMPLETED)
        if launcher.death.done():
            raise SystemFailed(await launcher.death)
        return await task
    except ChildDied:
        raise SystemFailed(await launcher.death) from None
    except OSError as error:
        raise SystemFailed(f"a service cannot be started: {error}") from error
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
