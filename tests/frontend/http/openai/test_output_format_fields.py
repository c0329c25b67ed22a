"""Formats are asked for in the words of other servers, one at a time."""

import json
from typing import Any

import pytest

from services.common.errors import InvalidRequest
from services.frontend.http.bodies.reader import parse_body
from services.frontend.http.openai.chat_request import ChatBody
from services.frontend.http.openai.completion_request import CompletionBody
from services.frontend.request import output_format
from services.frontend.request.json_schema.client_schema import ClientSchema
from tests.frontend.request.json_schema.engine import follows

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
OF_SCHEMA = output_format.json_schema(ClientSchema(SCHEMA, "schema"))
NAMED = {"name": "answer", "description": "d", "strict": True, "schema": SCHEMA}

SPELLINGS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "text"}}, ""),
    ({"response_format": None}, ""),
    ({"response_format": {"type": "json_object"}}, output_format.json_object()),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, OF_SCHEMA),
    ({"response_format": {"type": "json_object", "schema": None}}, output_format.json_object()),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, OF_SCHEMA),
    ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, OF_SCHEMA),
    ({"structured_outputs": {"json_object": True}}, output_format.json_object()),
    ({"structured_outputs": {"regex": "a+"}}, output_format.regex("a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, output_format.choice(["a", "b"])),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, 'start: "a"'),
    ({"guided_json": SCHEMA}, OF_SCHEMA),
    ({"guided_regex": "a+"}, output_format.regex("a+")),
    ({"guided_choice": ["a", "b"]}, output_format.choice(["a", "b"])),
    ({"guided_grammar": 'start: "a"'}, 'start: "a"'),
    ({"json_schema": json.dumps(SCHEMA)}, OF_SCHEMA),
    ({"regex": "a+"}, output_format.regex("a+")),
    ({"ebnf": 'root ::= "a"'}, output_format.grammar('root ::= "a"')),
]

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": "json_object"}, "response_format"),
    ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"regex": "a", "ebnf": "root ::= ("}, "ebnf"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"enum": [1] * 70_000}},
            }
        },
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        "response_format.json_schema.name",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": None}}},
        "response_format.json_schema.schema",
    ),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"json_schema": "[]"}, "json_schema"),
    ({"guided_choice": []}, "guided_choice"),
    ({"regex": 5}, "regex"),
    ({"regex": "a" * 70_000}, "regex"),
    ({"regex": "a", "min_tokens": 3}, "min_tokens"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"ebnf": ""}, "ebnf"),
]


def grammar_of(fields: dict[str, Any]) -> list[str]:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    requests = (
        parse_body(CompletionBody, json.dumps({"prompt": "x", **fields}).encode()).to_request(),
        parse_body(ChatBody, json.dumps(chat | fields).encode()).to_request(),
    )
    for request in requests:
        request.check()
    return [request.options.sampling.grammar for request in requests]


@pytest.mark.parametrize(("fields", "grammar"), SPELLINGS, ids=lambda value: str(value)[:60])
def test_a_format_has_many_spellings(fields: dict[str, Any], grammar: str) -> None:
    assert grammar_of(fields) == [grammar, grammar]


OBJECTS: list[tuple[dict[str, Any], str, str]] = [
    ({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, '{"a": 1}', '{"a": "x"}'),
    ({"properties": {"a": {"enum": ["x", "y"]}}}, '{"a": "x"}', '{"a": "z"}'),
    ({"properties": {"a": {"type": "string", "maxLength": 1}}}, '{"a": "x"}', '{"a": "xx"}'),
    ({"additionalProperties": {"type": "null"}}, '{"b": null}', '{"b": 1}'),
    ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, '{"b": 1}', "{}"),
    ({"minProperties": 1, "type": "object"}, '{"b": 1}', "{}"),
]


@pytest.mark.parametrize(("schema", "good", "bad"), OBJECTS, ids=lambda value: str(value)[:30])
def test_an_object_keeps_the_schema_beside_it(schema: dict[str, Any], good: str, bad: str) -> None:
    for grammar in grammar_of({"response_format": {"type": "json_object", "schema": schema}}):
        assert follows(grammar, good)
        assert not follows(grammar, bad)
        assert not follows(grammar, "[]")


@pytest.mark.parametrize(("fields", "name"), WRONG, ids=lambda value: str(value)[:60])
def test_wrong_formats_are_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammar_of(fields)
    assert caught.value.field == name
