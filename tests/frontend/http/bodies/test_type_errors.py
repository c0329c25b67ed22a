"""What is wrong with a body, in our words: every field, with values of every wrong type."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from services.common import errors
from services.frontend.http.bodies.reader import parse_body
from services.frontend.http.bodies.type_errors import OTHER
from services.frontend.http.docs import openapi
from services.frontend.http.openai.chat_request import ChatBody
from services.frontend.http.openai.completion_request import CompletionBody
from services.frontend.http.openai.tokens import DetokenizeBody, TokenizeBody
from services.frontend.http.routes import ROUTES

SCHEMAS = openapi.document(ROUTES, needs_key=False)["components"]["schemas"]
USER = {"role": "user", "content": "hi"}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "CompletionBody": (CompletionBody, {"prompt": "x"}),
    "ChatBody": (ChatBody, {"messages": [USER]}),
    "TokenizeBody": (TokenizeBody, {"prompt": "x"}),
    "DetokenizeBody": (DetokenizeBody, {"tokens": [1]}),
}
VALUES: list[Any] = [
    *(None, True, 5, -1, 0.5, 10**30, "x", "", [], {}, [5], ["x"], [None], [[]], [{}]),
    *({"a": 1}, {"type": 1}, {"type": "odd"}, {"type": "text"}, {"type": "json_schema"}),
    *([{"type": "odd"}], ["x", 5], [["x"]], [True], [0.5]),
]
OF_PYDANTIC = (
    *("Input", "input", "should", "valid", "Field required", "union", "pydantic", "Value error"),
    *("str]", "instance", "tag", "NoneType", "{", "Extra"),
)


def branches(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The forms of a value, references followed."""
    if "$ref" in schema:
        yield from branches(SCHEMAS[schema["$ref"].rpartition("/")[2]])
    elif "anyOf" in schema or "oneOf" in schema:
        for branch in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
            yield from branches(branch)
    else:
        yield schema


def wrong(schema: dict[str, Any], depth: int = 4) -> Iterator[Any]:
    """Values of all types, and objects and lists with such inside."""
    yield from VALUES
    for branch in branches(schema) if depth else ():
        if branch.get("type") == "array":
            yield from ([value] for value in wrong(branch.get("items", {}), depth - 1))
        if branch.get("type") == "object":
            fields = branch.get("properties", {})
            least = {name: "x" for name in branch.get("required", ())}
            least |= {name: field["const"] for name, field in fields.items() if "const" in field}
            for name, field in fields.items():
                yield from (least | {name: value} for value in wrong(field, depth - 1))


@pytest.mark.parametrize("name", KINDS)
def test_no_error_has_words_of_pydantic(name: str) -> None:
    kind, least = KINDS[name]
    messages: dict[str, str] = {}
    for field, schema in SCHEMAS[name]["properties"].items():
        for value in wrong(schema):
            try:
                parse_body(kind, json.dumps(least | {field: value}).encode())
            except errors.InvalidRequest as error:
                message = error.message.removeprefix(f"{error.field}: ")
                messages[message] = f"{error.field} {str(value)[:80]}"
    found = [
        (message, messages[message])
        for message in messages
        if OTHER in message or any(words in message for words in OF_PYDANTIC)
    ]
    assert not found
    assert len(messages) > (2 if name == "DetokenizeBody" else 15)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": 5}, "stop: must be a text or a list of texts"),
        ({"stop": ["x", 5]}, "stop.1: must be a text"),
        ({"temperature": "hot"}, "temperature: must be a number"),
        ({"max_tokens": 1.5}, "max_tokens: must be a whole number"),
        ({"stream": "yes"}, "stream: must be true or false"),
        ({"guided_json": 5}, "guided_json: must be an object or a text"),
        ({"metadata": {"a": 5}}, "metadata.a: must be a text"),
        ({"resumption": {"token_ids": []}}, "resumption.seed: must be given"),
        ({"stream_options": []}, "stream_options: must be an object"),
        (
            {"response_format": {"type": "xml"}},
            "response_format: must have one of the types 'text', 'json_object', 'json_schema'",
        ),
    ],
    ids=str,
)
def test_errors_say_what_a_field_must_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        parse_body(CompletionBody, json.dumps({"prompt": "x"} | fields).encode())
    assert caught.value.message == message


def test_missing_fields_are_said_to_be_missing() -> None:
    with pytest.raises(errors.InvalidRequest, match=r"^prompt: must be given$"):
        parse_body(CompletionBody, b"{}")
