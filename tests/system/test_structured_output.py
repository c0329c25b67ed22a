"""Outputs keep the formats that they are asked for, in batches with others, on one and two
stages, streamed and whole."""

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from tests.limits import HANG_S
from tests.system.stack import Stack

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["orca", "narwhal", "right whale"]},
        "depth": {"type": "integer", "minimum": -99, "maximum": 99},
        "calls": {"type": "array", "items": {"enum": ["a", "é", 7, None]}, "maxItems": 3},
    },
    "required": ["kind", "depth", "calls"],
    "additionalProperties": False,
}
PATTERN = r"(ab|c){2,5}-[0-9]{3}"
CHOICES = ["yes", "no", "ünsure"]
MAX_TOKENS = 120


def keeps_schema(text: str) -> bool:
    answer = json.loads(text)
    return (
        list(answer) == SCHEMA["required"]
        and answer["kind"] in SCHEMA["properties"]["kind"]["enum"]
        and isinstance(answer["depth"], int)
        and -99 <= answer["depth"] <= 99
        and len(answer["calls"]) <= 3
        and all(call in ["a", "é", 7, None] for call in answer["calls"])
    )


Keeps = Callable[[str], object]

FORMATS: list[tuple[dict[str, Any], Keeps]] = [
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA},
            }
        },
        keeps_schema,
    ),
    ({"regex": PATTERN}, lambda text: re.fullmatch(PATTERN, text)),
    ({"guided_choice": CHOICES}, lambda text: text in CHOICES),
]


def whole(stack: Stack, body: dict[str, Any]) -> list[tuple[str, str]]:
    """Texts of the answers, and why each ended."""
    response = stack.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    return [(choice["text"], choice["finish_reason"]) for choice in response.json()["choices"]]


def streamed(stack: Stack, body: dict[str, Any]) -> list[tuple[str, str]]:
    """Texts of the answers of a stream, and why each ended."""
    texts, reasons = [""] * body["n"], [""] * body["n"]
    url = f"{stack.http}/v1/completions"
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=HANG_S) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                texts[choice["index"]] += choice["text"]
                reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    return list(zip(texts, reasons, strict=True))


def ask(stack: Stack, number: int, format_: tuple[dict[str, Any], Keeps]) -> None:
    """Asks for four answers, which keep the format."""
    fields, keeps = format_
    body = {"prompt": "whale " * number, "n": 4, "temperature": 1.0, "seed": number}
    body |= {"max_tokens": MAX_TOKENS, **fields}
    for text, reason in (streamed if number % 2 else whole)(stack, body):
        assert reason == "stop", text
        assert keeps(text), text


def ask_plain(stack: Stack, number: int) -> list[int]:
    answer = stack.complete("a small whale", max_tokens=12, temperature=1.0, seed=number)
    token_ids: list[int] = answer["token_ids"]
    return token_ids


@pytest.mark.parametrize(
    "stages", ["one_stage", pytest.param("two_stages", marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize(
    "formats",
    [
        pytest.param(FORMATS, id="12"),
        pytest.param(FORMATS[:1] * 50, id="200", marks=pytest.mark.thorough),
    ],
)
def test_every_answer_keeps_its_format(
    request: pytest.FixtureRequest, formats: list[tuple[dict[str, Any], Keeps]], stages: str
) -> None:
    stack: Stack = request.getfixturevalue(stages)
    plain = [ask_plain(stack, number) for number in range(3)]
    with ThreadPoolExecutor(8) as threads:
        asked = [
            threads.submit(ask, stack, number, format_)
            for number, format_ in enumerate(formats, start=1)
        ]
        assert list(threads.map(partial(ask_plain, stack), range(3))) == plain
        for one in asked:
            one.result()


TOOL = {"type": "function", "function": {"name": "dive", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "surface", "strict": True}}


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        pytest.param("required", "tool_calls", id="required", marks=pytest.mark.thorough),
        pytest.param(TOOL, "stop", id="named"),
    ],
)
def test_tool_that_must_be_called_is_called(two_stages: Stack, choice: Any, reason: str) -> None:
    body = {
        "messages": [{"role": "user", "content": "where is the whale"}],
        "tools": [TOOL] if reason == "tool_calls" else [TOOL, OTHER],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "n": 4,
        "temperature": 1.0,
        "max_tokens": 2 * MAX_TOKENS,
    }
    response = two_stages.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    for answer in response.json()["choices"]:
        assert answer["finish_reason"] == reason
        assert answer["message"]["content"] is None
        (call,) = answer["message"]["tool_calls"]
        assert call["function"]["name"] == "dive"
        assert keeps_schema(call["function"]["arguments"])
