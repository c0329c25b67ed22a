"""What a rank reports of tokens and log-probabilities: spans that are broken are named."""

from collections.abc import Sequence

import pytest
import torch
from orcinus.v1 import worker_pb2

from services.worker.engine.logprobs import BatchLogprobs, LogprobColumns, LogprobSpan
from services.worker.engine.pooled_requests import BatchVectors
from services.worker.rank.reported_tokens import ReportedTokens, reported


def plan(
    sample: Sequence[bool], drafts: Sequence[Sequence[int]] = ()
) -> worker_pb2.RunIterationsRequest:
    """Spans of one token, or of one token and drafts."""
    n_drafts = [len(draft) for draft in drafts]
    return worker_pb2.RunIterationsRequest(
        sample=sample,
        n_tokens=[1 + n for n in n_drafts or [0] * len(sample)],
        n_drafts=n_drafts if any(n_drafts) else (),
        token_on_rank=[False] * len(sample),
        token_ids=[token for draft in drafts for token in (5, *draft)],
    )


def logprobs_of(*values: tuple[int, float]) -> BatchLogprobs:
    """A log-probability for each pair of a span and a number."""
    n = len(values)
    columns = LogprobColumns(
        torch.tensor([number for _, number in values]),
        torch.ones(n, dtype=torch.int64),
        torch.zeros(n, 0, dtype=torch.int64),
        torch.zeros(n, 0),
    )
    return BatchLogprobs(tuple(LogprobSpan(span, 1, 0, None) for span, _ in values), columns)


def test_places_are_those_among_all_spans() -> None:
    tokens = reported([7, -1, 8], None, plan([True, False, True, True]))
    assert tokens == ReportedTokens([7, 0, 8], [2], [])


def test_a_token_after_a_wrong_draft_breaks_nothing() -> None:
    message = plan([True, False, True], [[3, 4], [], [3, 4]])
    tokens = reported([3, 9, -1, 3, -1, 6], None, message)
    assert tokens == ReportedTokens([3, 9, 0, 3, 0, 6], [2], [])


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_log_probability_that_is_not_finite_breaks_its_span(wrong: float) -> None:
    logprobs = logprobs_of((0, -1.0), (1, wrong), (2, -2.0))
    tokens = reported([7, 8], logprobs, plan([True, False, True]))
    assert (tokens.token_ids, tokens.broken) == ([7, 8], [1])
    assert [one.of.span for one in tokens.logprobs] == [0, 2]


def test_a_vector_that_is_not_finite_breaks_its_span() -> None:
    message = plan([False, True, False], [[], [], []])
    values = torch.tensor([[1.0, float("nan")], [2.0, 3.0]])
    found = reported([7], None, message, BatchVectors((0, 2), values))
    assert (found.token_ids, found.broken) == ([7], [0])
    assert [(span, vector.tolist()) for span, vector in found.vectors] == [(2, [2.0, 3.0])]
