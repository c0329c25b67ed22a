"""Answers as far as a client has them, and how they go on."""

import time
from typing import Any

import pytest

from services.common import errors
from services.frontend.request.finish_reason import FinishReason
from services.frontend.request.generation_request import GenerationOptions, GenerationRequest
from services.frontend.request.request_id import created_at, is_request_id, new_request_id
from services.frontend.request.resumption import AnswerSoFar, Resumption

LIMITS: dict[str, Any] = {"max_new_tokens": 3, "stop_token_ids": (1, 2)}


@pytest.mark.parametrize(
    ("token_ids", "ending"),
    [
        ((), None),
        ((5, 6), None),
        ((5, 6, 7), FinishReason.LENGTH),
        ((5, 1), FinishReason.STOP),
        ((5, 6, 2), FinishReason.STOP),
    ],
    ids=str,
)
def test_tokens_say_how_an_answer_ends(
    token_ids: tuple[int, ...], ending: FinishReason | None
) -> None:
    assert AnswerSoFar(token_ids).ending(**LIMITS) is ending


@pytest.mark.parametrize("token_ids", [(5, 6, 7, 8), (1, 5)], ids=["too many", "after a stop"])
def test_tokens_that_no_answer_has_are_refused(token_ids: tuple[int, ...]) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        AnswerSoFar(token_ids).ending(**LIMITS)
    assert caught.value.field == "resumption.token_ids"


def test_resumed_request_has_the_seed_of_its_stream() -> None:
    resumption = Resumption(request_id=new_request_id(), seed=-3, answers=(AnswerSoFar((5,)),))
    options = GenerationOptions(return_token_ids=True)
    request = GenerationRequest(prompts=("a",), options=options)
    for own_seed in (None, -3):
        resumed = request.resumed(resumption, own_seed=own_seed)
        resumed.check()
        assert resumed.options.sampling.seed == -3
    with pytest.raises(errors.InvalidRequest) as caught:
        request.resumed(resumption, own_seed=3)
    assert caught.value.field == "resumption.seed"


def test_request_ids_differ_and_tell_their_time() -> None:
    before = int(time.time())
    first, second = new_request_id(), new_request_id()
    assert first != second
    assert is_request_id(first)
    assert before <= created_at(first) <= time.time()
