"""The four ways to request answers, over HTTP and gRPC, whole and streamed, and what a client sees.

Every way takes a request as a body of the HTTP API: `prompt`, or `messages` with tools, and
options. The ways over gRPC translate it.
"""

import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import grpc.aio
import httpx
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from orcinus.v1 import inference_pb2

from tests import api_page
from tests.generation_options import generation_options

CODES: dict[int, str] = {}
"""gRPC status of an error, by the HTTP status of the error."""
for _, _status, _, _, _code, _ in api_page.error_rows().values():
    CODES.setdefault(int(_status), _code.strip("`"))

CONVERSATION = ("messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs")
"""Fields of a body that belong to a conversation; all others are options."""


class Clients(Protocol):
    """Clients of one frontend."""

    @property
    def http(self) -> httpx.AsyncClient: ...

    @property
    def inference(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """One of the answers to a request."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """Names and arguments of tool calls. Their ids are left out, since they differ from request to
    request."""
    token_ids: tuple[int, ...] = ()
    finish_reason: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a client sees of a call, in a form that does not depend on the way."""

    answers: tuple[Answer, ...] = ()
    """Answers in the order of their index."""
    usage: tuple[int, int] = (0, 0)
    prompts: tuple[tuple[int, ...], ...] = ()
    """Tokens of each prompt."""
    error: str = ""
    """Class of the error, as gRPC spells it."""
    field: str | None = None


def choices(answers: Mapping[int, Answer]) -> tuple[Answer, ...]:
    """Returns the answers in the order of their indices, which must be 0, 1, 2 and so on."""
    assert sorted(answers) == list(range(len(answers)))
    return tuple(answers[index] for index in sorted(answers))


# HTTP


def _path(body: dict[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def _failed(error: dict[str, Any], status: int) -> Outcome:
    return Outcome(error=CODES[status], field=error["param"])


def _http_calls(message: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    functions = (call["function"] for call in message.get("tool_calls") or ())
    return tuple((function["name"], function["arguments"]) for function in functions)


async def over_http(clients: Clients, body: dict[str, Any]) -> Outcome:
    """Requests whole answers over HTTP."""
    response = await clients.http.post(_path(body), json=body)
    answer = response.json()
    if response.status_code != 200:
        return _failed(answer["error"], response.status_code)
    found = {}
    for choice in answer["choices"]:
        message = choice.get("message", {"content": choice.get("text")})
        found[choice["index"]] = Answer(
            text=message["content"] or "",
            reasoning=message.get("reasoning_content") or "",
            calls=_http_calls(message),
            token_ids=tuple(choice["token_ids"]),
            finish_reason=choice["finish_reason"],
        )
    usage = answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]
    prompts = [answer] if "messages" in body else answer["choices"][:: body.get("n", 1)]
    return Outcome(
        choices(found), usage, tuple(tuple(each["prompt_token_ids"]) for each in prompts)
    )


def _events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    for text in data:
        if text != "[DONE]":
            yield json.loads(text)


async def over_http_stream(clients: Clients, body: dict[str, Any]) -> Outcome:
    """Requests a stream over HTTP. The stream of a conversation does not contain the prompt's
    tokens."""
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    response = await clients.http.post(_path(body), json=streamed)
    if response.status_code != 200:
        return _failed(response.json()["error"], response.status_code)
    found: dict[int, Answer] = {}
    prompts: dict[int, tuple[int, ...]] = {}
    usage = (0, 0)
    for event in _events(response.text.splitlines()):
        if "error" in event:
            statuses = {"unavailable": 503, "request_failed": 500}
            return _failed(event["error"], statuses[event["error"]["code"]])
        if event.get("usage"):
            usage = event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            index = choice["index"]
            before = found.get(index, Answer())
            delta = choice.get("delta", {"content": choice.get("text")})
            found[index] = Answer(
                text=before.text + (delta.get("content") or ""),
                reasoning=before.reasoning + (delta.get("reasoning_content") or ""),
                calls=_with_deltas(before.calls, delta.get("tool_calls") or ()),
                token_ids=before.token_ids + tuple(choice["token_ids"]),
                finish_reason=choice["finish_reason"] or "",
            )
            if "prompt_token_ids" in choice:
                prompts[index // body.get("n", 1)] = tuple(choice["prompt_token_ids"])
    return Outcome(choices(found), usage, tuple(prompts[index] for index in sorted(prompts)))


def _with_deltas(
    calls: tuple[tuple[str, str], ...], deltas: Iterable[dict[str, Any]]
) -> tuple[tuple[str, str], ...]:
    pieces = [
        (delta["index"], delta["function"].get("name") or "", delta["function"]["arguments"])
        for delta in deltas
    ]
    return _with_pieces(calls, pieces)


def _with_pieces(
    calls: tuple[tuple[str, str], ...], pieces: Iterable[tuple[int, str, str]]
) -> tuple[tuple[str, str], ...]:
    found = dict(enumerate(calls))
    for index, name, arguments in pieces:
        old_name, old_arguments = found.get(index, ("", ""))
        found[index] = (old_name + name, old_arguments + arguments)
    return tuple(found[index] for index in range(len(found)))


# gRPC


def _message(message: dict[str, Any]) -> inference_pb2.ChatMessage:
    calls = [
        inference_pb2.ToolCall(
            id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"]
        )
        for call in message.get("tool_calls", ())
    ]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return inference_pb2.ChatMessage(**rest, tool_calls=calls)


def _tool(tool: dict[str, Any]) -> inference_pb2.Tool:
    function = dict(tool["function"])
    parameters = function.pop("parameters", None)
    if parameters is not None:
        function["parameters"] = json.dumps(parameters)
    return inference_pb2.Tool(**function)


def _tool_choice(choice: Any) -> inference_pb2.ToolChoice:
    if isinstance(choice, dict):
        return inference_pb2.ToolChoice(name=choice["function"]["name"])
    return inference_pb2.ToolChoice(mode=f"MODE_{choice.upper()}")


def _conversation(body: dict[str, Any]) -> inference_pb2.Prompt:
    conversation = inference_pb2.Conversation(
        messages=map(_message, body["messages"]), tools=map(_tool, body.get("tools", ()))
    )
    if "tool_choice" in body:
        conversation.tool_choice.CopyFrom(_tool_choice(body["tool_choice"]))
    if "parallel_tool_calls" in body:
        conversation.tool_choice.parallel_tool_calls = body["parallel_tool_calls"]
    if "chat_template_kwargs" in body:
        conversation.chat_template_kwargs = json.dumps(body["chat_template_kwargs"])
    return inference_pb2.Prompt(conversation=conversation)


def _text_or_tokens(prompt: str | list[int]) -> inference_pb2.Prompt:
    if isinstance(prompt, str):
        return inference_pb2.Prompt(text=prompt)
    return inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=prompt))


def _request_fields(body: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of the gRPC request that means the same as an HTTP body."""
    options = {
        name: value
        for name, value in body.items()
        if name not in (*CONVERSATION, "prompt", "model")
    }
    fields = {"model": body.get("model", ""), "options": generation_options(**options)}
    if "messages" in body:
        return fields | {"prompt": _conversation(body)}
    prompt = body["prompt"]
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return fields | {"prompts": list(map(_text_or_tokens, prompt))}
    return fields | {"prompt": _text_or_tokens(prompt)}


def _failed_call(error: grpc.aio.AioRpcError) -> Outcome:
    violations = error_details_pb2.BadRequest()
    for packed in rpc_status.from_call(error).details:
        packed.Unpack(violations)
    field = violations.field_violations[0].field if violations.field_violations else None
    return Outcome(error=error.code().name, field=field)


def _add(before: Answer, choice: inference_pb2.Choice) -> Answer:
    """Returns the answer `before` with the content of one more message added."""
    reason = inference_pb2.FinishReason.Name(choice.finish_reason)
    pieces = ((call.index, call.name, call.arguments) for call in choice.tool_calls)
    return Answer(
        text=before.text + choice.text,
        reasoning=before.reasoning + choice.reasoning_content,
        calls=_with_pieces(before.calls, pieces),
        token_ids=before.token_ids + tuple(choice.token_ids),
        finish_reason=reason.removeprefix("FINISH_REASON_").lower() if choice.finish_reason else "",
    )


def _prompts(message: Any) -> tuple[tuple[int, ...], ...]:
    several = tuple(tuple(prompt.ids) for prompt in message.prompts_token_ids)
    return several or (tuple(message.prompt_token_ids),)


async def over_grpc(clients: Clients, body: dict[str, Any]) -> Outcome:
    """Requests whole answers over gRPC."""
    try:
        answer = await clients.inference.generate(
            inference_pb2.GenerateRequest(**_request_fields(body))
        )
    except grpc.aio.AioRpcError as error:
        return _failed_call(error)
    found = {choice.index: _add(Answer(), choice) for choice in answer.choices}
    usage = answer.usage.prompt_tokens, answer.usage.completion_tokens
    return Outcome(choices(found), usage, _prompts(answer))


async def over_grpc_stream(clients: Clients, body: dict[str, Any]) -> Outcome:
    """Requests a stream over gRPC."""
    request = inference_pb2.GenerateStreamRequest(**_request_fields(body))
    found: dict[int, Answer] = {}
    outcome = Outcome()
    try:
        async for message in clients.inference.stream(request):
            if message.HasField("seed"):
                outcome = replace(outcome, prompts=_prompts(message))
            if message.HasField("choice"):
                index = message.choice.index
                found[index] = _add(found.get(index, Answer()), message.choice)
            else:
                usage = message.usage.prompt_tokens, message.usage.completion_tokens
                outcome = replace(outcome, usage=usage)
    except grpc.aio.AioRpcError as error:
        return _failed_call(error)
    return replace(outcome, answers=choices(found))


Way = Callable[[Clients, dict[str, Any]], Awaitable[Outcome]]

OTHER_WAYS: dict[str, Way] = {
    "HTTP stream": over_http_stream,
    "gRPC": over_grpc,
    "gRPC stream": over_grpc_stream,
}
"""All ways but `over_http`, with which the others are compared."""
