"""Tools and reasoning over HTTP: what is sent to the model, and the shapes of what it says."""

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionChunk
from orcinus.v1 import scheduler_pb2

from services.common import errors
from services.frontend.http.bodies.reader import parse_body
from services.frontend.http.openai.chat_request import ChatBody
from services.frontend.request.conversation import (
    ChatMessage,
    Conversation,
    EarlierCall,
    ToolChoice,
)
from tests.fake_scheduler import PIPELINE, FakeRequest, FakeScheduler, says
from tests.frontend import chat_templates
from tests.frontend.conftest import Site, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/chat/completions"
EOS = PIPELINE.eos_token_ids[0]
USER = {"role": "user", "content": "x"}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


FIND, DIVE = tool("find", description="Finds.", parameters=SCHEMA), tool("dive")
CALLS = (
    '<tool_call>\n{"name": "find", "arguments": {"n": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "dive", "arguments": {}}\n</tool_call>'
)


def wide() -> FakeScheduler:
    """A scheduler whose model reads long prompts."""
    pipeline = scheduler_pb2.PipelineDescription()
    pipeline.CopyFrom(PIPELINE)
    pipeline.max_model_len = 4096
    return FakeScheduler(pipeline=pipeline)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """A frontend of a model that thinks and calls tools."""
    directory = tmp_path_factory.mktemp("checkpoint")
    async with running(directory, wide(), template=chat_templates.HERMES) as site:
        yield site


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """Another frontend, which knows nothing of the first."""
    directory = tmp_path_factory.mktemp("checkpoint")
    async with running(directory, wide(), template=chat_templates.HERMES) as site:
        yield site


async def chat(site: Site, text: str, **body: Any) -> Any:
    """What the model's text becomes."""
    site.scheduler.behaviour = says(*site.tokens(text), EOS)
    response = await site.http.post(PATH, json={"messages": [USER], "tools": [FIND, DIVE], **body})
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice


