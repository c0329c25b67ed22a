"""The joining of an epoch: all stages build their process groups, and then report."""

import asyncio
import logging
from collections.abc import Callable, Sequence

import grpc
import grpc.aio
from orcinus.v1 import worker_pb2, worker_pb2_grpc

from services.common import rpc
from services.scheduler.pipeline.membership import Pipeline
from services.scheduler.pipeline.pipeline_lost import PipelineLost

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 60.0

SLOW_JOIN_S = 8.0
"""Seconds after which the stages that have not joined are logged and reported."""

Reports = grpc.aio.UnaryStreamCall[object, object]
"""The stream of a stage's reports."""

Answers = Sequence[worker_pb2.JoinPipelineResponse]
"""The answers of the stages that have joined, in the order of the stages."""

StoredKV = Sequence[Sequence[worker_pb2.StoredKV]]
"""For each stage and each of its ranks, the description of the keys and values in the rank's
memory. Empty for a stage whose memory is new in each epoch."""


async def join_all(
    pipeline: Pipeline,
    stubs: Sequence[worker_pb2_grpc.WorkerServiceStub],
    wants_kept_blocks: bool = False,
    *,
    on_slow: Callable[[str], None] = lambda text: None,
) -> tuple[list[Reports], Answers]:
    """Makes all stages of a pipeline join its epoch. Returns the streams of the stages' reports,
    and the stages' answers, both in the order of the stages. An answer describes the keys and
    values of earlier epochs that the stage still has; with `wants_kept_blocks`, it also says which
    blocks hold which tokens. If joining takes longer than `SLOW_JOIN_S`, `on_slow` is called once
    with a text that names the stages that have not joined.

    Raises:
        PipelineLost: a stage could not join. The error names the stage.
    """
    joining = [
        asyncio.create_task(_join(pipeline, index, stub, wants_kept_blocks))
        for index, stub in enumerate(stubs)
    ]
    loop = asyncio.get_running_loop()
    naming = loop.call_later(SLOW_JOIN_S, _name_missing, pipeline, joining, on_slow)
    try:
        answers = await asyncio.gather(*joining)
    finally:
        naming.cancel()
    metadata = rpc.epoch_metadata(pipeline.epoch)
    watches: list[Reports] = [
        stub.WatchStage(worker_pb2.WatchStageRequest(), metadata=metadata) for stub in stubs
    ]
    for index, watch in enumerate(watches):
        try:
            await asyncio.wait_for(watch.wait_for_connection(), JOIN_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise _not_formed(index, error.details()) from error
        except TimeoutError:
            raise _not_formed(index, "it does not report") from None
    return watches, answers


def stored_kv_of(answers: Answers) -> StoredKV:
    """Returns the descriptions of the keys and values that the ranks of all stages still have."""
    return tuple(tuple(answer.stored_kv) for answer in answers)


def _name_missing(
    pipeline: Pipeline,
    joining: "Sequence[asyncio.Task[worker_pb2.JoinPipelineResponse]]",
    on_slow: Callable[[str], None],
) -> None:
    """Logs which stages have not joined yet, and calls `on_slow` with a text that names them."""
    late = [index for index, task in enumerate(joining) if not task.done()]
    members = ", ".join(f"stage {index} at {pipeline.members[index].address}" for index in late)
    log.warning("epoch %d does not form: %s: not joined yet", pipeline.epoch, members)
    stages = ", ".join(map(str, late))
    on_slow(f"pipeline {pipeline.number} does not form, stage {stages} has not joined yet")


async def _join(
    pipeline: Pipeline,
    index: int,
    stub: worker_pb2_grpc.WorkerServiceStub,
    wants_kept_blocks: bool,
) -> worker_pb2.JoinPipelineResponse:
    request = worker_pb2.JoinPipelineRequest(
        pipeline_id=pipeline.pipeline_id,
        epoch=pipeline.epoch,
        stage_index=index,
        members=[member.address for member in pipeline.members],
        rendezvous_address=pipeline.first.rendezvous_address,
        tp_size=pipeline.first.tp_size,
        n_kv_blocks=pipeline.n_kv_blocks,
        wants_kept_blocks=wants_kept_blocks,
    )
    try:
        answer: worker_pb2.JoinPipelineResponse
        answer = await stub.JoinPipeline(request, timeout=JOIN_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise _not_formed(index, error.details()) from error
    return answer


def _not_formed(index: int, why: str | None) -> PipelineLost:
    return PipelineLost(f"the pipeline did not form: stage {index}: {why}")
