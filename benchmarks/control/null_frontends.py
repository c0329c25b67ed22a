"""Frontends without clients: streams of requests that speak the scheduler's own protocol.

A stream is a series of requests, each submitted when the previous one is complete. The process has
several connections to the scheduler, as that many frontends would have. It reads only which
requests have completed, so that a machine with few cores can load a scheduler fully.

`null_plane.py` starts this module as a process.
"""

import argparse
import asyncio
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import grpc.aio
import numpy as np
from orcinus.v1 import sampling_pb2, scheduler_pb2, scheduler_pb2_grpc

from services.common import rpc
from services.common.process import ReadyPipe, die_with_parent, run, stop_event

VOCAB_SIZE = 1000  # the null rank's
PROMPT_TOKENS = 16
RETRY_S = 0.1


class NullFrontend:
    """A connection to the scheduler, with streams of requests."""

    def __init__(
        self, scheduler: str, n_streams: int, answer_tokens: Sequence[int], *, seed: int
    ) -> None:
        """`answer_tokens` are the smallest and the largest number of tokens of an answer."""
        self._scheduler = scheduler
        self._n_streams = n_streams
        self._answer_tokens = answer_tokens
        self._generator = np.random.default_rng(seed)
        self._numbers = itertools.count()

    async def run(self) -> None:
        """Runs the streams until cancelled. Connects again until the scheduler leads."""
        async with rpc.connect(self._scheduler) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            while True:
                try:
                    await self._serve(stub.Connect())
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
                    await asyncio.sleep(RETRY_S)

    async def _serve(self, call: Any) -> None:
        due: asyncio.Queue[scheduler_pb2.ConnectRequest] = asyncio.Queue()
        writing = asyncio.create_task(_write(call, due))
        has_begun = False
        try:
            async for message in call:
                if message.rejected:
                    raise RuntimeError(f"a request was rejected: {message.rejected[0]}")
                n_due = len(message.completed)
                if not has_begun and message.HasField("pipeline"):
                    has_begun, n_due = True, self._n_streams
                for _ in range(n_due):
                    due.put_nowait(self._submission())
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    def _submission(self) -> scheduler_pb2.ConnectRequest:
        number = next(self._numbers)
        low, high = self._answer_tokens
        submission = scheduler_pb2.Submission(
            request_id=f"request-{number}",
            prompt_token_ids=self._generator.integers(0, VOCAB_SIZE, PROMPT_TOKENS).tolist(),
            max_new_tokens=int(self._generator.integers(low, high, endpoint=True)),
            sampling=sampling_pb2.SamplingParams(seed=number),
            number=number,
        )
        return scheduler_pb2.ConnectRequest(submission=submission)


async def _write(call: Any, due: asyncio.Queue[scheduler_pb2.ConnectRequest]) -> None:
    """Sends the queued messages, one after the other like a frontend, until cancelled."""
    while True:
        await call.write(await due.get())


async def serve(options: argparse.Namespace) -> int:
    """Runs the frontends until the process is told to stop; returns the exit status."""
    stop = stop_event()
    n_streams = -(-options.streams // options.n)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(
                NullFrontend(options.scheduler, n_streams, options.answer_tokens, seed=seed).run()
            )
            for seed in range(options.n)
        ]
        ReadyPipe(options.ready_fd).report({"ready": True})
        await stop.wait()
        for task in tasks:
            task.cancel()
    return 0


def main() -> int:
    """Parses the command line and runs the frontends. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scheduler", required=True, metavar="HOST:PORT")
    parser.add_argument("--n", type=int, required=True, help="number of frontends")
    parser.add_argument("--streams", type=int, required=True, help="of all frontends")
    parser.add_argument("--answer-tokens", type=int, nargs=2, required=True, metavar=("A", "B"))
    parser.add_argument("--ready-fd", type=int, required=True)
    options = parser.parse_args()
    die_with_parent()
    return run(serve(options), ready_fd=options.ready_fd)


if __name__ == "__main__":
    sys.exit(main())