async def refused(site: Site, **body: Any) -> tuple[str, str]:
    """The field that is wrong, and why."""
    response = await site.http.post(PATH, json={"messages": [USER], "tools": [FIND], **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


def sampling(site: Site) -> Any:
    return site.scheduler.requests[-1].submission.sampling


def prompt(site: Site) -> str:
    return site.tokenizer.to_text(site.scheduler.requests[-1].submission.prompt_token_ids)


async def test_message_has_calls_instead_of_content(site: Site) -> None:
    choice = await chat(site, CALLS)
    assert choice["finish_reason"] == "tool_calls"
    calls = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None}
    assert [call["type"] for call in calls] == ["function"] * 2
    assert [call["function"] for call in calls] == [
        {"name": "find", "arguments": '{"n": 1}'},
        {"name": "dive", "arguments": "{}"},
    ]
    assert len({call["id"] for call in calls}) == 2
    assert "Finds." in prompt(site)
    assert not sampling(site).grammar


async def test_message_has_reasoning_and_content_beside_calls(site: Site) -> None:
    choice = await chat(site, f"<think>\nHm.\n</think>\n\nWell. {CALLS}")
    assert choice["message"]["reasoning_content"] == "Hm.\n"
    assert choice["message"]["content"] == "Well. "
    assert len(choice["message"]["tool_calls"]) == 2
    only = await chat(site, "<think>\nHm.\n</think>\n\nWell.")
    assert only["finish_reason"] == "stop"
    assert only["message"] == {
        "role": "assistant",
        "content": "Well.",
        "refusal": None,
        "reasoning_content": "Hm.\n",
    }


async def test_answer_that_is_cut_off_in_a_call_says_so(site: Site) -> None:
    choice = await chat(site, CALLS, max_tokens=40)
    assert choice["finish_reason"] == "length"


async def test_model_sees_no_tools_and_calls_none_if_none_may_be_called(site: Site) -> None:
    choice = await chat(site, CALLS, tool_choice="none")
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", CALLS)
    assert "Finds." not in prompt(site)


async def test_calls_of_a_model_without_tools_are_content(site: Site) -> None:
    choice = await chat(site, CALLS, tools=None)
    assert choice["message"]["content"] == CALLS


async def test_one_call_is_left_where_one_is_wanted(site: Site) -> None:
    choice = await chat(site, CALLS, parallel_tool_calls=False)
    assert len(choice["message"]["tool_calls"]) == 1


@pytest.mark.parametrize(
    ("tool_choice", "reason"),
    [("required", "tool_calls"), (tool("find"), "stop")],
    ids=["required", "named"],
)
async def test_call_that_is_required_comes_from_a_grammar(
    site: Site, tool_choice: Any, reason: str
) -> None:
    choice = await chat(site, CALLS, tool_choice=tool_choice)
    assert choice["finish_reason"] == reason
    assert '"\\"name\\"" ": " "\\"find\\""' in sampling(site).grammar
    assert ("dive" in sampling(site).grammar) == (reason == "tool_calls")


async def test_allowed_tools_are_the_only_ones(site: Site) -> None:
    allowed = {"mode": "required", "tools": [tool("dive")]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    await chat(site, CALLS, tool_choice=choice)
    assert "find" not in sampling(site).grammar
    assert "Finds." not in prompt(site)
    allowed["tools"] = [tool("swim")]
    assert (await refused(site, tool_choice=choice))[0] == "tool_choice"


async def test_strict_tools_make_a_grammar(site: Site) -> None:
    choice = await chat(site, CALLS, tools=[tool("find", strict=True, parameters=SCHEMA)])
    assert choice["finish_reason"] == "tool_calls"
    assert "[lazy]" in sampling(site).grammar


async def test_format_of_the_output_leaves_the_choice_to_call(site: Site) -> None:
    asked = {"response_format": {"type": "json_object"}}
    called = await chat(site, f"<think>Hm.</think>{CALLS}", **asked)
    assert (called["finish_reason"], len(called["message"]["tool_calls"])) == ("tool_calls", 2)
    text = json.dumps({"a": CALLS})
    choice = await chat(site, text, **asked)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", text)
    composed = sampling(site).grammar
    assert "json_schema" in composed
    assert "tool_call" in composed


@pytest.mark.parametrize("choice", ["required", tool("find")], ids=["required", "named"])
async def test_a_call_that_is_forced_wins_over_a_format(site: Site, choice: Any) -> None:
    called = await chat(site, CALLS, tool_choice=choice, regex="a+")
    assert called["message"]["tool_calls"]
    assert "a+" not in sampling(site).grammar


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tools": [tool("a", strict=True, parameters={"type": "x"})]}, "tools.0"),
        ({"tools": [FIND, tool("a", parameters={"properties": 5})]}, "tools.1"),
        ({"tools": [tool("a", parameters={"type": "array"})]}, "tools.0"),
    ],
    ids=["strict", "second", "array"],
)
async def test_wrong_schema_is_named(site: Site, body: dict[str, Any], field: str) -> None:
    found, _ = await refused(site, tool_choice="required", **body)
    assert found == f"{field}.function.parameters"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": tool("swim")}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [FIND] * 513}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "f"}, "function_call"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages.0.content.0.type",
        ),
    ],
    ids=str,
)
async def test_wrong_fields_are_refused_by_name(
    site: Site, body: dict[str, Any], field: str
) -> None:
    assert (await refused(site, **body))[0] == field


async def test_effort_and_variables_reach_the_template(site: Site) -> None:
    for body in (
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ):
        await chat(site, "Yes.", **body)
        assert prompt(site).endswith("<think>\n\n</think>\n\n")
    await chat(site, "Yes.", reasoning_effort="high")
    assert prompt(site).endswith("assistant\n")


async def test_answer_continues_the_last_message(site: Site) -> None:
    said = {"role": "assistant", "content": "Once upon"}
    await chat(site, " a time", messages=[USER, said], tools=None, continue_final_message=True)
    assert prompt(site).endswith("assistant\nOnce upon")
    await chat(site, "y", messages=[USER], tools=None, add_generation_prompt=False)
    assert prompt(site).endswith("x<|im_end|>\n")


