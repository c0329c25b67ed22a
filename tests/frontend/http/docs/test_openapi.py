"""The OpenAPI document: valid, and true of the bodies that are read and the answers that are
given."""

import asyncio
import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.openapi.models import OpenAPI
from jsonschema_rs import Draft202012Validator, meta
from orcinus.v1 import scheduler_pb2
from pydantic.json_schema import models_json_schema

from services.common import errors
from services.frontend.http.anthropic.request import MessagesBody
from services.frontend.http.bodies.reader import parse_body
from services.frontend.http.docs import openapi
from services.frontend.http.openai.chat_request import ChatBody
from services.frontend.http.openai.completion_request import CompletionBody
from services.frontend.http.openai.tokens import TokenizeBody
from services.frontend.http.responses.request import ResponsesBody
from services.frontend.http.routes import OPENAPI_PATH, ROUTES
from services.frontend.http.transport import media_types
from services.frontend.http.transport.event_stream import LAST_EVENT_ID
from services.frontend.request.limits import ModelLimits
from services.frontend.request.output_format import MAX_LENGTH
from services.frontend.request.pipeline import ServedPipeline
from tests.fake_scheduler import PIPELINE, keeps_quiet, rejects
from tests.frontend.conftest import Site
from tests.limits import HANG_S

on_site = pytest.mark.asyncio(loop_scope="module")

DIALECT = "https://json-schema.org/draft/2020-12/schema"
DOCUMENT = openapi.document(ROUTES, needs_key=True)
STRICT = openapi.document(ROUTES, needs_key=True, refuses_unknown=True)
SCHEMAS = DOCUMENT["components"]["schemas"]
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
LEAST: dict[str, dict[str, Any]] = {
    "CompletionBody": {"prompt": "x"},
    "ChatBody": HELLO,
    "TokenizeBody": HELLO,
}
KINDS: dict[str, Any] = {
    "CompletionBody": CompletionBody,
    "ChatBody": ChatBody,
    "TokenizeBody": TokenizeBody,
}
LEAST |= {"ResponsesBody": {"input": "x"}, "MessagesBody": {**HELLO, "max_tokens": 1}}
KINDS |= {"ResponsesBody": ResponsesBody, "MessagesBody": MessagesBody}

LIMITS = ModelLimits(
    ServedPipeline(
        model="m", vocab_size=2**63, max_model_len=2**63, eos_token_ids=(), n_stages=1, tp_size=1
    )
)


def validator(reference: dict[str, str]) -> Draft202012Validator:
    """Returns the validator of a schema of the document."""
    return Draft202012Validator({**reference, "components": DOCUMENT["components"]})


BODIES = {kind: validator({"$ref": f"#/components/schemas/{kind}"}) for kind in KINDS}


def is_documented(kind: str, body: dict[str, Any]) -> bool:
    """Whether the document allows a body."""
    return BODIES[kind].is_valid(body)


def is_taken(kind: str, body: dict[str, Any]) -> bool:
    """Whether the server takes a body, with a model whose vocabulary and length are no limit."""
    try:
        request = parse_body(KINDS[kind], json.dumps(body).encode()).to_request()
        request.check()
        LIMITS.stop_token_ids(request.options)
        for prompt in request.prompts:
            if isinstance(prompt, tuple):
                LIMITS.check_prompt("prompt", prompt)
    except errors.InvalidRequest:
        return False
    return True


def references(value: object) -> Iterator[str]:
    """All references in the document."""
    if isinstance(value, dict):
        yield from ([value["$ref"]] if isinstance(value.get("$ref"), str) else [])
        yield from itertools.chain.from_iterable(map(references, value.values()))
    elif isinstance(value, list):
        yield from itertools.chain.from_iterable(map(references, value))


def test_every_posted_request_may_have_a_name_and_a_time() -> None:
    for path, methods in DOCUMENT["paths"].items():
        if "post" in methods:
            names = {parameter["name"] for parameter in methods["post"]["parameters"]}
            assert names >= {"x-request-id", "x-request-timeout"}, path


def test_it_is_an_openapi_document_whose_schemas_are_all_in_use_or_said() -> None:
    OpenAPI.model_validate(DOCUMENT)
    for schema in SCHEMAS.values():
        meta.validate({"$schema": DIALECT, **schema})
    in_use = {reference.rpartition("/")[2] for reference in references(DOCUMENT)}
    known = {name for section in DOCUMENT["components"].values() for name in section}
    assert in_use <= known
    # Events have no schema of their own.
    assert known - in_use - {"AnthropicError404"} == {"ChatChunk", "key", "x_api_key"}


def test_no_two_bodies_have_different_schemas_of_one_name() -> None:
    _, together = models_json_schema([(kind, "validation") for kind in KINDS.values()])
    assert [name for name in together["$defs"] if "__" in name] == []  # pydantic adds modules


@pytest.mark.parametrize("kind", KINDS)
def test_bodies_have_the_fields_of_the_document_and_no_others(kind: str) -> None:
    fields = KINDS[kind].model_fields
    spelled = {field.alias or name for name, field in fields.items()}
    assert SCHEMAS[kind]["properties"].keys() == spelled
    if kind != "TokenizeBody":  # which has one of two
        assert SCHEMAS[kind]["required"] == list(LEAST[kind])
    assert "additionalProperties" not in SCHEMAS[kind]
    assert not STRICT["components"]["schemas"][kind]["additionalProperties"]


