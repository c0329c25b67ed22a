"""Calls in each protocol that are cut, nearly JSON, or not JSON at all."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from orcinus.v1 import scheduler_pb2

from tests.fake_scheduler import PIPELINE, FakeScheduler, says
from tests.frontend import chat_templates
from tests.frontend.conftest import Site, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

EOS = PIPELINE.eos_token_ids[0]
USER = {"role": "user", "content": "x"}
SCHEMA = {"type": "object"}

NEAR = {
    "newline": ('{"a": "one\ntwo"}', {"a": "one\ntwo"}),
    "backslash": (r'{"a": "\d+"}', {"a": r"\d+"}),
    "python": ("{'a': None,}", {"a": None}),
    "comment": ('{"a": 1 // one\n}', {"a": 1}),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """A frontend of a model that writes calls as Hermes does."""
    pipeline = scheduler_pb2.PipelineDescription()
    pipeline.CopyFrom(PIPELINE)
    pipeline.max_model_len = 4096
    directory = tmp_path_factory.mktemp("checkpoint")
    scheduler = FakeScheduler(pipeline=pipeline)
    async with running(directory, scheduler, template=chat_templates.HERMES) as site:
        yield site


def call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "write", "arguments": {arguments}}}\n</tool_call>'


async def answer(site: Site, path: str, text: str, *, ends: bool = True, **body: Any) -> Any:
    tokens = site.tokens(text)
    site.scheduler.behaviour = says(*tokens, *([EOS] if ends else []))
    if not ends:
        limit = "max_output_tokens" if path == "responses" else "max_tokens"
        body = {limit: len(tokens), **body}
    response = await site.http.post(f"/v1/{path}", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def message(site: Site, text: str, **body: Any) -> Any:
    tools = [{"name": "write", "input_schema": SCHEMA}]
    body = {"messages": [USER], "max_tokens": 200, "tools": tools, **body}
    return await answer(site, "messages", text, **body)


async def chat(site: Site, text: str, **body: Any) -> Any:
    tools = [{"type": "function", "function": {"name": "write", "parameters": SCHEMA}}]
    whole = await answer(site, "chat/completions", text, messages=[USER], tools=tools, **body)
    return whole["choices"][0]


async def response(site: Site, text: str, **body: Any) -> Any:
    tools = [{"type": "function", "name": "write", "parameters": SCHEMA}]
    return await answer(site, "responses", text, input="x", tools=tools, **body)


@pytest.mark.parametrize(("written", "meant"), NEAR.values(), ids=NEAR.keys())
async def test_arguments_that_are_nearly_json_are_kept_as_text_and_repaired_as_an_object(
    site: Site, written: str, meant: dict[str, Any]
) -> None:
    (made,) = (await chat(site, call(written)))["message"]["tool_calls"]
    assert made["function"]["arguments"] == written
    (item,) = (await response(site, call(written)))["output"]
    assert (item["arguments"], item["status"]) == (written, "completed")
    said = await message(site, call(written))
    (block,) = said["content"]
    assert (block["type"], block["input"], said["stop_reason"]) == ("tool_use", meant, "tool_use")


async def test_stream_has_arguments_as_they_were_written(site: Site) -> None:
    written, _ = NEAR["newline"]
    site.scheduler.behaviour = says(*site.tokens(call(written)), EOS)
    tools = [{"name": "write", "input_schema": SCHEMA}]
    body = {"messages": [USER], "max_tokens": 200, "tools": tools, "stream": True}
    lines = (await site.http.post("/v1/messages", json=body)).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data")]
    parts = [event["delta"].get("partial_json", "") for event in events if "delta" in event]
    assert "".join(parts) == written


async def test_call_whose_arguments_are_no_object_is_content_where_one_is_needed(
    site: Site,
) -> None:
    said = await message(site, call('{"a" "b"}'))
    (block,) = said["content"]
    assert block == {"type": "text", "text": '{"name": "write", "arguments": {"a" "b"}}'}
    assert said["stop_reason"] == "end_turn"


CUT = '{"a": "one\ntwo", "b": "three '


async def test_stop_string_that_cuts_a_call_is_the_reason_for_the_end(site: Site) -> None:
    text = call(CUT + 'STOP four"}')
    said = await message(site, text, stop_sequences=["STOP"])
    assert (said["stop_reason"], said["stop_sequence"]) == ("stop_sequence", "STOP")
    assert said["content"][0]["input"] == {"a": "one\ntwo"}
    choice = await chat(site, text, stop="STOP")
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == CUT


@pytest.mark.parametrize("written", [CUT, '{"a": 1', '{"a": {"b": [1, ', "{'a': 'it", "{"])
async def test_call_that_the_model_leaves_incomplete_is_content_where_an_object_is_needed(
    site: Site, written: str
) -> None:
    text = call(written).partition("}\n</tool_call>")[0]
    said = await message(site, text)
    shown = f'{{"name": "write", "arguments": {written}}}'
    assert said["content"] == [{"type": "text", "text": shown}]
    assert said["stop_reason"] == "end_turn"
    choice = await chat(site, text)
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == written


async def test_limit_that_cuts_a_call_is_the_reason_for_the_end(site: Site) -> None:
    text = call(CUT).split("\n</tool_call>")[0][:-1]
    assert (await chat(site, text, ends=False))["finish_reason"] == "length"
    said = await message(site, text, ends=False, max_tokens=len(site.tokens(text)))
    assert said["stop_reason"] == "max_tokens"
    cut = await response(site, text, ends=False)
    assert (cut["status"], cut["output"][-1]["status"]) == ("incomplete", "incomplete")


async def test_model_that_ends_inside_a_call_has_made_no_whole_call(site: Site) -> None:
    text = f'<tool_call>{{"name": "write", "arguments": {CUT}'
    assert (await chat(site, text))["finish_reason"] == "stop"
    assert (await message(site, text))["stop_reason"] == "end_turn"
    assert (await response(site, text))["output"][-1]["status"] == "incomplete"


async def test_marks_left_over_after_a_call_are_no_content(site: Site) -> None:
    choice = await chat(site, call('{"a": "b"}}'))
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
