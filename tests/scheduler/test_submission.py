"""Requests as the scheduler makes them of submissions."""

import pytest
from orcinus.v1 import scheduler_pb2

from services.common.sampling import SamplingParams
from services.scheduler.submission import to_request


@pytest.mark.parametrize(
    ("sampling", "has_drafts"),
    [
        (SamplingParams(), True),
        (SamplingParams(bad_token_ids=(5,)), True),
        (SamplingParams(bad_words=((5, 6),)), False),
        (SamplingParams(frequency_penalty=1), False),
        (SamplingParams(grammar="start: /a/"), False),
    ],
    ids=["plain", "tokens", "words", "penalty", "grammar"],
)
def test_requests_that_look_at_earlier_tokens_have_no_drafts(
    sampling: SamplingParams, has_drafts: bool
) -> None:
    submission = scheduler_pb2.Submission(request_id="r", prompt_token_ids=[1], max_new_tokens=4)
    request = to_request(submission, sampling, account=None, now=0)
    assert (request.speculation is not None) == has_drafts
