"""WorkerService: the gRPC methods of the controller."""

from collections.abc import AsyncIterator
from typing import Any

from orcinus.v1 import worker_pb2

from services.common import rpc, tls
from services.common.stream_places import StreamPlaces
from services.worker.controller.controller import Controller

SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]
RAW_METHODS = ("RunIterations", "WatchStage")
"""Methods whose messages the controller handles as bytes, without decoding."""

CALLERS = {
    "Describe": {tls.SCHEDULER},
    "AssignStage": {tls.SCHEDULER},
    "JoinPipeline": {tls.SCHEDULER},
    "RunIterations": {tls.SCHEDULER, tls.WORKER},
    "PrepareGrammar": {tls.SCHEDULER},
    "WatchStage": {tls.SCHEDULER},
    "Profile": {tls.WORKER},
}
"""Roles whose certificates may call each method. Plans come from the scheduler or from the previous
stage. Profiles are ordered by people in a worker's pod."""

MAX_STREAMS = 16
"""Largest number of concurrent calls of RunIterations, and largest number of concurrent calls of
WatchStage. An epoch needs one call of each."""


class WorkerService:
    """The servicer of orcinus.v1.WorkerService."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._plan_places = StreamPlaces(MAX_STREAMS, of="streams of plans")
        self._watcher_places = StreamPlaces(MAX_STREAMS, of="watchers of this stage")

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: Any
    ) -> worker_pb2.DescribeResponse:
        """Returns the description of the worker."""
        return self._controller.describe()

    async def AssignStage(
        self, request: worker_pb2.AssignStageRequest, context: Any
    ) -> worker_pb2.AssignStageResponse:
        """Makes the worker the stage that the request names."""
        self._controller.assign(request)
        return worker_pb2.AssignStageResponse()

    async def JoinPipeline(
        self, request: worker_pb2.JoinPipelineRequest, context: Any
    ) -> worker_pb2.JoinPipelineResponse:
        """Makes the stage join the epoch of the request."""
        await self._controller.join(request)
        return self._controller.epoch.joined

    async def RunIterations(self, context: Any) -> bytes:
        """Forwards the plans of a stream until the sender closes the stream."""
        self._plan_places.take()
        await self._controller.plans.run(context)
        return worker_pb2.RunIterationsResponse().SerializeToString()

    async def PrepareGrammar(
        self, request: worker_pb2.PrepareGrammarRequest, context: Any
    ) -> worker_pb2.PrepareGrammarResponse:
        """Makes all ranks of the stage compile a grammar. Returns when all ranks have compiled it,
        or when the first of them has failed."""
        epoch = rpc.epoch_of(context)
        return await self._controller.grammar_orders.prepare(request, epoch=epoch)

    async def WatchStage(
        self, request: worker_pb2.WatchStageRequest, context: Any
    ) -> AsyncIterator[bytes]:
        """Yields the reports of the stage."""
        self._watcher_places.take()
        with self._controller.reports.watch(rpc.epoch_of(context)) as reports:
            await context.send_initial_metadata(())  # tells the caller that no report is missed now
            async for report in reports:
                yield report

    async def Profile(
        self, request: worker_pb2.ProfileRequest, context: Any
    ) -> worker_pb2.ProfileResponse:
        """Orders a profile of a rank's next iterations, and waits until the profile is written."""
        path = await self._controller.profile_orders.take(request)
        return worker_pb2.ProfileResponse(path=str(path))
