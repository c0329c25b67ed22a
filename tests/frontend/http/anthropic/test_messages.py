"""Anthropic's POST /v1/messages over real sockets, with the shapes of its documentation and with
its client."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.frontend.api_keys import ApiKey, hash_of
from services.frontend.generation.generation import Generation
from tests.fake_scheduler import PIPELINE, loses_pipeline_after, says, stalls_after
from tests.frontend.conftest import Site, running
from tests.frontend.http.protocol.tagged_reader import TaggedReader

pytestmark = pytest.mark.asyncio(loop_scope="module")

EOS = PIPELINE.eos_token_ids[0]
HELLO = [{"role": "user", "content": "hello"}]
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
THINKING = {"type": "enabled", "budget_tokens": 1024}
CALLING = '§hm, two¶I look.«get_weather»{"city": "Oslo"}«get_weather»{"city": "Rome"}'


@pytest.fixture
def tagged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the model one whose reasoning and calls are read."""
    monkeypatch.setattr(Generation, "message_reader", lambda *_: TaggedReader())


async def send(site: Site, **body: Any) -> httpx.Response:
    body = {"max_tokens": 1024, "messages": HELLO, **body}
    return await site.http.post("/v1/messages", json=body)


async def events(site: Site, **body: Any) -> list[Any]:
    """The data of a stream's events, whose names are their types."""
    response = await send(site, stream=True, **body)
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.strip().split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith(":")]
        if lines:
            name, data = lines
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


@pytest.fixture
def client(anthropic: Any, site: Site) -> Any:
    """Anthropic's client; entered, it is closed in the end."""
    return anthropic.AsyncAnthropic(base_url=site.url, api_key="none", max_retries=0)


async def test_a_message_is_answered_with_a_message(site: Site) -> None:
    site.scheduler.behaviour = says(*site.tokens("hi there"), EOS)
    answer = (await send(site, system=[{"type": "text", "text": "be brief"}])).json()
    [submitted] = site.scheduler.requests
    prompt = submitted.submission.prompt_token_ids
    assert site.tokenizer.to_text(prompt) == "[system] be brief\n[user] hello\n[assistant] "
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "test-model",
        "content": [{"type": "text", "text": "hi there"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(prompt),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": len(site.tokens("hi there")) + 1,
        },
    }


async def test_answers_and_errors_have_the_name_that_anthropics_client_shows(
    anthropic: Any, client: Any, site: Site
) -> None:
    site.scheduler.behaviour = says(EOS)
    async with client:
        answer = await client.messages.create(
            model="test-model",
            max_tokens=4,
            messages=[{"role": "user", "content": "x"}],
            extra_headers={"x-request-id": "mine"},
        )
        assert answer._request_id == "mine"
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.messages.count_tokens(model="test-model", messages=[])
    assert caught.value.request_id == caught.value.response.headers["x-request-id"]
    assert "request-id" not in (await site.http.get("/v1/models")).headers
    unknown = await site.http.get("/v1/messages/batches")
    assert unknown.status_code == 404
    assert unknown.headers["request-id"] == unknown.headers["x-request-id"]


async def test_the_client_does_not_try_again_after_its_own_deadline(
    anthropic: Any, site: Site
) -> None:
    site.scheduler.behaviour = stalls_after(*site.tokens("ab"))
    n_before = len(site.scheduler.requests)
    async with anthropic.AsyncAnthropic(base_url=site.url, api_key="none") as client:
        with pytest.raises(anthropic.APIStatusError):
            await client.messages.create(
                model="test-model",
                max_tokens=9,
                messages=HELLO,
                extra_headers={"x-request-timeout": "1"},
            )
    assert len(site.scheduler.requests) == n_before + 1


@pytest.mark.parametrize("user", ["ann", None])
async def test_metadata_are_known(site: Site, user: str | None) -> None:
    site.scheduler.behaviour = says(EOS)
    answer = await send(site, metadata={"user_id": user})
    assert answer.status_code == 200
    assert "x-orcinus-ignored-fields" not in answer.headers


