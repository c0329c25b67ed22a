"""Attacks by clients that reach the ports of the scheduler or of a worker (item 7)."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import grpc.aio
from orcinus.v1 import (
    sampling_pb2,
    scheduler_pb2,
    scheduler_pb2_grpc,
    watch_pb2,
    watch_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

from tests.hostile.attack import Answers, Attack
from tests.hostile.target import Target

HOLD_S = 5.0


async def frontend_that_never_reads(target: Target) -> Answers:
    """Connects to the scheduler as a frontend would, submits as many requests as the pool takes,
    and never reads the answers."""

    async def submissions() -> AsyncIterator[scheduler_pb2.ConnectRequest]:
        for index in range(600):
            yield scheduler_pb2.ConnectRequest(
                submission=scheduler_pb2.Submission(
                    request_id=f"{index}-{'x' * 1000}",
                    prompt_token_ids=[7],
                    max_new_tokens=900,
                    sampling=sampling_pb2.SamplingParams(temperature=1),
                )
            )
        await asyncio.sleep(HOLD_S)

    async with grpc.aio.insecure_channel(target.scheduler) as channel:
        call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Connect(submissions())
        await asyncio.sleep(HOLD_S)
        call.cancel()
    return Counter(["connected"])


async def watchers_that_never_read(target: Target) -> Answers:
    """Starts 200 watches, and never reads the events."""
    async with grpc.aio.insecure_channel(target.scheduler) as channel:
        stub = watch_pb2_grpc.WatchServiceStub(channel)
        calls = [stub.Watch(watch_pb2.WatchRequest(has_decisions=True)) for _ in range(200)]
        await asyncio.sleep(HOLD_S)
        for call in calls:
            call.cancel()
    return Counter(["watched"])


async def last_epoch(target: Target) -> Answers:
    """Tells a worker to join the last epoch that there can be."""
    request = worker_pb2.JoinPipelineRequest(
        pipeline_id="orcinus",
        epoch=2**64 - 1,
        stage_index=0,
        members=[target.worker],
        rendezvous_address="127.0.0.1:1",
        tp_size=1,
        n_kv_blocks=1,
    )
    answer = "OK"
    async with grpc.aio.insecure_channel(target.worker) as channel:
        try:
            await worker_pb2_grpc.WorkerServiceStub(channel).JoinPipeline(request, timeout=10)
        except grpc.aio.AioRpcError as error:
            answer = error.code().name
    return Counter([answer])


ATTACKS = (
    Attack(name="frontend_that_never_reads", run=frontend_that_never_reads),
    Attack(name="watchers_that_never_read", run=watchers_that_never_read),
    Attack(
        name="last_epoch",
        run=last_epoch,
        answers=frozenset({"INVALID_ARGUMENT"}),
    ),
)
