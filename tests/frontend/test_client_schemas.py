"""JSON schemas as clients write them, in every protocol: answers name the keywords that are not
enforced, and say whether the finished value matches."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from orcinus.v1 import inference_pb2, scheduler_pb2

from services.common.sampling import MAX_GRAMMAR_LENGTH
from services.frontend.http.protocol.generating import UNENFORCED
from tests.fake_scheduler import PIPELINE, FakeRequest, FakeScheduler, says
from tests.frontend.conftest import Site, running, soon

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}<tool_call>"
"""A template of Hermes, without the tools."""

EOS = PIPELINE.eos_token_ids[0]
TAGS: dict[str, Any] = {
    "type": "object",
    "properties": {"tags": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}},
    "required": ["tags"],
}
GOOD, BAD = '{"tags": [1, 2]}', '{"tags": [1, 1]}'
PLACE = "properties.tags.uniqueItems"


def called(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="site")
async def make_site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    pipeline = scheduler_pb2.PipelineDescription()
    pipeline.CopyFrom(PIPELINE)
    pipeline.max_model_len = 4096
    async with running(
        tmp_path_factory.mktemp("checkpoint"),
        FakeScheduler(pipeline=pipeline),
        template=TEMPLATE,
        max_body_bytes=2**20,
        max_prompt_characters=2**20,
    ) as site:
        yield site


@dataclass(frozen=True)
class Reply:
    """What a client sees of an answer."""

    names: str
    """Value of the header with what is not enforced."""
    note: Any
    status: int = 200
    error: str = ""


def answers(site: Site, text: str) -> None:
    tokens = site.tokenizer.to_tokens(text, add_special_tokens=False)
    site.scheduler.behaviour = says(*tokens, EOS)


def grammar(site: Site) -> str:
    return str(site.scheduler.requests[-1].submission.sampling.grammar)


async def post(site: Site, path: str, body: dict[str, Any]) -> Reply:
    response = await soon(site.http.post(path, json=body))
    names = response.headers.get(UNENFORCED, "")
    if response.status_code != 200:
        error = response.json()["error"]
        return Reply(names, None, response.status_code, error["message"])
    if not body.get("stream"):
        return Reply(names, response.json().get("orcinus"))
    events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    parts = [json.loads(event) for event in events]
    notes = [part.get("orcinus", part.get("response", {}).get("orcinus")) for part in parts]
    return Reply(names, next((note for note in notes if note is not None), None))


async def over_grpc(site: Site, options: Any, *, is_stream: bool) -> Reply:
    prompt = inference_pb2.Prompt(text="x")
    if not is_stream:
        request = inference_pb2.GenerateRequest(prompt=prompt, options=options)
        answer = await soon(site.inference.generate(request))
        said, choices = answer.unenforced, answer.choices
    else:
        asked = inference_pb2.GenerateStreamRequest(prompt=prompt, options=options)
        pieces = [piece async for piece in site.inference.stream(asked)]
        said, choices = pieces[0].unenforced, [piece.choice for piece in pieces]
    verdicts = [one.schema_valid for one in choices if one.HasField("schema_valid")]
    return Reply(", ".join(said), {"schema_valid": verdicts[0]} if verdicts else None)


USER = [{"role": "user", "content": "x"}]
CHAT = {"messages": USER, "max_tokens": 300}
FUNCTION = {"name": "f", "parameters": TAGS}
FORCED = {"type": "function", "function": {"name": "f"}}


def json_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, **more}}


WAYS: Mapping[str, tuple[str, dict[str, Any], str, bool]] = {
    "chat": (
        "/v1/chat/completions",
        {**CHAT, "response_format": json_schema(TAGS)},
        "response_format.json_schema.schema",
        False,
    ),
    "completion": (
        "/v1/completions",
        {"prompt": "x", "max_tokens": 300, "guided_json": TAGS},
        "guided_json",
        False,
    ),
    "tool of chat": (
        "/v1/chat/completions",
        {
            **CHAT,
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": "required",
            "response_format": {"type": "json_object"},
        },
        "tools.0.function.parameters",
        True,
    ),
    "Responses": (
        "/v1/responses",
        {
            "input": "x",
            "text": {"format": {"type": "json_schema", "name": "s", "schema": TAGS}},
        },
        "text.format.schema",
        False,
    ),
    "tool of Responses": (
        "/v1/responses",
        {"input": "x", "tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
        "tools.0.parameters",
        True,
    ),
    "Anthropic": (
        "/v1/messages",
        {**CHAT, "output_config": {"format": {"type": "json_schema", "schema": TAGS}}},
        "output_config.format.schema",
        False,
    ),
    "tool of Anthropic": (
        "/v1/messages",
        {
            **CHAT,
            "tools": [{"name": "f", "input_schema": TAGS}],
            "tool_choice": {"type": "tool", "name": "f"},
        },
        "tools.0.input_schema",
        True,
    ),
}


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("way", WAYS)
async def test_answers_name_what_is_not_enforced_and_say_whether_the_value_matches(
    site: Site, way: str, is_stream: bool
) -> None:
    path, body, field, is_call = WAYS[way]
    for text, is_valid in ((GOOD, True), (BAD, False)):
        answers(site, called(text) if is_call else text)
        reply = await post(site, path, {**body, "stream": is_stream})
        name = f"{field}.{PLACE}"
        assert reply == Reply(name, {"schema_valid": is_valid, "unenforced": [name]})


async def test_headers_that_go_out_before_a_request_is_accepted_name_what_is_not_enforced(
    site: Site,
) -> None:
    answered = asyncio.Event()

    async def answers_late(request: FakeRequest) -> None:
        await answered.wait()
        await says(EOS)(request)

    site.scheduler.behaviour = answers_late
    path, body, field, _ = WAYS["chat"]
    async with site.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.headers[UNENFORCED] == f"{field}.{PLACE}"
        answered.set()
        assert "[DONE]" in (await response.aread()).decode()


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
async def test_grpc_names_and_checks_the_same(site: Site, is_stream: bool) -> None:
    asked = inference_pb2.OutputFormat(json_schema=json.dumps(TAGS))
    options = inference_pb2.GenerationOptions(format=asked, max_tokens=300)
    for text, is_valid in ((GOOD, True), (BAD, False)):
        answers(site, text)
        reply = await over_grpc(site, options, is_stream=is_stream)
        assert reply == Reply(f"format.{PLACE}", {"schema_valid": is_valid})


async def test_values_of_schemas_that_are_enforced_are_not_checked(site: Site) -> None:
    answers(site, "{}")
    for body in (
        {**CHAT, "response_format": json_schema({"type": "object", "properties": {"a": {}}})},
        {**CHAT, "tools": [{"type": "function", "function": FUNCTION}]},
    ):
        assert await post(site, "/v1/chat/completions", body) == Reply("", None)


async def test_a_whole_reply_has_one_verdict_for_all_answers(site: Site) -> None:
    answers(site, BAD)
    body = {**CHAT, "response_format": json_schema(TAGS), "n": 2}
    reply = await post(site, "/v1/chat/completions", body)
    assert reply.note == {"schema_valid": False, "unenforced": [reply.names]}


async def test_a_stream_that_is_resumed_is_checked_as_a_whole(site: Site) -> None:
    answers(site, BAD)
    path = "/v1/chat/completions"
    body = {**CHAT, "response_format": json_schema(TAGS), "stream": True, "return_token_ids": True}
    whole = (await soon(site.http.post(path, json=body))).text
    token_ids: list[int] = []
    seed, last_id = 0, ""
    for event in whole.split("\n\n")[:8]:
        name, _, data = event.partition("\ndata: ")
        chunk = json.loads(data)
        seed = chunk.get("seed", seed)
        token_ids += chunk["choices"][0]["token_ids"]
        last_id = name.removeprefix("id: ")
    assert 3 < len(token_ids) < len(site.tokenizer.to_tokens(BAD, add_special_tokens=False))
    resumed = await soon(
        site.http.post(
            path,
            json={**body, "resumption": {"seed": seed, "token_ids": [token_ids]}},
            headers={"Last-Event-ID": last_id},
        )
    )
    assert whole.endswith(resumed.text)
    assert '"orcinus":{"schema_valid":false,' in resumed.text
    assert resumed.headers[UNENFORCED]


@pytest.mark.parametrize("way", ["chat", "Responses", "tool of chat", "tool of Anthropic"])
async def test_strict_schemas_that_cannot_be_enforced_are_refused_by_place(
    site: Site, way: str
) -> None:
    path, body, field, _ = WAYS[way]
    strict = json.loads(json.dumps(body))
    holders = [tool.get("function", tool) for tool in strict.get("tools", ())]
    holders.append(strict.get("response_format", {}).get("json_schema", {}))
    holders.append(strict.get("text", {}).get("format", {}))
    for holder in holders:
        holder["strict"] = True
    reply = await post(site, path, strict)
    assert reply.status == 400
    assert f"{field}: 'uniqueItems' at properties.tags cannot be enforced" in reply.error


FORMATS = ["password", "binary", "uuid4", "path", "multi-host-uri", "x"]
NOTS = [
    {"not": {"const": "x"}},
    {"uniqueItems": True, "type": "array"},
    {"if": {"const": "x"}, "then": {"minLength": 2}},
    {"type": "string", "pattern": "^(?!x)"},
    {"oneOf": [{"minLength": 1}, {"maxLength": 3}]},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
]


@pytest.mark.parametrize(
    "member", [*({"type": "string", "format": name} for name in FORMATS), *NOTS], ids=str
)
async def test_a_named_tool_that_is_not_strict_may_have_any_schema(
    site: Site, member: dict[str, Any]
) -> None:
    parameters = {"type": "object", "properties": {"a": member}, "additionalProperties": False}
    answers(site, called("{}"))
    body = {
        **CHAT,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
        "tool_choice": FORCED,
    }
    reply = await post(site, "/v1/chat/completions", body)
    assert reply.status == 200
    assert bool(reply.names) is (member in NOTS)


async def test_many_tools_with_long_schemas_may_be_required(site: Site) -> None:
    def tool(number: int) -> dict[str, Any]:
        members = {f"field_{number}_{i}": {"type": ["string", "integer"][i % 2]} for i in range(44)}
        members["last"] = {"type": "string", "description": "d" * 400}
        schema = {"type": "object", "properties": members, "required": ["last"]}
        return {"type": "function", "function": {"name": f"f{number}", "parameters": schema}}

    tools = [tool(number) for number in range(200)]
    assert len(json.dumps(tools)) > 400_000
    answers(site, '<tool_call>\n{"name": "f7", "arguments": {"last": "x"}}\n</tool_call>')
    body = {**CHAT, "tools": tools, "tool_choice": "required"}
    reply = await post(site, "/v1/chat/completions", body)
    assert reply == Reply("", None)
    assert 300_000 < len(grammar(site)) < MAX_GRAMMAR_LENGTH
    assert "dddd" not in grammar(site)
