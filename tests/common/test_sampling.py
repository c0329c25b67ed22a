"""The definition of how tokens are chosen: its ranges, and its way to the wire and back."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from orcinus.v1 import inference_pb2, sampling_pb2

from services.common.errors import InvalidRequest
from services.common.sampling import (
    OPTIONS,
    Numbers,
    SamplingParams,
    Texts,
    TokenBiases,
    TokenLists,
    TokenSequences,
    WholeNumbers,
)
from services.common.sampling_proto import from_proto, to_proto
from services.frontend.http.openai.completion_request import CompletionBody
from services.frontend.request.generation_request import GenerationOptions

DEFAULTS = SamplingParams(seed=0)


def ends_and_beyond(name: str) -> tuple[list[Any], list[Any]]:
    """Values of an option that are just allowed, and values that are just not."""
    match OPTIONS[name].allowed:
        case Numbers(low, high):
            below, above = math.nextafter(low, -math.inf), math.nextafter(high, math.inf)
            inside = [math.nextafter(low, high), high]
            outside = [below, above, math.nan, -math.inf, math.inf, True]
            return [low, *inside], outside
        case WholeNumbers(low, high):
            return [low, high], [low - 1, high + 1, math.nan, True]
        case TokenLists(max_length):
            return [(), (5,) * max_length], [(5,) * (max_length + 1)]
        case TokenSequences(max_tokens):
            return [(), ((5,) * max_tokens,), ((5,),) * max_tokens], [
                ((5,) * max_tokens, (6,)), ((5,), ())
            ]  # fmt: skip
        case Texts(max_length):
            return ["", "x" * max_length], ["x" * (max_length + 1)]
        case TokenBiases(max_length, low, high):
            most = tuple((token_id, low) for token_id in range(max_length))
            beyond = [((5, math.nextafter(high, math.inf)),), ((5, math.nan),), ((5, 1), (5, 2))]
            return [(), most, ((5, high),)], [(*most, (max_length, low)), *beyond]


ALLOWED = [(name, value) for name in OPTIONS for value in ends_and_beyond(name)[0]]
REFUSED = [(name, value) for name in OPTIONS for value in ends_and_beyond(name)[1]]


def label(value: object) -> str:
    return str(value)[:24]


def values(name: str) -> st.SearchStrategy[Any]:
    """Every value of an option that its field on the wire can hold."""
    match OPTIONS[name].allowed:
        case Numbers():
            return st.floats(width=32, allow_nan=False)
        case WholeNumbers(low, high):
            return st.integers(low, high)
        case TokenLists():
            return st.lists(st.integers(-(2**31), 2**31 - 1)).map(tuple)
        case TokenSequences():
            return st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1).map(tuple)).map(
                tuple
            )
        case Texts():
            return st.text()
        case TokenBiases():
            pairs = st.dictionaries(
                st.integers(-(2**31), 2**31 - 1), st.floats(width=32, allow_nan=False)
            )
            return pairs.map(lambda given: tuple(sorted(given.items())))


PARAMS = st.builds(SamplingParams, **{name: values(name) for name in OPTIONS})


@pytest.mark.parametrize(("name", "value"), ALLOWED, ids=label)
def test_both_ends_of_a_range_are_allowed(name: str, value: Any) -> None:
    SamplingParams(**{name: value}).check()


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=label)
def test_whatever_lies_beyond_a_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value}).check()
    assert caught.value.field.partition(".")[0] == name


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", 2.5, "must be a number from 0 to 2"),
        ("top_p", 1.5, "must be a number from 0 to 1"),
        ("repetition_penalty", 9.0, "must be a number from 0.125 to 8"),
        ("top_k", -2, "must be a whole number from -1 to 2147483647"),
        ("stop_token_ids", (1,) * 300, "has 300 tokens, 256 at most"),
    ],
)
def test_errors_say_what_is_allowed(name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value}).check()
    assert caught.value.message == f"{name}: {message}"


def test_defaults_are_allowed() -> None:
    SamplingParams().check()


def test_the_seed_is_random_by_default() -> None:
    assert len({SamplingParams().seed for _ in range(8)}) == 8


@given(params=PARAMS)
def test_the_wire_changes_nothing(params: SamplingParams) -> None:
    data = to_proto(params).SerializeToString()
    assert from_proto(sampling_pb2.SamplingParams.FromString(data)) == params


@given(params=PARAMS)
def test_the_wire_has_every_option_that_is_set(params: SamplingParams) -> None:
    sent = {field.name for field, _ in to_proto(params).ListFields()}
    lists = (TokenLists, TokenBiases, TokenSequences)  # which are not there when they are empty
    assert sent >= {
        name for name, option in OPTIONS.items() if not isinstance(option.allowed, lists)
    }


def test_what_the_wire_does_not_have_is_the_default() -> None:
    read = from_proto(sampling_pb2.SamplingParams())
    assert dataclasses.replace(read, seed=0) == DEFAULTS
    assert from_proto(sampling_pb2.SamplingParams(seed=0, temperature=0)) == dataclasses.replace(
        DEFAULTS, temperature=0
    )


def test_protos_and_bodies_have_the_fields_of_the_definition() -> None:
    assert {field.name for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields} == OPTIONS.keys()
    assert CompletionBody.model_fields.keys() >= OPTIONS.keys() - {"grammar"}
    over_grpc = {field.name for field in inference_pb2.GenerationOptions.DESCRIPTOR.fields}
    named = {field.name for field in dataclasses.fields(GenerationOptions)}
    spelled = {"max_tokens_field", "format_field", "format_schema", "logprobs_field"}
    counts = {"n_logprobs", "n_prompt_logprobs"}
    derived = {  # or fields of requests for vectors
        "defaulted",
        "default_max_tokens",
        "is_receipt_optional",
        "truncate_prompt_tokens",
        "wants_score",
        "wants_vector",
    }
    # A format becomes a grammar.
    in_other_words = {"format", "logprobs", "prompt_logprobs"}
    assert over_grpc == named - spelled - counts - derived | in_other_words


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option.column])
def test_columns_hold_whatever_is_allowed(name: str) -> None:
    option = OPTIONS[name]
    assert option.column is not None
    for value in ends_and_beyond(name)[0]:
        assert np.dtype(option.column).type(value) == pytest.approx(value)


@pytest.mark.parametrize(
    ("given", "is_greedy", "has_penalty"),
    [
        ({}, False, False),
        ({"temperature": 0}, True, False),
        ({"temperature": 0, "top_k": 5, "min_p": 0.5}, True, False),
        ({"temperature": 0, "min_tokens": 1}, False, False),
        ({"temperature": 0, "presence_penalty": 0.5}, False, True),
        ({"temperature": 0, "frequency_penalty": -0.5}, False, True),
        ({"temperature": 0, "repetition_penalty": 1.5}, False, True),
        ({"temperature": 0, "logit_bias": ((5, 1.0),)}, False, False),
        ({"temperature": 0, "allowed_token_ids": (5,)}, False, False),
        ({"temperature": 0, "bad_token_ids": (5,)}, False, False),
        ({"temperature": 0, "bad_words": ((5, 6),)}, False, False),
        ({"temperature": 0, "grammar": "start: /a/"}, False, False),
    ],
    ids=str,
)
def test_greedy_is_the_argmax_alone(
    given: dict[str, Any], is_greedy: bool, has_penalty: bool
) -> None:
    params = SamplingParams(**given)
    assert (params.is_greedy, params.has_penalty) == (is_greedy, has_penalty)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"stop_token_ids": (10,)}, "stop_token_ids"),
        ({"logit_bias": ((3, 1.0), (10, 1.0))}, "logit_bias"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias"),
        ({"allowed_token_ids": (3, 10)}, "allowed_token_ids"),
        ({"bad_token_ids": (-1,)}, "bad_token_ids"),
        ({"bad_words": ((1, 10),)}, "bad_words"),
        ({"bad_words": ((-1, 1),)}, "bad_words"),
        ({"bad_words": tuple((9, token) for token in range(10))}, "bad_words"),
        ({"allowed_token_ids": (3, 4), "bad_words": ((3, 4), (3,))}, "allowed_token_ids"),
        ({"allowed_token_ids": (3,), "bad_words": ((3, 3),)}, "allowed_token_ids"),
        ({"allowed_token_ids": (3, 4), "bad_token_ids": (4, 3, 5)}, "allowed_token_ids"),
        (
            {"allowed_token_ids": (3,), "stop_token_ids": (3,), "min_tokens": 1},
            "allowed_token_ids",
        ),
        ({"bad_token_ids": tuple(range(10))}, "bad_token_ids"),
        (
            {"bad_token_ids": (1,), "stop_token_ids": (0, *range(2, 10)), "min_tokens": 1},
            "stop_token_ids",
        ),
    ],
    ids=str,
)
def test_a_token_of_the_vocabulary_can_always_be_sampled(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**given).check_vocabulary(10)
    assert caught.value.field == field


def test_rules_for_tokens_of_the_vocabulary_are_allowed() -> None:
    SamplingParams(
        stop_token_ids=(3, 99),
        logit_bias=((9, 1.0),),
        allowed_token_ids=(0, 3),
        bad_token_ids=(3,),
        min_tokens=1,
    ).check_vocabulary(10, own_stop_token_ids=(99,))