@pytest.mark.usefixtures("tagged")
async def test_a_stream_has_anthropics_events_in_order(site: Site) -> None:
    site.scheduler.behaviour = says(*site.tokens('§hm¶hi«f»{"a": 1}'), EOS)
    found = await events(site, thinking=THINKING)
    begun: list[Any] = []  # without repetitions of a delta
    for event in found:
        kind = (event["type"], event.get("delta", event.get("content_block", {})).get("type"))
        if begun[-1:] != [kind]:
            begun.append(kind)
    blocks = [
        [
            ("content_block_start", block),
            *[("content_block_delta", d) for d in deltas],
            ("content_block_stop", None),
        ]
        for block, deltas in [
            ("thinking", ["thinking_delta", "signature_delta"]),
            ("text", ["text_delta"]),
            ("tool_use", ["input_json_delta"]),
        ]
    ]
    assert begun == [
        ("message_start", None),
        ("ping", None),
        *[event for block in blocks for event in block],
        ("message_delta", None),
        ("message_stop", None),
    ]
    start = found[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == (
        [],
        None,
        0,
    )
    places = [event["index"] for event in found if event["type"].startswith("content_block")]
    assert places == sorted(places)
    assert set(places) == {0, 1, 2}
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens"] == len(site.tokens('§hm¶hi«f»{"a": 1}')) + 1


@pytest.mark.usefixtures("tagged")
@pytest.mark.parametrize("limit", [1024, 40], ids=["all", "cut short"])
async def test_anthropics_client_reads_a_stream_as_the_whole_message(
    client: Any, site: Site, limit: int
) -> None:
    site.scheduler.behaviour = says(*site.tokens(CALLING), EOS)
    asked: Any = {"max_tokens": limit, "messages": HELLO, "model": "test-model"}
    asked |= {"tools": [WEATHER], "thinking": THINKING}
    async with client:
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
    left_out: Any = {"id": True, "content": {"__all__": {"signature", "parsed_output"}}}
    assert streamed.model_dump(exclude=left_out) == whole.model_dump(exclude=left_out)
    assert whole.stop_reason == ("tool_use" if limit == 1024 else "max_tokens")
    if limit == 1024:
        thinking, text, *calls = whole.content
        assert thinking.type == "thinking"
        assert thinking.thinking == "hm, two"
        assert text.type == "text"
        assert text.text == "I look."
        cities = [call.input["city"] for call in calls if call.type == "tool_use"]
        assert cities == ["Oslo", "Rome"]


@pytest.mark.usefixtures("tagged")
async def test_anthropics_client_sends_blocks_back_with_results(client: Any, site: Site) -> None:
    site.scheduler.behaviour = says(*site.tokens(CALLING), EOS)
    history: list[Any] = list(HELLO)
    asked: Any = {"max_tokens": 100, "model": "test-model", "tools": [WEATHER]}
    async with client:
        called = await client.messages.create(messages=history, **asked)
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
            for block in called.content
            if block.type == "tool_use"
        ]
        question = {"type": "text", "text": "so?"}
        history += [called.to_param(), {"role": "user", "content": [*results, question]}]
        site.scheduler.behaviour = says(*site.tokens("It rains."), EOS)
        answer = await client.messages.create(messages=history, **asked)
        assert [block.text for block in answer.content if block.type == "text"] == ["It rains."]
        counted = await client.messages.count_tokens(messages=history, model="test-model")
    prompt = site.scheduler.requests[-1].submission.prompt_token_ids
    assert counted.input_tokens == len(prompt)
    assert site.tokenizer.to_text(prompt).endswith(
        "[tool] rain\n[tool] rain\n[user] so?\n[assistant] "
    )


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_the_stop_sequence_that_was_met_is_told(site: Site, is_streamed: bool) -> None:
    site.scheduler.behaviour = says(*site.tokens("hello world, hello"), EOS)
    body = {"stop_sequences": ["zebra", "world"]}
    if is_streamed:
        stop = (await events(site, **body))[-2]["delta"]
    else:
        stop = (await send(site, **body)).json()
    assert (stop["stop_reason"], stop["stop_sequence"]) == ("stop_sequence", "world")


