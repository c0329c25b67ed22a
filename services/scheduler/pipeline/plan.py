"""The plan of an iteration: the message in which a batch is sent to the ranks (Orca's control
message).

A plan has packed columns of data that the ranks do not have yet. The admission of a request is sent
once; from then on the request is a row in the ranks' tables. Tokens and blocks are sent once.
"""

from collections.abc import Sequence
from itertools import chain, compress

from orcinus.v1 import trace_pb2, worker_pb2

from services.scheduler.core.batch import Batch, Span
from services.scheduler.core.request import Request
from services.scheduler.pipeline.cache_changes import tell_changes
from services.scheduler.pipeline.membership import Pipeline


def plan_of(
    batch: Batch, pipeline: Pipeline, trace: trace_pb2.TraceContext | None = None
) -> worker_pb2.RunIterationsRequest:
    """Returns the plan of a batch. `trace` is the context of the iteration's span, if the iteration
    is recorded."""
    columns, n_groups = batch.columns, len(pipeline.kv_windows)
    rows = _rows(columns.requests)
    plan = worker_pb2.RunIterationsRequest(
        pipeline_id=pipeline.pipeline_id,
        epoch=pipeline.epoch,
        iteration=batch.iteration,
        released_rows=batch.released_rows,
        trace=trace,
        row=rows,
        start_position=columns.start_positions,
        n_tokens=columns.n_tokens,
        sample=columns.is_sampled,
        n_new_blocks=[len(ids) // n_groups if ids else 0 for ids in columns.new_block_ids],
        token_on_rank=[not known for known in columns.token_ids],
        token_ids=list(chain.from_iterable(columns.token_ids)),
        new_block_ids=list(chain.from_iterable(columns.new_block_ids)),
    )
    tell_changes(batch.cache_changes, plan)
    if batch.n_drafts:
        plan.n_drafts.extend(columns.n_drafts)
    for row, span in compress(zip(rows, batch.spans, strict=True), columns.is_admission):
        admission = plan.admissions.add(row=row, n_prompt_tokens=span.request.n_prompt_tokens)
        admission.sampling.MergeFromString(span.request.sampling)
        admission.grammar_digest = span.request.grammar_digest or b""
        admission.adapter_digest = span.request.adapter
        admission.wants_vector = span.request.wants_vector
        if span.start_position:
            admission.stored_token_ids.extend(span.request.span(0, span.start_position))
        _ask_logprobs(admission, span.request)
    for span in compress(batch.spans, columns.token_ids):  # others are behind the prompt
        if span.request.n_prompt_logprobs is not None:
            plan.next_token_ids.extend(_next_token_ids(span))
    return plan


def _ask_logprobs(admission: worker_pb2.Admission, request: Request) -> None:
    if request.n_logprobs is not None:
        admission.n_logprobs = request.n_logprobs
    if request.wants_prompt_logprobs:
        admission.n_prompt_logprobs = request.n_prompt_logprobs or 0


def _next_token_ids(span: Span) -> Sequence[int]:
    """Returns the prompt token after a span, if the request asks for log-probabilities of its
    prompt. The rank needs this token to compute its log-probability, and has not received it yet.
    Returns no token if the span ends at or after the end of the prompt."""
    end, prompt = span.start_position + span.n_tokens, span.request.prompt_token_ids
    return prompt[end : end + 1] if span.request.wants_prompt_logprobs else ()


def _rows(requests: Sequence[Request]) -> list[int]:
    """Returns the row of each request in the ranks' tables.

    Raises:
        ValueError: a request has no row.
    """
    rows = [one.reservation.row for one in requests if one.reservation is not None]
    if len(rows) < len(requests):
        raise ValueError("a request runs without a reservation")
    return rows
