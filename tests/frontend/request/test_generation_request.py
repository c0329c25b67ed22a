"""Every rule that a request must keep, and the field that an error names."""

import math
from dataclasses import replace
from typing import Any

import pytest

from services.common import errors
from services.common.sampling import MAX_STOP_TOKENS, OPTIONS, SamplingParams
from services.frontend.request.conversation import ChatMessage, Conversation
from services.frontend.request.generation_request import (
    MAX_ANSWERS,
    MAX_N,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    GenerationOptions,
    GenerationRequest,
)
from services.frontend.request.limits import ModelLimits
from services.frontend.request.pipeline import ServedPipeline

LIMITS = ModelLimits(
    ServedPipeline(model="m", vocab_size=100, max_model_len=32, eos_token_ids=(1, 2))
)

WRONG: list[tuple[str, Any]] = [
    ("max_tokens", -1),
    ("max_tokens", True),
    ("max_tokens", 2**31),
    ("min_tokens", -1),
    ("min_tokens", True),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", True),
    ("top_k", -2),
    ("top_k", 2**31),
    ("top_p", -1e-6),
    ("top_p", 1.1),
    ("top_p", math.nan),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", math.nan),
    ("presence_penalty", -2.1),
    ("presence_penalty", 2.1),
    ("presence_penalty", True),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", 2.1),
    ("frequency_penalty", math.nan),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 0.12),
    ("repetition_penalty", 8.1),
    ("repetition_penalty", math.nan),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", True),
    ("n", 0),
    ("n", MAX_N + 1),
    ("n", True),
    ("stop", ("",)),
    ("stop", ("x" * (MAX_STOP_LENGTH + 1),)),
    ("stop", ("x",) * (MAX_STOPS + 1)),
    ("stop_token_ids", (5,) * (MAX_STOP_TOKENS + 1)),
]

RIGHT: list[tuple[str, Any]] = [
    ("max_tokens", 0),
    ("temperature", 0.0),
    ("temperature", 2.0),
    ("top_k", -1),
    ("top_k", 0),
    ("top_k", 1),
    ("top_p", 1.0),
    ("top_p", 0.0),
    ("min_p", 0.0),
    ("min_p", 1.0),
    ("presence_penalty", -2.0),
    ("presence_penalty", 2.0),
    ("frequency_penalty", -2.0),
    ("frequency_penalty", 2.0),
    ("repetition_penalty", 0.125),
    ("repetition_penalty", 8.0),
    ("seed", -(2**63)),
    ("seed", 2**63 - 1),
    ("n", MAX_N),
    ("stop", ("x" * MAX_STOP_LENGTH,) * MAX_STOPS),
    ("stop_token_ids", (5,) * MAX_STOP_TOKENS),
]


def options(**given: Any) -> GenerationOptions:
    sampling = {name: given.pop(name) for name in OPTIONS if name in given}
    return GenerationOptions(**given, sampling=SamplingParams(**sampling))


@pytest.mark.parametrize(
    ("field", "value"), WRONG, ids=[f"{field}={str(value)[:20]}" for field, value in WRONG]
)
def test_value_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        options(**{field: value}).check()
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"), RIGHT, ids=[f"{field}={str(value)[:20]}" for field, value in RIGHT]
)
def test_value_at_the_edge_is_accepted(field: str, value: Any) -> None:
    given = options(**{field: value})
    given.check()
    assert getattr(given.sampling if field in OPTIONS else given, field) == value


def test_limit_is_named_as_the_client_spells_it() -> None:
    given = options(max_tokens=0, max_tokens_field="max_completion_tokens")
    chat = Conversation((ChatMessage("user", "x"),))
    GenerationRequest(prompts=("x", (1,)), options=given).check()
    with pytest.raises(errors.InvalidRequest) as caught:
        GenerationRequest(prompts=(chat,), options=given).check()
    assert caught.value.field == "max_completion_tokens"


def test_seed_is_drawn_for_each_request() -> None:
    seeds = {GenerationRequest(prompts=("a",)).options.sampling.seed for _ in range(8)}
    assert len(seeds) == 8


