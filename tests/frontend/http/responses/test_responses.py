"""POST /v1/responses over real sockets, with the shapes of OpenAI's documentation and with its
client."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from services.common import errors
from services.frontend.generation.generation import Generation
from services.frontend.http.responses.request import ResponsesBody
from tests.fake_scheduler import PIPELINE, loses_pipeline_after, says
from tests.frontend.conftest import Site
from tests.frontend.http.protocol.tagged_reader import TaggedReader

pytestmark = pytest.mark.asyncio(loop_scope="module")

EOS = PIPELINE.eos_token_ids[0]
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALLING = '§hm, two\n\n¶I look.\n«get_weather»{"city": "Oslo"}\n«get_weather»{"city": "Rome"}'


@pytest.fixture
def tagged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the model one whose reasoning and calls are read."""
    monkeypatch.setattr(Generation, "message_reader", lambda *_: TaggedReader())


async def respond(site: Site, **body: Any) -> httpx.Response:
    return await site.http.post("/v1/responses", json={"input": "hello", **body})


async def events(site: Site, **body: Any) -> list[Any]:
    """The data of a stream's events, whose names are their types."""
    response = await respond(site, stream=True, **body)
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.strip().split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith(":")]
        if lines:
            name, data = lines
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


def client_of(site: Site) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0)


async def test_a_text_is_answered_with_a_response_of_one_message(site: Site) -> None:
    site.scheduler.behaviour = says(*site.tokens("hi there"), EOS)
    answer = (await respond(site, instructions="be brief", store=True, temperature=0.5)).json()
    request_id = answer["id"].removeprefix("resp_")
    assert isinstance(answer.pop("created_at"), int)
    [submitted] = site.scheduler.requests
    n_prompt = len(submitted.submission.prompt_token_ids)
    written = site.tokenizer.to_text(submitted.submission.prompt_token_ids)
    assert written == "[system] be brief\n[user] hello\n[assistant] "
    n_output = len(site.tokens("hi there")) + 1
    assert answer == {
        "id": f"resp_{request_id}",
        "object": "response",
        "status": "completed",
        "model": "test-model",
        "output": [
            {
                "id": f"msg_{request_id}_0",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [
                    {
                        "type": "output_text",
                        "text": "hi there",
                        "annotations": [],
                        "logprobs": [],
                    }
                ],
            }
        ],
        "usage": {
            "input_tokens": n_prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": n_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": n_prompt + n_output,
        },
        "error": None,
        "incomplete_details": None,
        "store": False,
        "background": False,
        "previous_response_id": None,
        "truncation": "disabled",
        "instructions": "be brief",
        "max_output_tokens": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": None},
        "temperature": 0.5,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
    }


async def test_a_stream_has_openais_events_in_order(site: Site) -> None:
    site.scheduler.behaviour = says(*site.tokens("hi there"), EOS)
    found = await events(site)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    names = [event["type"].removeprefix("response.") for event in found]
    deltas = [event["delta"] for event in found if event["type"].endswith(".delta")]
    assert names == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * len(deltas),
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert len(deltas) > 1
    assert "".join(deltas) == "hi there" == found[-4]["text"]
    assert found[0]["response"]["usage"] is None
    assert found[-2]["item"] == found[-1]["response"]["output"][0]


def allowed(*names: str) -> dict[str, Any]:
    """The choice of some tools, as OpenAI spells it."""
    tools = [{"type": "function", "name": name} for name in names]
    return {"type": "allowed_tools", "mode": "auto", "tools": [*tools, {"type": "web_search"}]}


def without_names(response: Any) -> Any:
    """A response without what two of them cannot share."""
    text = json.dumps({**response, "created_at": 0})
    return json.loads(text.replace(response["id"].removeprefix("resp_"), "X"))


@pytest.mark.usefixtures("tagged")
@pytest.mark.parametrize("limit", [None, 25], ids=["all", "cut short"])
async def test_a_stream_ends_with_the_whole_response(site: Site, limit: int | None) -> None:
    site.scheduler.behaviour = says(*site.tokens(CALLING), EOS)
    body = {"tools": [WEATHER], "max_output_tokens": limit, "metadata": {"a": "b"}}
    whole = (await respond(site, **body)).json()
    found = await events(site, **body)
    status = "completed" if limit is None else "incomplete"
    assert found[-1]["type"] == f"response.{status}"
    assert without_names(found[-1]["response"]) == without_names(whole)
    assert whole["output"][-1]["status"] == whole["status"] == status
    items = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert items == found[-1]["response"]["output"]
    assert (whole["incomplete_details"] is None) is (limit is None)


@pytest.mark.usefixtures("tagged")
async def test_reasoning_text_and_calls_are_items_of_their_own(site: Site) -> None:
    site.scheduler.behaviour = says(*site.tokens(CALLING), EOS)
    output = (await respond(site, tools=[WEATHER])).json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", *["function_call"] * 2]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "hm, two\n\n"}]
    assert output[1]["content"][0]["text"] == "I look.\n"
    calls = [(item["call_id"], item["name"], item["arguments"]) for item in output[2:]]
    assert calls == [
        ("call_0", "get_weather", '{"city": "Oslo"}\n'),
        ("call_1", "get_weather", '{"city": "Rome"}'),
    ]


