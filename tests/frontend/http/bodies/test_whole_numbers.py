"""Whole numbers with a fraction of zero are read where a whole number is wanted, and only there."""

import json
from typing import Any

import pytest

from services.common import errors
from services.frontend.http.anthropic.request import MessagesBody
from services.frontend.http.bodies.reader import parse_body
from services.frontend.http.openai.chat_request import ChatBody
from services.frontend.http.openai.completion_request import CompletionBody
from services.frontend.http.openai.tokens import DetokenizeBody
from services.frontend.http.responses.request import ResponsesBody

MESSAGES = [{"role": "user", "content": "x"}]
BASES: dict[Any, dict[str, Any]] = {
    ChatBody: {"messages": MESSAGES},
    CompletionBody: {"prompt": "x"},
    MessagesBody: {"messages": MESSAGES, "max_tokens": 5},
    ResponsesBody: {"input": "x"},
    DetokenizeBody: {},
}


def read(kind: Any, **fields: Any) -> Any:
    return parse_body(kind, json.dumps(BASES[kind] | fields).encode())


@pytest.mark.parametrize(
    ("kind", "field", "given", "expected"),
    [
        (ChatBody, "max_tokens", 3.0, 3),
        (ChatBody, "max_completion_tokens", 1e2, 100),
        (ChatBody, "seed", -7.0, -7),
        (ChatBody, "n", 2.0, 2),
        (ChatBody, "top_logprobs", -0.0, 0),
        (CompletionBody, "max_tokens", 0.0, 0),
        (CompletionBody, "stop_token_ids", [1.0, 2, 3.0], [1, 2, 3]),
        (CompletionBody, "prompt", [1.0, 2], ((1, 2),)),
        (CompletionBody, "prompt", [[1], [2.0, 3.0]], ((1,), (2, 3))),
        (MessagesBody, "max_tokens", 3.0, 3),
        (MessagesBody, "top_k", 40.0, 40),
        (ResponsesBody, "max_output_tokens", 3.0, 3),
        (ResponsesBody, "max_tool_calls", 4.0, 4),
        (DetokenizeBody, "tokens", [float(n) for n in range(30_000)], [*range(30_000)]),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_number_without_a_fraction_is_whole(
    kind: Any, field: str, given: Any, expected: Any
) -> None:
    options = {"logprobs": True} if field == "top_logprobs" else {}
    value = getattr(read(kind, **options, **{field: given}), field)
    assert value == expected
    assert isinstance(value, tuple | list) or type(value) is int


def test_several_numbers_are_replaced_at_once() -> None:
    body = read(
        CompletionBody,
        **dict.fromkeys(("max_tokens", "n", "seed", "top_k", "min_tokens", "priority"), 3.0),
        stop_token_ids=[1.0, 2.0],
        allowed_token_ids=[4.0],
        bad_token_ids=[5.0],
    )
    assert (body.max_tokens, body.n, body.seed, body.top_k) == (3, 3, 3, 3)
    assert (body.stop_token_ids, body.allowed_token_ids, body.bad_token_ids) == ([1, 2], [4], [5])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 3.5),
        ("max_tokens", "3"),
        ("max_tokens", True),
        ("max_tokens", 1e30),
        ("stop_token_ids", [1.0, 2.5]),
        ("stop_token_ids", [1.0, "2"]),
        ("stop_token_ids", [False]),
    ],
    ids=str,
)
def test_other_values_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        read(CompletionBody, **{field: value})
    assert caught.value.field.split(".")[0] == field
    assert "a whole number" in caught.value.message


def test_numbers_that_are_not_counts_keep_their_form() -> None:
    schema = {"type": "object", "properties": {"a": {"minimum": 1.0}}}
    tool = {"name": "f", "input_schema": schema}
    body = read(MessagesBody, max_tokens=3.0, temperature=1.0, tools=[tool])
    minimum = body.tools[0].input_schema["properties"]["a"]["minimum"]
    assert (type(minimum), type(body.temperature), body.max_tokens) == (float, float, 3)