@pytest.mark.parametrize(
    ("prompts", "n"), [((), 1), (("a",) * (MAX_ANSWERS // 2 + 1), 2)], ids=["none", "too-many"]
)
def test_number_of_prompts_is_checked(prompts: tuple[str, ...], n: int) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        GenerationRequest(prompts=prompts, options=options(n=n)).check()
    assert caught.value.field == "prompt"


def test_another_model_is_refused() -> None:
    LIMITS.check_model("")
    LIMITS.check_model("m")
    with pytest.raises(errors.InvalidRequest) as caught:
        LIMITS.check_model("gpt-5")
    assert caught.value.field == "model"


@pytest.mark.parametrize(
    "token_ids", [(), (100,), (-1,), (0,) * 32], ids=["empty", "above", "below", "too-long"]
)
def test_prompt_that_the_model_cannot_read_is_refused(token_ids: tuple[int, ...]) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        LIMITS.check_prompt("messages", token_ids)
    assert caught.value.field == "messages"


def test_prompt_may_leave_room_for_a_single_token() -> None:
    LIMITS.check_prompt("prompt", (0,) * 31)
    assert LIMITS.max_new_tokens(options(), n_prompt=31, is_chat=False) == 1


@pytest.mark.parametrize(
    ("is_chat", "n_prompt", "expected"),
    [(False, 4, 16), (False, 30, 2), (True, 4, 28)],
    ids=["text", "text-near-the-end", "chat"],
)
def test_default_of_max_tokens(is_chat: bool, n_prompt: int, expected: int) -> None:
    assert LIMITS.max_new_tokens(options(), n_prompt=n_prompt, is_chat=is_chat) == expected


@pytest.mark.parametrize("is_chat", [False, True], ids=["text", "chat"])
@pytest.mark.parametrize(("wanted", "given"), [(27, 27), (28, 28), (29, 28), (2**31 - 1, 28)])
def test_max_tokens_are_an_upper_bound(is_chat: bool, wanted: int, given: int) -> None:
    asked = options(max_tokens=wanted)
    assert LIMITS.max_new_tokens(asked, n_prompt=4, is_chat=is_chat) == given


@pytest.mark.parametrize("is_chat", [False, True], ids=["text", "chat"])
def test_max_tokens_that_do_not_fit_are_refused_if_they_are_strict(is_chat: bool) -> None:
    strict = replace(LIMITS, strict_max_tokens=True)
    asked = options(max_tokens=28, max_tokens_field="max_output_tokens")
    assert strict.max_new_tokens(asked, n_prompt=4, is_chat=is_chat) == 28
    assert strict.max_new_tokens(options(), n_prompt=31, is_chat=is_chat) == 1
    with pytest.raises(errors.ContextOverflow, match="maximum context length is 32 tokens") as got:
        strict.max_new_tokens(asked, n_prompt=5, is_chat=is_chat)
    assert got.value.field == "max_output_tokens"
    assert (got.value.n_prompt, got.value.n_answer, got.value.context) == (5, 28, 32)


def test_min_tokens_above_max_tokens_are_refused() -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        LIMITS.max_new_tokens(options(max_tokens=4, min_tokens=5), n_prompt=4, is_chat=False)
    assert caught.value.field == "min_tokens"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (options(), (1, 2)),
        (options(ignore_eos=True), ()),
        (options(stop_token_ids=(5, 2)), (1, 2, 5)),
        (options(stop_token_ids=(5,), ignore_eos=True), (5,)),
    ],
    ids=["models", "ignored", "both", "clients"],
)
def test_stop_tokens_are_the_models_and_the_clients(
    given: GenerationOptions, expected: tuple[int, ...]
) -> None:
    assert LIMITS.stop_token_ids(given) == expected


@pytest.mark.parametrize("token_id", [-1, 100])
def test_stop_token_outside_the_vocabulary_is_refused(token_id: int) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        LIMITS.stop_token_ids(options(stop_token_ids=(token_id,)))
    assert caught.value.field == "stop_token_ids"
