"""Parity of the protocols: one request means the same over both, whole and streamed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from orcinus.v1 import inference_pb2, scheduler_pb2

from services.common.sampling import OPTIONS
from services.frontend.api_keys import hash_of
from tests.fake_scheduler import (
    PIPELINE,
    Behaviour,
    FakeRequest,
    echo,
    loses_pipeline_after,
    rejects,
    says,
    stalls_after,
)
from tests.frontend.conftest import Site, running, soon
from tests.ways import OTHER_WAYS, Answer, Outcome, Way, over_grpc, over_grpc_stream, over_http

pytestmark = pytest.mark.asyncio(loop_scope="module")

EOS = PIPELINE.eos_token_ids[0]
HELLO = {"prompt": "hello wörld"}
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
GO: dict[str, Any] = {"type": "function", "function": {"name": "go"}}
SPELLED = (20, 21, 231, 184, 150, 40, 41, 42, EOS)
PENALTIES = {"presence_penalty": 0.1, "frequency_penalty": -0.2, "repetition_penalty": 1.1}
FILTERS = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": -3}
RULES = {"logit_bias": {"7": 1.5, "5": -100}, "allowed_token_ids": [5, 6, 7], "bad_token_ids": [6],
         "bad_words": ["hello", "世"]}  # fmt: skip
LIMITS = {"max_tokens": 9, "min_tokens": 2, "stop_token_ids": [7], "ignore_eos": True}


def fails_after(*token_ids: int) -> Behaviour:
    """Generates these tokens; then the request is given up."""

    async def behave(request: FakeRequest) -> None:
        await stalls_after(*token_ids)(request)
        request.complete(scheduler_pb2.COMPLETION_REASON_FAILED, "it ended three pipelines")

    return behave


CASES: dict[str, tuple[Behaviour, dict[str, Any]]] = {
    "text": (echo, HELLO),
    "tokens": (echo, {"prompt": [5, 6, 7], "max_tokens": 5}),
    "chat": (says(*SPELLED), CHAT),
    "named speaker": (
        says(*SPELLED),
        {"messages": [{"role": "user", "content": "hi", "name": "Ann"}]},
    ),
    "several turns": (
        says(*SPELLED),
        {"messages": [{"role": role, "content": "x"} for role in ("system", "user", "assistant")]},
    ),
    "texts": (echo, {"prompt": ["hello", "wörld", "世"], "max_tokens": 4}),
    "one text of a list": (echo, {"prompt": ["hello"], "max_tokens": 4}),
    "lists of tokens": (echo, {"prompt": [[5, 6], [7]], "max_tokens": 4}),
    "texts, n": (echo, {"prompt": ["hello", "wörld"], "n": 2, "seed": 5, "max_tokens": 4}),
    "length": (says(*SPELLED), {**HELLO, "max_tokens": 3}),
    "stop token": (says(*SPELLED), {**HELLO, "stop_token_ids": [40]}),
    "ignore_eos": (says(EOS, *SPELLED), {**HELLO, "ignore_eos": True, "max_tokens": 4}),
    "stop string": (echo, {**HELLO, "stop": ["o w"], "max_tokens": 30}),
    "stop string of several": (echo, {"prompt": ["hello", "lo"], "stop": ["lo"], "max_tokens": 30}),
    "cache": (echo, {**HELLO, "cache_salt": "ours", "max_tokens": 4}),
    "no cache": (echo, {**HELLO, "cache_prompt": False, "max_tokens": 4}),
    "cache in chat": (says(*SPELLED), {**CHAT, "cache_salt": "s", "cache_prompt": True}),
    "cache_salt too long": (echo, {**HELLO, "cache_salt": "s" * 257}),
    "stop later": (echo, {**HELLO, "stop": ["o"], "min_tokens": 6, "max_tokens": 30}),
    "stop in chat": (says(*SPELLED), {**CHAT, "stop": ["世"]}),
    "n": (echo, {**HELLO, "n": 3, "max_tokens": 4, "seed": 5}),
    "chat, n": (says(*SPELLED), {**CHAT, "n": 2, "seed": 2**63 - 1}),
    "echo": (echo, {**HELLO, "echo": True, "max_tokens": 4}),
    "echo of tokens": (echo, {"prompt": [231, 184, 150, 40], "echo": True, "max_tokens": 4}),
    "echo of several": (echo, {"prompt": ["a", "世"], "n": 2, "echo": True, "max_tokens": 4}),
    "greedy": (echo, {**HELLO, "temperature": 0.0}),
    "options": (echo, {**HELLO, **FILTERS, **PENALTIES, **RULES, **LIMITS}),
    "options in chat": (echo, {**CHAT, **FILTERS, **PENALTIES, **RULES, **LIMITS}),
    "priority": (echo, {**HELLO, "priority": 3}),
    "priority in chat": (echo, {**CHAT, "priority": 10}),
    "wrong priority": (echo, {**HELLO, "priority": 11}),
    "priority of others": (echo, {**HELLO, "priority": -1}),
    "wrong max_tokens": (echo, {**HELLO, "max_tokens": -1}),
    "too long": (echo, {**HELLO, "max_tokens": 128}),
    "long prompt": (echo, {"prompt": [5] * 128}),
    "very long prompt": (echo, {"prompt": [5] * 1000}),
    "long text": (echo, {"prompt": "世" * 1000}),
    "long turn": (echo, {"messages": [{"role": "user", "content": "x" * 5000}]}),
    "long prompt of several": (echo, {"prompt": [[5], [5] * 128]}),
    "no prompt": (echo, {"prompt": []}),
    "no messages": (echo, {"messages": []}),
    "too many messages": (echo, {"messages": [{"role": "user", "content": ""}] * 2049}),
    "too many prompts": (echo, {"prompt": ["x"] * 1025}),
    "too many tools": (echo, {**CHAT, "tools": [GO] * 129}),
    "too many answers": (echo, {"prompt": ["x"] * 9, "n": 128}),
    "wrong n": (echo, {**HELLO, "n": 129}),
    "wrong role": (echo, {"messages": [{"role": "robot", "content": "x"}]}),
    "wrong token": (echo, {"prompt": [512]}),
    "wrong token of several": (echo, {"prompt": [[5], [512]]}),
    "wrong model": (echo, {**HELLO, "model": "gpt-5"}),
    "wrong temperature": (echo, {**HELLO, "temperature": 2.5}),
    "wrong top_p": (echo, {**CHAT, "top_p": 0.0}),
    "wrong presence": (echo, {**HELLO, "presence_penalty": 2.5}),
    "wrong frequency": (echo, {**HELLO, "frequency_penalty": -2.5}),
    "wrong repetition": (echo, {**HELLO, "repetition_penalty": 0.0}),
    "wrong min_tokens": (echo, {**HELLO, "min_tokens": 5, "max_tokens": 4}),
    "wrong stop token": (echo, {**HELLO, "stop_token_ids": [-1]}),
    "wrong bias": (echo, {**HELLO, "logit_bias": {"5": 101}}),
    "bias of no token": (echo, {**HELLO, "logit_bias": {"512": 1}}),
    "wrong allowed token": (echo, {**HELLO, "allowed_token_ids": [512]}),
    "bad words": (echo, {**HELLO, "bad_words": ["wörld", " the"], "max_tokens": 4}),
    "bad words in chat": (echo, {**CHAT, "bad_words": ["x"]}),
    "bad words without text": (echo, {**HELLO, "bad_words": [" "]}),
    "too many bad words": (echo, {**HELLO, "bad_words": ["x"] * 257}),
    "long bad words": (echo, {**HELLO, "bad_words": ["x" * 1024] * 17}),
    "long bad word": (echo, {**HELLO, "bad_words": ["x" * 1025]}),
    "nothing allowed": (echo, {**HELLO, "allowed_token_ids": [5], "bad_token_ids": [5]}),
    "wrong stop": (echo, {**HELLO, "stop": ["x"] * 17}),
    "empty stop": (echo, {**HELLO, "stop": [""]}),
    "full": (rejects(scheduler_pb2.REJECTION_REASON_POOL_FULL, retry_after_s=2.5), HELLO),
    "refused": (rejects(scheduler_pb2.REJECTION_REASON_INVALID, "no", field="max_tokens"), HELLO),
    "away": (rejects(scheduler_pb2.REJECTION_REASON_UNAVAILABLE), CHAT),
    "lost": (loses_pipeline_after(20, 21), HELLO),
    "lost in chat": (loses_pipeline_after(20, 21), CHAT),
    "given up": (fails_after(20, 21), HELLO),
}  # fmt: skip


async def outcome_of(
    site: Site, way: Way, body: dict[str, Any]
) -> tuple[Outcome, list[scheduler_pb2.Submission]]:
    """Returns what a client sees, and what the scheduler got, but for names, numbers and drawn
    seeds."""
    outcome = await soon(way(site, {**body, "return_token_ids": True}))
    await soon(site.scheduler.wait_ended())
    submissions = []
    for request in sorted(site.scheduler.requests, key=lambda each: each.request_id[33:]):
        request.submission.request_id = ""
        request.submission.ClearField("number")
        if "seed" not in body:
            request.submission.sampling.ClearField("seed")
        request.submission.ClearField("time_left")  # of gRPC's deadline
        submissions.append(request.submission)
    site.scheduler.requests.clear()
    return outcome, submissions


async def check_parity(site: Site, body: dict[str, Any]) -> Outcome:
    """Returns what a client sees over HTTP; fails if it sees, or asks for, something else by
    another way."""
    expected, asked = await outcome_of(site, over_http, body)
    for name, way in OTHER_WAYS.items():
        outcome, submissions = await outcome_of(site, way, body)
        if name == "HTTP stream" and "messages" in body:  # has no tokens of the prompt
            outcome = replace(outcome, prompts=expected.prompts)
        assert outcome == expected, name
        assert submissions == asked, name
    return expected


@pytest.mark.parametrize("case", CASES)
async def test_outcome_is_the_same(site: Site, case: str) -> None:
    site.scheduler.behaviour, body = CASES[case]
    await check_parity(site, body)


async def test_every_option_has_a_value() -> None:
    _, body = CASES["options"]
    assert body.keys() >= OPTIONS.keys() - {"grammar"}


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("wrong n", "INVALID_ARGUMENT"),
        ("full", "RESOURCE_EXHAUSTED"),
        ("lost", "UNAVAILABLE"),
        ("given up", "INTERNAL"),
    ],
)
async def test_errors_have_their_class(site: Site, case: str, error: str) -> None:
    site.scheduler.behaviour, body = CASES[case]
    assert (await check_parity(site, body)).error == error


async def test_strangers_are_refused_alike(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [{"name": "alice", "sha256": hash_of("her key")}]}))
    async with running(tmp_path, api_keys_file=file) as site:
        for way in (over_http, *OTHER_WAYS.values()):
            assert await soon(way(site, HELLO)) == Outcome(error="UNAUTHENTICATED")


# Formats


SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
OutputFormat = inference_pb2.OutputFormat
CHOICES = OutputFormat.Choices(texts=["a", "b c"])

FORMATS: dict[str, tuple[dict[str, Any], inference_pb2.OutputFormat]] = {
    "object": ({"response_format": {"type": "json_object"}}, OutputFormat(json_object=True)),
    "schema": (
        {
            "response_format": {
                "type": "json_schema", "json_schema": {"name": "a", "schema": json.loads(SCHEMA)}
            }
        },
        OutputFormat(json_schema=SCHEMA),
    ),
    "regex": ({"regex": "[ab]+"}, OutputFormat(regex="[ab]+")),
    "choice": (
        {"structured_outputs": {"choice": list(CHOICES.texts)}}, OutputFormat(choice=CHOICES)
    ),
    "lark": ({"guided_grammar": "start: /a+/"}, OutputFormat(grammar="start: /a+/")),
    "gbnf": ({"ebnf": 'root ::= "a"'}, OutputFormat(grammar='root ::= "a"')),
}  # fmt: skip

WRONG_FORMATS: dict[str, tuple[dict[str, Any], inference_pb2.OutputFormat]] = {
    "schema-type": (
        {"guided_json": {"type": "objekt"}}, OutputFormat(json_schema='{"type": "objekt"}')
    ),
    "schema-text": ({"json_schema": "[]"}, OutputFormat(json_schema="[]")),
    "regex": ({"regex": "("}, OutputFormat(regex="(")),
    "long": ({"regex": "a" * 70_000}, OutputFormat(regex="a" * 70_000)),
    "no-choice": ({"guided_choice": []}, OutputFormat(choice=OutputFormat.Choices())),
    "lark": ({"guided_grammar": "x: y"}, OutputFormat(grammar="x: y")),
    "gbnf": ({"ebnf": "root ::= b"}, OutputFormat(grammar="root ::= b")),
    "no-grammar": ({"ebnf": ""}, OutputFormat(grammar="")),
}  # fmt: skip


@pytest.mark.parametrize("prompt", [HELLO, CHAT], ids=["text", "chat"])
@pytest.mark.parametrize("case", FORMATS)
async def test_formats_are_the_same(site: Site, case: str, prompt: dict[str, Any]) -> None:
    site.scheduler.behaviour = says(*SPELLED)
    fields, message = FORMATS[case]
    body = {**prompt, "seed": 5}
    expected, (asked,) = await outcome_of(site, over_http, {**body, **fields})
    assert not expected.error
    assert asked.sampling.grammar
    for way in (over_grpc, over_grpc_stream):
        outcome, submissions = await outcome_of(site, way, {**body, "format": message})
        assert (outcome, submissions) == (expected, [asked])


@pytest.mark.parametrize("case", WRONG_FORMATS)
async def test_wrong_formats_are_refused_alike(site: Site, case: str) -> None:
    fields, message = WRONG_FORMATS[case]
    (spelled,) = fields
    refused = Outcome(error="INVALID_ARGUMENT", field=spelled)
    assert await over_http(site, {**HELLO, **fields}) == refused
    for way in (over_grpc, over_grpc_stream):
        assert await way(site, {**HELLO, "format": message}) == replace(refused, field="format")
    assert not site.scheduler.requests


# Tools


PLACE = {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]}
LOOK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": PLACE},
}
NAMED = {"type": "function", "function": {"name": "look"}}
MADE = {
    "id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}
}  # fmt: skip
HISTORY = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [MADE]},
    {"role": "tool", "content": "seen", "tool_call_id": "call_1"},
    {"role": "assistant", "content": "", "tool_calls": [MADE], "reasoning_content": "hm"},
]
CALL = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'

TOOL_CASES: dict[str, dict[str, Any]] = {
    "history": {"messages": HISTORY},
    "tools": {**CHAT, "tools": [LOOK, GO]},
    "auto": {**CHAT, "tools": [LOOK], "tool_choice": "auto", "parallel_tool_calls": False},
    "none": {**CHAT, "tools": [LOOK], "tool_choice": "none"},
    "required": {**CHAT, "tools": [LOOK, GO], "tool_choice": "required"},
    "named": {**CHAT, "tools": [LOOK], "tool_choice": NAMED},
    "kwargs": {**CHAT, "chat_template_kwargs": {"enable_thinking": False}},
    "no name": {**CHAT, "tools": [{"type": "function", "function": {"name": ""}}]},
    "none to require": {**CHAT, "tool_choice": "required"},
    "unknown name": {**CHAT, "tools": [GO], "tool_choice": NAMED},
    "reserved variable": {**CHAT, "chat_template_kwargs": {"messages": []}},
}  # fmt: skip


@pytest.mark.parametrize("case", TOOL_CASES)
async def test_tools_are_the_same(site: Site, case: str) -> None:
    site.scheduler.behaviour = says(*site.tokens(f"a{CALL}"), EOS)
    await check_parity(site, {**TOOL_CASES[case], "seed": 5})


async def test_calls_are_the_same(site: Site) -> None:
    site.scheduler.behaviour = says(*site.tokens(CALL), EOS)
    outcome = await check_parity(site, TOOL_CASES["tools"])
    (answer,) = outcome.answers
    assert answer == Answer(
        calls=(("look", '{"at": 1}'),), token_ids=answer.token_ids, finish_reason="tool_calls"
    )


# Priorities


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_translated_protocols_have_priorities_too(site: Site, path: str) -> None:
    site.scheduler.behaviour = says(*SPELLED)
    body: dict[str, Any] = {"messages": CHAT["messages"], "max_tokens": 9}
    if path == "/v1/responses":
        body = {"input": "hello"}
    answer = await soon(site.http.post(path, json={**body, "priority": 7}))
    assert answer.status_code == 200, answer.text
    refused = await soon(site.http.post(path, json={**body, "priority": -1}))
    assert refused.status_code == 400
    assert "priority" in refused.text
    [submitted] = site.scheduler.requests
    assert submitted.submission.priority == 7


async def test_a_key_comes_as_early_as_its_entry_allows(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    entry = {"name": "alice", "sha256": hash_of("hers"), "min_priority": -2, "weight": 3}
    file.write_text(json.dumps({"keys": [entry]}))
    async with running(tmp_path, api_keys_file=file) as site:
        site.http.headers["authorization"] = "Bearer hers"
        for priority, status in ((-2, 200), (-3, 400)):
            body = {**HELLO, "priority": priority}
            assert (await soon(site.http.post("/v1/completions", json=body))).status_code == status
        [submitted] = site.scheduler.requests
        assert submitted.submission.priority == -2
        assert submitted.submission.account.weight == 3