async def test_more_tokens_than_fit_are_as_many_as_fit(site: Site) -> None:
    site.scheduler.behaviour = says(*site.tokens("hi"), EOS)
    assert (await send(site, max_tokens=64_000)).status_code == 200
    [submitted] = site.scheduler.requests
    n_prompt = len(submitted.submission.prompt_token_ids)
    assert submitted.submission.max_new_tokens == PIPELINE.max_model_len - n_prompt


USER, ROBOT = {"role": "user"}, {"role": "robot", "content": "x"}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [ROBOT]}, "messages.0.role"),
        ({"messages": [USER]}, "messages.0.content"),
        ({"messages": [{**USER, "content": [{"type": "audio"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{**USER, "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        (
            {"messages": [{**USER, "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
            "messages.0.content.0.tool_use_id",
        ),
        ({"system": 5}, "system"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "many"}}, "tool_choice.type"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": 9}, "temperature"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
            "output_config.format.schema",
        ),
    ],
    ids=str,
)
async def test_wrong_input_names_the_field_in_anthropics_shape(
    site: Site, body: dict[str, Any], field: str
) -> None:
    response = await send(site, **body)
    answer = response.json()
    assert (response.status_code, answer["type"]) == (400, "error")
    assert answer["error"].keys() == {"type", "message"}
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"].startswith(f"{field}: ")


async def test_keys_come_as_anthropics_clients_send_them(anthropic: Any, tmp_path: Path) -> None:
    entry = ApiKey(name="alice", sha256=hash_of("secret"))
    keys = tmp_path / "keys.json"
    keys.write_text(f'{{"keys": [{entry.model_dump_json(exclude_none=True)}]}}')
    async with running(tmp_path, api_keys_file=keys) as site:
        assert (await send(site)).json()["error"]["type"] == "authentication_error"
        shown = [{"api_key": "secret"}, {"auth_token": "secret"}]
        for key in shown:
            client = anthropic.AsyncAnthropic(base_url=site.url, max_retries=0, **key)
            async with client:
                counted = await client.messages.count_tokens(
                    messages=[{"role": "user", "content": "x"}], model=""
                )
                assert counted.input_tokens > 0


@pytest.mark.usefixtures("tagged")
@pytest.mark.parametrize(
    ("thinking", "shown"),
    [
        (None, None),
        ({"type": "disabled"}, None),
        ({"type": "enabled", "budget_tokens": 1024}, "hm"),
        ({"type": "adaptive"}, "hm"),
        ({"type": "adaptive", "display": "summarized"}, "hm"),
        ({"type": "between_tools"}, "hm"),
        ({"type": "enabled", "budget_tokens": 1024, "display": "omitted"}, ""),
    ],
    ids=str,
)
async def test_thinking_is_shown_only_if_asked_for(
    site: Site, thinking: Any, shown: str | None
) -> None:
    site.scheduler.behaviour = says(*site.tokens("§hm¶hi«f»{}"), EOS)
    content = (await send(site, thinking=thinking)).json()["content"]
    kinds = ["text", "tool_use"] if shown is None else ["thinking", "text", "tool_use"]
    assert [block["type"] for block in content] == kinds
    assert content[0].get("thinking") == shown
    found = await events(site, thinking=thinking)
    begun = [event["content_block"] for event in found if event["type"] == "content_block_start"]
    assert [block["type"] for block in begun] == kinds
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == (shown or "")
    places = [event["index"] for event in found if event["type"] == "content_block_start"]
    assert places == [*range(len(kinds))]


@pytest.mark.usefixtures("tagged")
async def test_an_answer_that_only_thinks_has_an_empty_text(site: Site) -> None:
    site.scheduler.behaviour = says(*site.tokens("§hm"), EOS)
    assert (await send(site)).json()["content"] == [{"type": "text", "text": ""}]


@pytest.mark.parametrize("prefill", ["{", "The answer is (", "[assistant] ", "世", "a\nb"])
async def test_the_answer_goes_on_where_the_last_turn_ends(site: Site, prefill: str) -> None:
    site.scheduler.behaviour = says(*site.tokens("1}"), EOS)
    history = [*HELLO, {"role": "assistant", "content": prefill}]
    answer = (await send(site, messages=history)).json()
    assert answer["content"] == [{"type": "text", "text": "1}"}]
    [submitted] = site.scheduler.requests
    text = site.tokenizer.to_text(submitted.submission.prompt_token_ids)
    assert text == f"[user] hello\n[assistant] {prefill}"
    counted = await site.http.post("/v1/messages/count_tokens", json={"messages": history})
    assert counted.json()["input_tokens"] == len(submitted.submission.prompt_token_ids)


async def test_what_is_left_out_is_named_in_a_header(site: Site) -> None:
    site.scheduler.behaviour = says(EOS)
    used = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}}
    history = [*HELLO, {"role": "assistant", "content": [used]}, *HELLO]
    tools = [WEATHER, {"type": "web_search_20250305", "name": "web_search"}]
    for is_streamed in (False, True):
        answer = await send(site, messages=history, tools=tools, mood=1, stream=is_streamed)
        assert answer.status_code == 200
        assert answer.headers["x-orcinus-ignored-fields"] == (
            "messages.content.server_tool_use, mood, tools.web_search_20250305"
        )


@pytest.mark.parametrize(
    ("method", "path", "headers", "is_anthropics"),
    [
        ("GET", "/v1/messages/batches", {}, True),
        ("POST", "/v1/messages/batches/b1/cancel", {}, True),
        ("DELETE", "/v1/messages", {}, True),
        ("GET", "/v1/messages/count_tokens", {}, True),
        ("POST", "/v1/messages/", {}, True),
        ("POST", "/v1/files", {"anthropic-version": "2023-06-01"}, True),
        ("POST", "/v1/complete", {"Anthropic-Version": "2023-06-01"}, True),
        ("POST", "/v1/messagesx", {}, False),
        ("GET", "/v1/message", {}, False),
        ("POST", "/v1/files", {}, False),
        ("GET", "/v1/models/none", {"anthropic-version": "2023-06-01"}, False),
    ],
)
async def test_paths_that_are_not_served_have_the_errors_of_their_protocol(
    site: Site, method: str, path: str, headers: dict[str, str], is_anthropics: bool
) -> None:
    answer = await site.http.request(method, path, headers=headers)
    assert answer.status_code in (404, 405)
    body = answer.json()
    assert (body.get("type") == "error") is is_anthropics
    assert ("request-id" in answer.headers) is is_anthropics
    if is_anthropics:
        kinds = {404: "not_found_error", 405: "invalid_request_error"}
        assert body["error"]["type"] == kinds[answer.status_code]


async def test_other_errors_have_anthropics_shape_too(site: Site) -> None:
    response = await site.http.get("/v1/messages")
    assert response.status_code == 405
    assert response.json()["error"]["type"] == "invalid_request_error"
    response = await site.http.post("/v1/messages/count_tokens", content=b"x" * 200_000)
    assert response.status_code == 413
    assert response.json()["error"]["type"] == "request_too_large"
    assert "type" not in (await site.http.get("/v1/none")).json()


async def test_a_stream_that_fails_ends_with_an_error(
    anthropic: Any, client: Any, site: Site
) -> None:
    site.scheduler.behaviour = loses_pipeline_after(*site.tokens("hi there"))
    last = (await events(site))[-1]
    assert last["type"] == "error"
    assert last["error"]["type"] == "overloaded_error"
    async with client:
        with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
            async with client.messages.stream(
                max_tokens=5, messages=[{"role": "user", "content": "x"}], model="test-model"
            ) as stream:
                await stream.get_final_message()


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_options_are_answered_as_elsewhere(site: Site, path: str) -> None:
    answer = await site.http.options(path)
    assert (answer.status_code, answer.headers["allow"]) == (204, "POST")
