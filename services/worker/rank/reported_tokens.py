"""Selects what a rank reports about the sampled tokens and the vectors of an iteration.

A sampled token of -1 stands for logits that are not finite. Its span is *broken*, and so is a span
with a log-probability or an element of its vector that is not finite. The request of a broken span
fails, and no other request is affected. The tokens that were sampled after a rejected draft are not
used, so they break no span.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from orcinus.v1 import worker_pb2

from services.worker.engine.logprobs import BatchLogprobs, ReportedSpan
from services.worker.engine.pooled_requests import BatchVectors

ReportedVector = tuple[int, NDArray[np.float32]]
"""Type of a pair: the index of a span, and the vector (embedding or scores) [n_values] of the
prompt that ends with the span."""


@dataclass(frozen=True, slots=True)
class ReportedTokens:
    """The report of a rank about an iteration: its sampled tokens, log-probabilities and
    vectors."""

    token_ids: Sequence[int]
    """The tokens, with 0 in place of each -1."""
    broken: list[int] = field(default_factory=list)
    """Indices of the broken spans among all spans of the plan, in ascending order."""
    logprobs: Sequence[ReportedSpan] = ()
    """Log-probabilities of the spans that are not broken."""
    vectors: Sequence[ReportedVector] = ()
    """Vectors of the spans that are not broken."""


def reported(
    sampled: torch.Tensor | list[int],
    logprobs: BatchLogprobs | None,
    message: worker_pb2.RunIterationsRequest,
    vectors: BatchVectors | None = None,
) -> ReportedTokens:
    """Returns the report about the `sampled` tokens, the `logprobs` and the `vectors` of the
    iteration that ran the plan `message`."""
    token_ids = sampled if isinstance(sampled, list) else sampled.tolist()
    if min(token_ids, default=0) >= 0 and logprobs is None and vectors is None:  # usual
        return ReportedTokens(token_ids)
    broken = set(_broken_spans(token_ids, message))
    spans = [] if logprobs is None else list(logprobs.by_span())
    broken.update(one.of.span for one in spans if not np.isfinite(one.logprobs).all())
    pooled = [] if vectors is None else list(vectors.by_span())
    broken.update(span for span, values in pooled if not np.isfinite(values).all())
    return ReportedTokens(
        [max(0, token_id) for token_id in token_ids],
        sorted(broken),
        [one for one in spans if one.of.span not in broken],
        tuple((span, values) for span, values in pooled if span not in broken),
    )


def _broken_spans(token_ids: Sequence[int], message: worker_pb2.RunIterationsRequest) -> list[int]:
    """Returns the indices of the spans with a sampled token of -1. Tokens after a rejected draft
    are not considered."""
    least = token_ids
    if message.n_drafts:
        least = least_used(token_ids, _sampled_drafts(message))
    sampled_spans = [place for place, is_sampled in enumerate(message.sample) if is_sampled]
    return [place for place, one in zip(sampled_spans, least, strict=True) if one < 0]


def least_used(token_ids: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[int]:
    """Returns, for each sampled span, the smallest of its sampled tokens. Tokens after the first
    rejected draft are not considered.

    `drafts` has the drafted tokens of each sampled span. A span has one more sampled token than
    drafts.
    """
    least, end = [], 0
    for draft in drafts:
        start, end = end, end + 1 + len(draft)
        sampled = token_ids[start:end]
        n_right = next((i for i, one in enumerate(draft) if one != sampled[i]), len(draft))
        least.append(min(sampled[: n_right + 1]))
    return least


def _sampled_drafts(message: worker_pb2.RunIterationsRequest) -> list[Sequence[int]]:
    """Returns, for each sampled span of a plan, the tokens of its drafts."""
    drafts: list[Sequence[int]] = []
    end = 0
    columns = zip(
        message.n_tokens, message.n_drafts, message.token_on_rank, message.sample, strict=True
    )
    for n_tokens, n_drafts, is_left_out, is_sampled in columns:
        end += 0 if is_left_out else n_tokens
        if is_sampled:
            drafts.append(message.token_ids[end - n_drafts : end])
    return drafts