TOOL = {"type": "function", "name": "f"}
CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "x"}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "x"}]}
SCHEMA = {"type": "json_schema", "schema": {}}


def said(*blocks: Any) -> dict[str, Any]:
    """A conversation in which the assistant, and then the user, say these."""
    turns = [{"role": role, "content": [block]} for role, block in zip(ROLES, blocks, strict=True)]
    return {"messages": [*HELLO["messages"], *turns]}


ROLES = ("assistant", "user")


@pytest.mark.parametrize(
    ("kind", "body", "is_right"),
    [
        ("ResponsesBody", {"input": [CALL, OUTPUT]}, True),
        ("ResponsesBody", {"input": [{**CALL, "call_id": 1}]}, False),
        ("ResponsesBody", {"input": [{"type": "item_reference", "id": "a"}]}, False),
        (
            "ResponsesBody",
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            False,
        ),
        ("ResponsesBody", {"tools": [TOOL, {"type": "web_search"}]}, True),
        ("ResponsesBody", {"tools": [{"type": "function"}]}, False),
        ("ResponsesBody", {"tool_choice": "required", "tools": [TOOL]}, True),
        ("ResponsesBody", {"tool_choice": {"type": "mcp", "name": "f"}}, False),
        ("ResponsesBody", {"text": {"format": {**SCHEMA, "name": "x"}, "verbosity": "low"}}, True),
        ("ResponsesBody", {"text": {"format": {"type": "grammar"}}}, False),
        ("ResponsesBody", {"reasoning": {"effort": "low", "summary": "auto"}}, True),
        ("MessagesBody", said(USE, RESULT), True),
        ("MessagesBody", said(RESULT, RESULT), False),
        ("MessagesBody", said({**USE, "input": "{}"}, RESULT), False),
        ("MessagesBody", {"messages": [{"role": "robot", "content": "x"}]}, False),
        ("MessagesBody", {"tools": [{"name": "f", "input_schema": {}}]}, True),
        ("MessagesBody", {"tools": [{"name": "f"}]}, False),
        ("MessagesBody", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, True),
        ("MessagesBody", {"tool_choice": {"type": "tool"}}, False),
        ("MessagesBody", {"output_config": {"effort": "low", "format": SCHEMA}}, True),
        ("MessagesBody", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, True),
    ],
    ids=str,
)
def test_conversations_of_other_protocols_are_documented(
    kind: str, body: dict[str, Any], is_right: bool
) -> None:
    body = {**LEAST[kind], **body}
    assert (is_documented(kind, body), is_taken(kind, body)) == (is_right, is_right)


@on_site
@pytest.mark.parametrize("limit", [4, 100_000], ids=["length", "too long"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", HELLO),
        ("/v1/messages/count_tokens", HELLO),
    ],
)
async def test_answers_of_other_protocols_have_the_documented_shapes(
    site: Site, path: str, body: dict[str, Any], limit: int
) -> None:
    name = "max_output_tokens" if "input" in body else "max_tokens"
    check_answer(await site.http.post(path, json={**body, name: limit}), path)
    check_answer(await site.http.post(path, json={}), path)


def beside(number: float, *, is_whole: bool) -> list[float]:
    """A number and its neighbours."""
    if is_whole:
        return [number - 1, number, number + 1]
    return [math.nextafter(number, -9), number, math.nextafter(number, 9)]


def candidates(kind: str) -> Iterator[dict[str, Any]]:
    """Bodies at both sides of everything that the document forbids, one field at a time."""
    bounds = {"minimum", "maximum", "exclusiveMinimum"}
    for name, schema in SCHEMAS[kind]["properties"].items():
        values: list[Any] = [
            None,
            True,
            False,
            0,
            1,
            -1,
            0.5,
            "",
            "x",
            [],
            {},
            ["x"],
            [1],
            [[1]],
            {"a": 1},
        ]
        values += ["{}", " [1]", {"type": "json_object"}, {"type": "json_schema"}]
        values += [
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": True}}
        ]
        values += [{"json": "{}"}, {"json": "x"}, {"choice": []}, {"choice": ["x"]}]
        values += [{"regex": "x"}, {"grammar": ""}, {"grammar": "x"}, {"json_object": False}]
        values += [["text"], [""], {"type": "text"}, "none", "auto", [[]], ["x", 1], [-1], [True]]
        for branch in schema.get("anyOf", ()):
            for limit in bounds & branch.keys():
                values += beside(branch[limit], is_whole=branch["type"] == "integer")
            if "maxProperties" in branch:
                values += [{"5": 100}, {"5": -100.5}, {"05": 1}, {"-5": 1}, {"5": True}, {"5": "1"}]
                values += [
                    dict.fromkeys(map(str, range(branch["maxProperties"] + more)), 1)
                    for more in (0, 1)
                ]
            for n_items in filter(None, (branch.get("maxItems"), branch.get("maxLength"))):
                for item in ("x", 1, [1], "x" * 1025):
                    values += [[item] * n_items, [item] * (n_items + 1)]
                values += ["x" * n_items, "x" * (n_items + 1)]
        yield from ({**LEAST[kind], name: value} for value in values)


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_document_allows_of_a_field_is_taken_and_nothing_else_is(kind: str) -> None:
    wrong, n_taken = [], 0
    for body in candidates(kind):
        documented, taken = is_documented(kind, body), is_taken(kind, body)
        # What fields say to each other is in words only.
        if documented and {"prompt", "messages"} <= {
            name for name in body if body[name] is not None
        }:
            continue
        if documented and kind == "TokenizeBody" and not body["messages"]:
            continue
        if documented and "resumption" in body | (body.get("stream_options") or {}):
            continue
        if documented and len(json.dumps(body.get("guided_choice"))) > MAX_LENGTH:
            continue
        if documented and "type" in (body.get("guided_json") or ()):  # of no type of JSON
            continue
        if body.get("stream_options") is not None:
            taken = is_taken(kind, {**body, "stream": True})
        if "top_logprobs" in body:
            taken = is_taken(kind, {**body, "logprobs": True})
        n_taken += taken
        if documented != taken:
            wrong.append((documented, str(body)[:200]))
    assert not wrong
    assert n_taken > 50


