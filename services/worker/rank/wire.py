"""worker.proto to and from the plain records that a rank works with.

The model runner and its inputs know no protobuf, so that they can be driven by a test in three
lines.
"""

from collections.abc import Sequence

from orcinus.v1 import worker_pb2

from services.common.sampling_proto import from_proto
from services.worker.engine.plan import Admission, IterationPlan


def plan_of(message: worker_pb2.RunIterationsRequest) -> IterationPlan:
    """The plan of one iteration."""
    return IterationPlan(
        iteration=message.iteration,
        released_rows=message.released_rows,
        admissions=[_admission(item) for item in message.admissions],
        rows=message.row,
        start_positions=message.start_position,
        n_tokens=message.n_tokens,
        sample=message.sample,
        n_new_blocks=message.n_new_blocks,
        token_on_rank=message.token_on_rank,
        token_ids=message.token_ids,
        new_block_ids=message.new_block_ids,
    )


def result_of(
    place: worker_pb2.JoinPipelineRequest,
    timing: worker_pb2.IterationTiming,
    token_ids: Sequence[int],
) -> worker_pb2.WatchStageResponse:
    """The report of an iteration by the last stage."""
    return worker_pb2.WatchStageResponse(
        pipeline_id=place.pipeline_id,
        epoch=place.epoch,
        result=worker_pb2.IterationResult(
            iteration=timing.iteration, token_ids=token_ids, timing=timing
        ),
    )


def timings_of(
    place: worker_pb2.JoinPipelineRequest, timings: Sequence[worker_pb2.IterationTiming]
) -> worker_pb2.WatchStageResponse:
    """A report of timings."""
    return worker_pb2.WatchStageResponse(
        pipeline_id=place.pipeline_id,
        epoch=place.epoch,
        timings=worker_pb2.StageTimings(timings=timings),
    )


def failure_of(
    place: worker_pb2.JoinPipelineRequest,
    reason: str,
    *,
    iteration: int = 0,
    failed_spans: Sequence[int] = (),
) -> worker_pb2.WatchStageResponse:
    """Returns the report that the epoch cannot go on, and for which spans of an iteration."""
    return worker_pb2.WatchStageResponse(
        pipeline_id=place.pipeline_id,
        epoch=place.epoch,
        failure=worker_pb2.StageFailure(
            reason=reason, iteration=iteration, failed_spans=failed_spans
        ),
    )


def trace_of(
    plan: worker_pb2.RunIterationsRequest,
    timing: worker_pb2.IterationTiming,
    *,
    start_unix_ns: int,
) -> worker_pb2.IterationTrace:
    """Returns the message to the controller about an iteration that is recorded."""
    return worker_pb2.IterationTrace(
        parent=plan.trace,
        epoch=plan.epoch,
        start_unix_ns=start_unix_ns,
        timing=timing,
        n_requests=len(plan.row),
        n_tokens=sum(plan.n_tokens),
    )


def _admission(message: worker_pb2.Admission) -> Admission:
    return Admission(
        row=message.row,
        n_prompt_tokens=message.n_prompt_tokens,
        sampling=from_proto(message.sampling),
    )
