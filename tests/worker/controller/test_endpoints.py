"""The end of a stage's servers: the last reports leave, and nothing waits longer than that."""

import asyncio
from pathlib import Path

import grpc.aio
from orcinus.v1 import worker_pb2, worker_pb2_grpc

from services.common import rpc
from services.worker.controller.controller import Controller
from services.worker.controller.endpoints import WorkerEndpoints
from services.worker.settings import PipelinePlace, WorkerSettings
from tests.fakes import FakeRank

LIMIT_S = 30.0


async def test_the_last_report_leaves_and_nothing_waits_for_the_time_it_may_take() -> None:
    controller = Controller(tp_size=1, place=PipelinePlace(0, 1))
    rank = FakeRank(controller)
    controller.attach([rank])
    rank.load()
    settings = WorkerSettings(model=Path("none"), address="127.0.0.1:0")
    endpoints = await WorkerEndpoints.open(settings, controller)
    async with asyncio.timeout(LIMIT_S), rpc.connect(endpoints.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        joining = worker_pb2.JoinPipelineRequest(epoch=1, members=["a"], tp_size=1)
        await stub.JoinPipeline(joining)
        metadata = rpc.epoch_metadata(1)
        watch = stub.WatchStage(worker_pb2.WatchStageRequest(), metadata=metadata)
        await watch.wait_for_connection()
        controller.on_exit(0, -9)
        await controller.end()
        await endpoints.stop_service(10 * LIMIT_S)
        report = await watch.read()
        assert report.failure.reason == "rank 0 exited with status -9"
        assert await watch.read() is grpc.aio.EOF
        await endpoints.close()
