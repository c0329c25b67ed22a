"""Conversions between the messages of worker.proto and the records that a rank uses.

Because of these conversions, the model runner and its inputs do not depend on protobuf, so a test
can run them without messages.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from orcinus.v1 import logprobs_pb2, worker_pb2

from services.common.sampling_proto import from_proto
from services.worker.engine.logprobs import ReportedSpan
from services.worker.engine.plan import Admission, IterationPlan
from services.worker.rank.reported_tokens import ReportedVector

MAX_LOGPROB_NUMBERS = 2**15
"""Largest number of log-probabilities in one message about a span; they take about 250 KiB. A span
with more is split into several messages."""

MAX_REPORT_BYTES = 2**20
"""Largest number of bytes of log-probabilities and vectors in one report, unless one vector alone
is larger. It is a quarter of gRPC's limit for a message."""


def plan_of(message: worker_pb2.RunIterationsRequest) -> IterationPlan:
    """Returns the plan of one iteration from the message that the rank has received."""
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
        next_token_ids=message.next_token_ids,
        n_drafts=message.n_drafts,
    )


def results_of(
    place: worker_pb2.JoinPipelineRequest,
    timing: worker_pb2.IterationTiming,
    token_ids: Sequence[int],
    *,
    cut: Sequence[int] = (),
    broken: Sequence[int] = (),
    logprobs: Sequence[ReportedSpan] = (),
    vectors: Sequence[ReportedVector] = (),
) -> Iterator[worker_pb2.WatchStageResponse]:
    """Yields the reports of the last stage about an iteration. There are several reports if
    log-probabilities and vectors are too large for one."""
    held = worker_pb2.IterationLogprobs(iteration=timing.iteration)
    n_bytes = 0
    pieces: Iterable[worker_pb2.SpanLogprobs | worker_pb2.SpanVector]
    pieces = chain(_logprob_pieces(logprobs), _vector_pieces(vectors))
    for piece in pieces:
        n_piece_bytes = piece.ByteSize()
        if n_bytes and n_bytes + n_piece_bytes > MAX_REPORT_BYTES:
            yield worker_pb2.WatchStageResponse(
                pipeline_id=place.pipeline_id, epoch=place.epoch, logprobs=held
            )
            held, n_bytes = worker_pb2.IterationLogprobs(iteration=timing.iteration), 0
        n_bytes += n_piece_bytes
        if isinstance(piece, worker_pb2.SpanVector):
            held.vectors.append(piece)
        else:
            held.logprobs.append(piece)
    yield worker_pb2.WatchStageResponse(
        pipeline_id=place.pipeline_id,
        epoch=place.epoch,
        result=worker_pb2.IterationResult(
            iteration=timing.iteration,
            token_ids=token_ids,
            timing=timing,
            logprobs=held.logprobs,
            cut=cut,
            broken_spans=broken,
            vectors=held.vectors,
        ),
    )


def _vector_pieces(vectors: Sequence[ReportedVector]) -> Iterator[worker_pb2.SpanVector]:
    for span, values in vectors:
        yield worker_pb2.SpanVector(span=span, vector=values.astype("<f4").tobytes())


def _logprob_pieces(spans: Sequence[ReportedSpan]) -> Iterator[worker_pb2.SpanLogprobs]:
    for columns in spans:
        of = columns.of
        n_at_once = max(1, MAX_LOGPROB_NUMBERS // (1 + of.n_top))
        for start in range(0, of.n_tokens, n_at_once):
            position = None if of.prompt_position is None else of.prompt_position + start
            data = _columns(columns, slice(start, start + n_at_once)).SerializeToString()
            yield worker_pb2.SpanLogprobs(span=of.span, logprobs=data, prompt_position=position)


def _columns(columns: ReportedSpan, rows: slice) -> logprobs_pb2.Logprobs:
    return logprobs_pb2.Logprobs(
        logprobs=columns.logprobs[rows].tolist(),
        ranks=columns.ranks[rows].tolist(),
        top_token_ids=columns.top_ids[rows].ravel().tolist(),
        top_logprobs=columns.top_logprobs[rows].ravel().tolist(),
    )


def timings_of(
    place: worker_pb2.JoinPipelineRequest, timings: Sequence[worker_pb2.IterationTiming]
) -> worker_pb2.WatchStageResponse:
    """Returns a report with the timings of iterations."""
    return worker_pb2.WatchStageResponse(
        pipeline_id=place.pipeline_id,
        epoch=place.epoch,
        timings=worker_pb2.StageTimings(timings=timings),
    )


def adapter_report_of(
    place: worker_pb2.JoinPipelineRequest, report: worker_pb2.AdapterReport
) -> worker_pb2.WatchStageResponse:
    """Returns the message with a report that an adapter has been loaded, or why loading has
    failed."""
    return worker_pb2.WatchStageResponse(
        pipeline_id=place.pipeline_id, epoch=place.epoch, adapter=report
    )


def failure_of(
    place: worker_pb2.JoinPipelineRequest,
    reason: str,
    *,
    iteration: int = 0,
    is_of_neighbour: bool = False,
    is_by_itself: bool = False,
) -> worker_pb2.WatchStageResponse:
    """Returns the report that the epoch has failed. `is_of_neighbour` means that another rank is
    lost and this rank has not failed. `is_by_itself` means that this rank failed without being
    stopped or killed from outside. `iteration` is the number of the iteration that this rank
    computed when it failed, or 0 if the number is unknown."""
    return worker_pb2.WatchStageResponse(
        pipeline_id=place.pipeline_id,
        epoch=place.epoch,
        failure=worker_pb2.StageFailure(
            reason=reason,
            iteration=iteration,
            is_of_neighbour=is_of_neighbour,
            is_by_itself=is_by_itself,
        ),
    )


def trace_of(
    plan: worker_pb2.RunIterationsRequest,
    number: int,
    timing: worker_pb2.IterationTiming,
    *,
    start_unix_ns: int,
) -> worker_pb2.IterationTrace:
    """Returns the message to the controller with the timings of an iteration that is traced.
    `number` is the place of the plan among all messages of the epoch, from 1."""
    return worker_pb2.IterationTrace(
        parent=plan.trace,
        epoch=plan.epoch,
        start_unix_ns=start_unix_ns,
        timing=timing,
        n_requests=len(plan.row),
        n_tokens=sum(plan.n_tokens),
        message_number=number,
    )


def _admission(message: worker_pb2.Admission) -> Admission:
    return Admission(
        row=message.row,
        n_prompt_tokens=message.n_prompt_tokens,
        sampling=from_proto(message.sampling),
        n_logprobs=message.n_logprobs if message.HasField("n_logprobs") else None,
        n_prompt_logprobs=(
            message.n_prompt_logprobs if message.HasField("n_prompt_logprobs") else None
        ),
        stored_token_ids=message.stored_token_ids,
        grammar_digest=message.grammar_digest,
        adapter=message.adapter_digest,
        wants_vector=message.wants_vector,
    )