async def test_stream_has_the_deltas_that_clients_put_together(site: Site) -> None:
    text = f"<think>\nHm.\n</think>\n\nWell. {CALLS}"
    site.scheduler.behaviour = says(*site.tokens(text), EOS)
    client = openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="none")
    stream = await client.chat.completions.create(
        model="test-model",
        messages=[{"role": "user", "content": "x"}],
        tools=[FIND, DIVE],  # type: ignore[list-item]
        stream=True,
    )
    assert isinstance(stream, openai.AsyncStream)
    chunks: list[ChatCompletionChunk] = [chunk async for chunk in stream]
    await client.close()
    first, *others = [chunk.choices[0].delta for chunk in chunks]
    assert (first.role, first.content, first.tool_calls) == ("assistant", "", None)
    deltas = [delta.model_dump(exclude_unset=True) for delta in others]
    kinds = [name for delta in deltas for name in delta]
    assert list(dict.fromkeys(kinds)) == ["reasoning_content", "content", "tool_calls"]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Well. "
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    begun = [call for call in calls if "id" in call]
    beginnings = [d for d in deltas if any("id" in call for call in d.get("tool_calls", ()))]
    assert [delta["content"] for delta in beginnings] == [None, None]
    assert [(call["index"], call["function"]["name"]) for call in begun] == [
        (0, "find"),
        (1, "dive"),
    ]
    assert [call["index"] for call in calls] == sorted(call["index"] for call in calls)
    assert "".join(call["function"]["arguments"] for call in calls) == '{"n": 1}{}'
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "tool_calls"


def frames(content: bytes) -> list[bytes]:
    """The events of a stream that came to its end."""
    *found, done, nothing = content.split(b"\n\n")
    assert (done, nothing) == (b"data: [DONE]", b"")
    return found


async def test_chunks_without_token_ids_are_the_same_in_all_else(site: Site) -> None:
    async def chunks(**body: Any) -> list[Any]:
        site.scheduler.behaviour = says(*site.tokens(f"<think>\nHm.</think>\nWell.{CALLS}"), EOS)
        body |= {"messages": [USER], "tools": [FIND, DIVE], "stream": True, "seed": 1}
        response = await site.http.post(PATH, json=body)
        data = [frame.partition(b"data: ")[2] for frame in frames(response.content)]
        choices = [json.loads(text)["choices"][0] for text in data]
        for choice in choices:
            for call in choice["delta"].get("tool_calls", ()):
                call.pop("id", None)  # another request has other ids
        return choices

    shown = await chunks(return_token_ids=True)
    for choice in shown:
        del choice["token_ids"]
    has_news = [choice for choice in shown if choice["delta"] or choice["finish_reason"]]
    assert await chunks() == has_news


def resumption(received: Sequence[bytes]) -> dict[str, Any]:
    """Returns what a client posts besides the request after these events."""
    chunks = [json.loads(frame.partition(b"data: ")[2]) for frame in received]
    tokens = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    event_id = received[-1].partition(b"id: ")[2].partition(b"\n")[0].decode()
    return {
        "headers": {"Last-Event-ID": event_id},
        "body": {"resumption": {"seed": chunks[0]["seed"], "token_ids": [tokens]}},
    }


@pytest.mark.parametrize("burst", [1, 3])
async def test_stream_with_calls_goes_on_byte_for_byte(
    site: Site, elsewhere: Site, burst: int
) -> None:
    tokens = (*site.tokens(f"<think>\nHm.</think>\nWell.{CALLS}"), EOS)

    async def behave(request: FakeRequest) -> None:
        request.accept()
        while len(new := tokens[request.n_tokens : request.n_tokens + burst]):
            if request.n_tokens + len(new) == len(tokens):
                request.tokens(*new)
                request.complete(scheduler_pb2.COMPLETION_REASON_STOP)
                return
            request.tokens(*new)

    site.scheduler.behaviour = elsewhere.scheduler.behaviour = behave
    body = {"messages": [USER], "tools": [FIND, DIVE], "stream": True, "return_token_ids": True}
    whole = frames((await site.http.post(PATH, json=body)).content)
    assert b'"finish_reason":"tool_calls"' in whole[-1]
    for n_received in range(1, len(whole), 9):
        so_far = resumption(whole[:n_received])
        rest = await elsewhere.http.post(
            PATH, json=body | so_far["body"], headers=so_far["headers"]
        )
        assert frames(rest.content) == whole[n_received:]


def read(*messages: dict[str, Any]) -> tuple[ChatMessage, ...]:
    body = parse_body(ChatBody, json.dumps({"messages": messages}).encode())
    (conversation,) = body.prompts
    assert isinstance(conversation, Conversation)
    return conversation.messages


CALL_BODY = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"n": 1}'}}
CALL = EarlierCall("c1", "find", '{"n": 1}')

SENT_BACK = {
    "openai": {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": [CALL_BODY],
    },
    "litellm": {
        "role": "assistant",
        "content": None,
        "tool_calls": [{**CALL_BODY, "index": 0}],
        "function_call": None,
        "provider_specific_fields": {"refusal": None},
    },
    "vllm": {
        "role": "assistant",
        "content": None,
        "reasoning_content": None,
        "reasoning": None,
        "tool_calls": [CALL_BODY],
    },
    "arguments-as-object": {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "function": {"name": "find", "arguments": {"n": 1}}}],
    },
}


