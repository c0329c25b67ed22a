"""Parity of the protocols: one request means the same over both."""

import json
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from orcinus.v1 import inference_pb2, scheduler_pb2

from services.common.sampling import OPTIONS
from tests.fake_scheduler import PIPELINE, Behaviour, echo, loses_pipeline_after, rejects, says
from tests.frontend.conftest import Site
from tests.generation_options import generation_options

pytestmark = pytest.mark.asyncio(loop_scope="module")

EOS = PIPELINE.eos_token_ids[0]
FINISH = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
}
CODES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call as a client sees it, over either protocol."""

    choices: tuple[tuple[int, str, tuple[int, ...], str], ...] = ()
    usage: tuple[int, int] | None = None
    prompt: tuple[int, ...] = ()
    status: int = 200
    field: str | None = None


async def over_http(site: Site, prompt: dict[str, Any], options: dict[str, Any]) -> Outcome:
    path = "chat/completions" if "messages" in prompt else "completions"
    response = await site.http.post(f"/v1/{path}", json=prompt | options)
    body = response.json()
    if response.status_code != 200:
        return Outcome(status=response.status_code, field=body["error"]["param"])
    choices = tuple(
        (
            choice["index"],
            choice["message"]["content"] if "message" in choice else choice["text"],
            tuple(choice["token_ids"]),
            choice["finish_reason"],
        )
        for choice in body["choices"]
    )
    usage = body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]
    seen = body["choices"][0] if "prompt" in prompt else body
    return Outcome(choices, usage, tuple(seen["prompt_token_ids"]))


def to_prompt(prompt: dict[str, Any]) -> inference_pb2.Prompt:
    if "messages" in prompt:
        messages = [inference_pb2.ChatMessage(**message) for message in prompt["messages"]]
        return inference_pb2.Prompt(conversation=inference_pb2.Conversation(messages=messages))
    if isinstance(prompt["prompt"], str):
        return inference_pb2.Prompt(text=prompt["prompt"])
    return inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=prompt["prompt"]))


def failed(error: grpc.aio.AioRpcError) -> Outcome:
    violations = error_details_pb2.BadRequest()
    for packed in rpc_status.from_call(error).details:
        packed.Unpack(violations)
    field = violations.field_violations[0].field if violations.field_violations else None
    return Outcome(status=CODES[error.code()], field=field)


async def over_grpc(site: Site, prompt: dict[str, Any], options: dict[str, Any]) -> Outcome:
    request = inference_pb2.GenerateRequest(
        prompt=to_prompt(prompt), options=generation_options(**options)
    )
    try:
        answer = await site.inference.generate(request)
    except grpc.aio.AioRpcError as error:
        return failed(error)
    choices = tuple(
        (choice.index, choice.text, tuple(choice.token_ids), FINISH[choice.finish_reason])
        for choice in answer.choices
    )
    usage = answer.usage.prompt_tokens, answer.usage.completion_tokens
    return Outcome(choices, usage, tuple(answer.prompt_token_ids))


async def over_grpc_stream(site: Site, prompt: dict[str, Any], options: dict[str, Any]) -> Outcome:
    request = inference_pb2.GenerateStreamRequest(
        prompt=to_prompt(prompt), options=generation_options(**options)
    )
    texts: dict[int, tuple[str, tuple[int, ...], str]] = {}
    usage, prompt_ids = (0, 0), ()
    try:
        async for message in site.inference.stream(request):
            choice = message.choice
            text, token_ids, _ = texts.get(choice.index, ("", (), ""))
            if message.HasField("choice"):
                texts[choice.index] = (
                    text + choice.text,
                    token_ids + tuple(choice.token_ids),
                    FINISH.get(choice.finish_reason, ""),
                )
            usage = message.usage.prompt_tokens, message.usage.completion_tokens
            prompt_ids += tuple(message.prompt_token_ids)
    except grpc.aio.AioRpcError as error:
        return failed(error)
    choices = tuple((index, *texts[index]) for index in sorted(texts))
    return Outcome(choices, usage, prompt_ids)


HELLO = {"prompt": "hello wörld"}
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
FULL = rejects(scheduler_pb2.REJECTION_REASON_POOL_FULL)
SPELLED = (20, 21, 231, 184, 150, 40, 41, 42, EOS)

CASES: dict[str, tuple[Behaviour, dict[str, Any], dict[str, Any]]] = {
    "text": (echo, HELLO, {}),
    "tokens": (echo, {"prompt": [5, 6, 7]}, {"max_tokens": 5}),
    "chat": (says(*SPELLED), CHAT, {}),
    "length": (says(*SPELLED), HELLO, {"max_tokens": 3}),
    "stop-token": (says(*SPELLED), HELLO, {"stop_token_ids": [40]}),
    "ignore-eos": (says(EOS, *SPELLED), HELLO, {"ignore_eos": True, "max_tokens": 4}),
    "stop-string": (echo, HELLO, {"stop": ["o w"], "max_tokens": 30}),
    "stop-later": (echo, HELLO, {"stop": ["o"], "min_tokens": 6, "max_tokens": 30}),
    "n": (echo, HELLO, {"n": 3, "max_tokens": 4, "seed": 5}),
    "greedy": (echo, HELLO, {"temperature": 0.0}),
    "wrong-max-tokens": (echo, HELLO, {"max_tokens": -1}),
    "too-long": (echo, HELLO, {"max_tokens": 128}),
    "long-prompt": (echo, {"prompt": [5] * 128}, {}),
    "no-prompt": (echo, {"prompt": []}, {}),
    "no-messages": (echo, {"messages": []}, {}),
    "wrong-role": (echo, {"messages": [{"role": "robot", "content": "x"}]}, {}),
    "wrong-token": (echo, {"prompt": [512]}, {}),
    "wrong-temperature": (echo, HELLO, {"temperature": 2.5}),
    "wrong-presence": (echo, HELLO, {"presence_penalty": 2.5}),
    "wrong-frequency": (echo, HELLO, {"frequency_penalty": -2.5}),
    "wrong-repetition": (echo, HELLO, {"repetition_penalty": 0.0}),
    "wrong-stop-token": (echo, HELLO, {"stop_token_ids": [-1]}),
    "wrong-bias": (echo, HELLO, {"logit_bias": {"5": 101}}),
    "bias-of-no-token": (echo, HELLO, {"logit_bias": {"512": 1}}),
    "wrong-allowed-token": (echo, HELLO, {"allowed_token_ids": [512]}),
    "nothing-allowed": (echo, HELLO, {"allowed_token_ids": [5], "bad_token_ids": [5]}),
    "wrong-stop": (echo, HELLO, {"stop": ["x"] * 17}),
    "full": (FULL, HELLO, {}),
    "lost": (loses_pipeline_after(20, 21), HELLO, {}),
}


@pytest.mark.parametrize("case", CASES)
async def test_outcome_is_the_same(site: Site, case: str) -> None:
    site.scheduler.behaviour, prompt, options = CASES[case]
    options = options | {"return_token_ids": True}
    http = await over_http(site, prompt, options)
    assert await over_grpc(site, prompt, options) == http
    assert await over_grpc_stream(site, prompt, options) == http


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


@pytest.mark.parametrize("case", FORMATS)
async def test_formats_are_the_same(site: Site, case: str) -> None:
    site.scheduler.behaviour = says(*SPELLED)
    fields, message = FORMATS[case]
    options = {"return_token_ids": True, "seed": 5}
    http = await over_http(site, HELLO, options | fields)
    assert http.status == 200
    assert await over_grpc(site, HELLO, {**options, "format": message}) == http
    assert await over_grpc_stream(site, HELLO, {**options, "format": message}) == http
    first, *others = (request.submission.sampling for request in site.scheduler.requests)
    assert first.grammar
    assert others == [first, first]


@pytest.mark.parametrize("case", WRONG_FORMATS)
async def test_wrong_formats_are_refused_alike(site: Site, case: str) -> None:
    fields, message = WRONG_FORMATS[case]
    (spelled,) = fields
    assert await over_http(site, HELLO, fields) == Outcome(status=400, field=spelled)
    for over in (over_grpc, over_grpc_stream):
        outcome = await over(site, HELLO, {"format": message})
        assert outcome == Outcome(status=400, field="format")
    assert not site.scheduler.requests


async def test_submission_is_the_same(site: Site) -> None:
    options = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": -3}
    limits = {"max_tokens": 9, "min_tokens": 2, "stop_token_ids": [7], "ignore_eos": True}
    penalties = {
        "presence_penalty": 0.1, "frequency_penalty": -0.2, "repetition_penalty": 1.1
    }  # fmt: skip
    rules = {
        "logit_bias": {"7": 1.5, "5": -100}, "allowed_token_ids": [5, 6, 7], "bad_token_ids": [6]
    }  # fmt: skip
    given = options | limits | penalties | rules
    assert given.keys() >= OPTIONS.keys() - {"grammar"}
    await over_http(site, HELLO, given | {"return_token_ids": True})
    await over_grpc(site, HELLO, given)
    first, second = (request.submission for request in site.scheduler.requests)
    second.request_id = first.request_id
    assert first == second
