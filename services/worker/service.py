"""WorkerService: the gRPC face of the controller."""

from collections.abc import AsyncIterator
from typing import Any

from orcinus.v1 import worker_pb2

from services.common import rpc
from services.worker.controller import Controller

RAW_METHODS = ("RunIterations", "WatchStage")
"""Methods whose messages the controller moves as bytes."""


class WorkerService:
    """The servicer of orcinus.v1.WorkerService."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: Any
    ) -> worker_pb2.DescribeResponse:
        """What the stage is."""
        return self._controller.describe()

    async def JoinPipeline(
        self, request: worker_pb2.JoinPipelineRequest, context: Any
    ) -> worker_pb2.JoinPipelineResponse:
        """Makes the stage a member of an epoch."""
        await self._controller.join(request)
        return worker_pb2.JoinPipelineResponse()

    async def RunIterations(self, context: Any) -> bytes:
        """Takes plans."""
        await self._controller.run(context)
        return worker_pb2.RunIterationsResponse().SerializeToString()

    async def WatchStage(
        self, request: worker_pb2.WatchStageRequest, context: Any
    ) -> AsyncIterator[bytes]:
        """Reports what happens on the stage."""
        with self._controller.watch(rpc.epoch_of(context)) as reports:
            await context.send_initial_metadata(())  # the caller knows that it misses nothing now
            async for report in reports:
                yield report