@pytest.mark.parametrize("message", SENT_BACK.values(), ids=SENT_BACK.keys())
async def test_assistants_message_is_taken_as_other_servers_wrote_it(
    message: dict[str, Any],
) -> None:
    (said,) = read(message)
    assert (said.role, said.content) == ("assistant", None)
    (call,) = said.tool_calls
    assert json.loads(call.arguments) == {"n": 1}
    assert (call.id, call.name) == ("c1", "find")


async def test_messages_of_every_role_are_read() -> None:
    assert read(
        {"role": "developer", "content": "d"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "refusal": "No."},
        {"role": "assistant", "content": "a", "reasoning_content": "r"},
        {"role": "assistant", "content": "a", "reasoning": "r"},
        {"role": "assistant", "tool_calls": [CALL_BODY]},
        {"role": "tool", "content": [{"type": "text", "text": "t"}], "tool_call_id": "c1"},
        {"role": "tool", "content": "t", "tool_call_id": "c1", "name": "find"},
    ) == (
        ChatMessage("developer", "d"),
        ChatMessage("assistant", "No."),
        ChatMessage("assistant", "No."),
        ChatMessage("assistant", "a", reasoning_content="r"),
        ChatMessage("assistant", "a", reasoning_content="r"),
        ChatMessage("assistant", None, tool_calls=(CALL,)),
        ChatMessage("tool", "t", tool_call_id="c1"),
        ChatMessage("tool", "t", "find", tool_call_id="c1"),
    )


async def test_history_in_the_older_spelling_is_read_as_the_newer() -> None:
    function = {"name": "find", "arguments": '{"n": 1}'}
    call = EarlierCall("find", "find", '{"n": 1}')
    assert read(
        {"role": "assistant", "content": None, "function_call": function},
        {"role": "function", "name": "find", "content": "t"},
    ) == (
        ChatMessage("assistant", None, tool_calls=(call,)),
        ChatMessage("tool", "t", "find", tool_call_id="find"),
    )


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": None}, "messages.0.content"),
        ({"role": "function", "name": "find"}, "messages.0.content"),
        ({"role": "assistant", "function_call": "find"}, "messages.0.function_call"),
        ({"role": "tool", "tool_call_id": "c1"}, "messages.0.content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.0.content.0.text"),
        ({"role": "assistant", "audio": {"id": "1"}}, "messages.0.audio"),
        ({"role": "assistant", "tool_calls": [CALL_BODY] * 129}, "messages.0.tool_calls"),
    ],
    ids=["user", "function", "text", "tool", "part", "audio", "calls"],
)
async def test_messages_that_cannot_be_read_are_named(message: dict[str, Any], field: str) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        read(message)
    assert caught.value.field == field


async def test_choices_have_the_words_of_all_protocols() -> None:
    for given, choice in (
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("required", ToolChoice(mode="required")),
        (tool("find"), ToolChoice(mode="named", name="find")),
    ):
        body = ChatBody.model_validate({"messages": [USER], "tools": [FIND], "tool_choice": given})
        tools, found = body.tools_and_choice()
        assert found == choice
        assert [json.loads(tool.parameters) for tool in tools] == [SCHEMA]


async def test_parsers_are_settings(tmp_path: Path) -> None:
    async with running(
        tmp_path,
        wide(),
        template=chat_templates.HERMES,
        tool_parser="llama3",
        reasoning_parser="none",
    ) as site:
        choice = await chat(site, '{"name": "find", "parameters": {"n": 1}}')
        assert choice["finish_reason"] == "tool_calls"
        choice = await chat(site, "<think>Hm.</think>")
        assert choice["message"]["content"] == "<think>Hm.</think>"


async def test_conversation_goes_on_where_templates_take_one_call_and_one_system(
    tmp_path: Path,
) -> None:
    refusals = (
        "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length != 1 %}"
        "{{ raise_exception('one call') }}{% endif %}"
        "{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
        "{% endfor %}"
    )
    async with running(tmp_path, wide(), template=refusals + chat_templates.HERMES) as site:
        choice = await chat(site, CALLS)
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "find"
        result = {"role": "tool", "tool_call_id": call["id"], "content": "1"}
        system = {"role": "system", "content": "now dive"}
        await chat(site, "done", messages=[USER, choice["message"], result, system])