@pytest.mark.usefixtures("tagged")
async def test_openais_client_reads_streams_and_sends_their_items_back(site: Site) -> None:
    site.scheduler.behaviour = says(*site.tokens(CALLING), EOS)
    async with client_of(site) as client:
        tools: Any = [WEATHER]
        async with client.responses.stream(
            model="test-model", input="weather?", tools=tools
        ) as stream:
            seen = [event async for event in stream]
            final = await stream.get_final_response()
        kinds = {event.type for event in seen}
        assert {"response.reasoning_text.delta", "response.output_text.delta"} <= kinds
        assert "response.function_call_arguments.delta" in kinds
        assert final.output_text == "I look.\n"
        calls = [item for item in final.output if item.type == "function_call"]
        assert [json.loads(call.arguments)["city"] for call in calls] == ["Oslo", "Rome"]
        history: list[Any] = [{"role": "user", "content": "weather?"}]
        history += [item.model_dump(exclude_none=True) for item in final.output]
        history += [
            {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
            for call in calls
        ]
        site.scheduler.behaviour = says(*site.tokens("It rains."), EOS)
        answer = await client.responses.create(model="test-model", input=history, tools=tools)
        assert answer.output_text == "It rains."
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(input="x", previous_response_id="resp_1")
        assert caught.value.param == "previous_response_id"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input.0.content.0.type",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.id"),
        ({"input": [{"id": "x"}]}, "input.0.id"),
        ({"input": [{"type": "compaction_trigger"}]}, "input.0.type"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.0.call_id"),
        (
            {"input": [{"type": "function_call_output", "call_id": "a", "output": "x"}]},
            "input.0.call_id",
        ),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tool_choice": {"type": "custom", "name": "f"}}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tool_choice": "many"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}},
            "text.format.schema",
        ),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 2**31}, "max_output_tokens"),
        ({"truncation": "all"}, "truncation"),
        ({"tools": [WEATHER], "tool_choice": allowed("f")}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.mode"),
        ({"temperature": 9}, "temperature"),
        ({"metadata": dict.fromkeys("abcdefghijklmnopq", "x")}, "metadata"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
    ],
    ids=str,
)
async def test_wrong_input_names_the_field(site: Site, body: dict[str, Any], field: str) -> None:
    response = await respond(site, **body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert error["message"].startswith(f"{field}: ")


async def test_hosted_tools_and_wishes_that_change_nothing_are_left_out(site: Site) -> None:
    body = {
        "tools": [{"type": "web_search"}, WEATHER],
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"verbosity": "low"},
        "prompt_cache_key": "x",
        "store": False,
        "max_output_tokens": 2,
    }
    answer = (await respond(site, **body)).json()
    assert answer["tools"] == [WEATHER]
    assert answer["reasoning"]["effort"] == "low"


async def test_what_clients_send_by_themselves_is_taken(site: Site) -> None:
    site.scheduler.behaviour = says(*site.tokens("hi"), EOS)
    refusal = {"type": "refusal", "refusal": "I will not."}
    body = {
        "input": [
            {"role": "user", "content": "x"},
            {"type": "message", "role": "assistant", "content": [refusal]},
            {"role": "user", "content": "why?"},
        ],
        "truncation": "auto",
        "max_output_tokens": 10**6,
    }
    answer = (await respond(site, **body)).json()
    assert (answer["status"], answer["max_output_tokens"]) == ("completed", 10**6)
    [submitted] = site.scheduler.requests
    prompt = submitted.submission.prompt_token_ids
    assert "[assistant] I will not.\n" in site.tokenizer.to_text(prompt)
    assert submitted.submission.max_new_tokens == PIPELINE.max_model_len - len(prompt)


async def test_tools_that_are_not_allowed_are_not_shown() -> None:
    tools = [{"type": "web_search"}, WEATHER, {**WEATHER, "name": "find"}]
    body = ResponsesBody.model_validate(
        {"input": "x", "tools": tools, "tool_choice": allowed("find")}
    )
    conversation = body.to_conversation()
    assert [tool.name for tool in conversation.tools] == ["find"]
    assert conversation.tool_choice.mode == "auto"
    with pytest.raises(errors.InvalidRequest) as caught, body.in_own_words():
        raise errors.InvalidRequest("tools.0.function.parameters", "is wrong")
    assert caught.value.field == "tools.2.parameters"


async def test_a_stream_that_fails_says_so_with_what_there_was(site: Site) -> None:
    site.scheduler.behaviour = loses_pipeline_after(*site.tokens("hi there"))
    last = (await events(site))[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"


@pytest.fixture
def small_budget(site: Site) -> Iterator[None]:
    """A process whose clients have sent so much that a little room is left."""
    budget = site.frontend._budget
    with budget.share(budget.max_bytes - 2000):
        yield


@pytest.mark.usefixtures("small_budget")
async def test_texts_that_a_stream_repeats_are_counted_as_memory(site: Site) -> None:
    site.scheduler.behaviour = says(*site.tokens("hello world " * 100), EOS)
    last = (await events(site))[-1]
    assert last["response"]["error"]["code"] == "rate_limit_exceeded"