def check_answer(response: httpx.Response, path: str) -> None:
    """Asserts that the document has this answer of an operation."""
    [operation] = DOCUMENT["paths"][path].values()
    documented = operation["responses"][str(response.status_code)]
    if "$ref" in documented:
        documented = DOCUMENT["components"]["responses"][documented["$ref"].rpartition("/")[2]]
    for name, header in documented.get("headers", {}).items():
        assert not header.get("required") or name in response.headers
    media_type = response.headers["content-type"].partition(";")[0]
    found = documented["content"][media_type]
    if media_type != media_types.EVENTS:
        validator(found["schema"]).validate(response.json())


@on_site
async def test_anybody_gets_the_document_that_is_true_of_this_server(site: Site) -> None:
    response = await site.http.get(OPENAPI_PATH)
    assert response.headers["content-type"] == media_types.JSON
    assert response.json() == json.loads(json.dumps(openapi.document(ROUTES, needs_key=False)))
    check_answer(response, OPENAPI_PATH)
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in site.frontend._http._app._app.routes  # type: ignore[attr-defined]
        for method in route.methods - {"HEAD", "OPTIONS"}
    }
    assert routes == {(p, m) for p, methods in DOCUMENT["paths"].items() for m in methods}


@on_site
@pytest.mark.parametrize(
    "options",
    [{}, {"return_token_ids": True, "n": 2}, {"ignore_eos": True, "max_tokens": 3}],
    ids=["plain", "tokens", "length"],
)
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": "hello"}), ("/v1/chat/completions", HELLO)],
    ids=["text", "chat"],
)
async def test_answers_and_chunks_have_the_documented_shapes(
    site: Site, path: str, body: dict[str, Any], options: dict[str, Any]
) -> None:
    body = {**body, "max_tokens": 4, **options}
    check_answer(await site.http.post(path, json=body), path)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    response = await site.http.post(path, json=body)
    check_answer(response, path)
    lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    chunk = "ChatChunk" if "messages" in body else "Completion"
    for line in lines:
        validator({"$ref": f"#/components/schemas/{chunk}"}).validate(json.loads(line[6:]))
    assert len(lines) >= 3


@on_site
async def test_errors_have_the_documented_shapes(site: Site) -> None:
    path, body = "/v1/completions", {"prompt": "hello"}
    for response, status in [
        (await site.http.post(path, json={}), 400),
        (await site.http.post(path, json=body, headers={LAST_EVENT_ID: "x"}), 400),
    ]:
        assert response.status_code == status
        check_answer(response, path)
    check_answer(await site.http.get("/v1/models"), "/v1/models")
    for model, status in [(PIPELINE.model, 200), ("other", 404)]:
        response = await site.http.get(f"/v1/models/{model}")
        assert response.status_code == status
        check_answer(response, "/v1/models/{model}")
    for reason, status in [
        (scheduler_pb2.REJECTION_REASON_POOL_FULL, 429),
        (scheduler_pb2.REJECTION_REASON_UNAVAILABLE, 503),
    ]:
        site.scheduler.behaviour = rejects(reason, "no")
        response = await site.http.post(path, json=body)
        assert response.status_code == status
        check_answer(response, path)


@on_site
async def test_probes_have_the_documented_shapes(site: Site) -> None:
    for path in ("/health", "/ready", "/serving"):
        check_answer(await site.http.get(path), path)
    site.scheduler.behaviour = keeps_quiet
    site.scheduler.close()
    try:
        async with asyncio.timeout(HANG_S):
            while (ready := await site.http.get("/ready")).status_code != 503:
                await asyncio.sleep(0.01)
        check_answer(ready, "/ready")
        check_answer(await site.http.get("/serving"), "/serving")
    finally:
        site.scheduler.open()
        await site.frontend.wait_ready()
