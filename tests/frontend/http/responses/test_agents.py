"""What agents read of an answer over real sockets: calls by the client's own names, streams of
custom tools, log-probabilities, reasoning to send back, and counts."""

import json
from typing import Any

import openai
import pytest

from services.frontend.generation.generation import Generation
from tests.fake_scheduler import PIPELINE, logprob_of, says, tops_of
from tests.frontend.conftest import Site
from tests.frontend.http.protocol.tagged_reader import TaggedReader

pytestmark = pytest.mark.asyncio(loop_scope="module")

EOS = PIPELINE.eos_token_ids[0]
FUNCTION: dict[str, Any] = {
    "type": "function",
    "name": "status",
    "description": "Says how it is.",
    "parameters": {"type": "object", "properties": {}},
    "strict": False,
}
CUSTOM: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Edits files."}
NAMESPACE: dict[str, Any] = {
    "type": "namespace",
    "name": "ci",
    "description": "d",
    "tools": [FUNCTION, CUSTOM],
}
SEARCH: dict[str, Any] = {"type": "tool_search", "execution": "client", "description": "Finds."}


@pytest.fixture(autouse=True)
def tagged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the model one whose reasoning and calls are read."""
    monkeypatch.setattr(Generation, "message_reader", lambda *_: TaggedReader())


async def respond(site: Site, said: str, **body: Any) -> Any:
    site.scheduler.behaviour = says(*site.tokens(said), EOS)
    response = await site.http.post("/v1/responses", json={"input": "x", **body})
    assert response.status_code == 200, response.text
    return response.json()


async def events(site: Site, said: str, **body: Any) -> list[Any]:
    """The data of a stream's events."""
    site.scheduler.behaviour = says(*site.tokens(said), EOS)
    asked = {"input": "x", "stream": True, **body}
    response = await site.http.post("/v1/responses", json=asked)
    assert response.status_code == 200, response.text
    lines = response.text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def without_ids(item: Any) -> Any:
    return {name: value for name, value in item.items() if name not in ("id", "status", "call_id")}


def client_of(site: Site) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize(
    ("tools", "said", "expected"),
    [
        (
            [NAMESPACE],
            "«status»{}",
            {"type": "function_call", "name": "status", "namespace": "ci", "arguments": "{}"},
        ),
        (
            [NAMESPACE, FUNCTION],
            "«ci__status»{}",
            {"type": "function_call", "name": "status", "namespace": "ci", "arguments": "{}"},
        ),
        (
            [NAMESPACE, FUNCTION],
            "«status»{}",
            {"type": "function_call", "name": "status", "arguments": "{}"},
        ),
        (
            [NAMESPACE],
            '«patch»{"input": "+ a"}',
            {"type": "custom_tool_call", "name": "patch", "namespace": "ci", "input": "+ a"},
        ),
        (
            [CUSTOM],
            '«patch»{"input": "*** Begin\\n+ \\"a\\"\n*** End"}',
            {"type": "custom_tool_call", "name": "patch", "input": '*** Begin\n+ "a"\n*** End'},
        ),
        (
            [CUSTOM],
            "«patch»*** Begin",
            {"type": "custom_tool_call", "name": "patch", "input": "*** Begin"},
        ),
        (
            [SEARCH],
            '«tool_search»{"query": "ci"}',
            {"type": "tool_search_call", "execution": "client", "arguments": {"query": "ci"}},
        ),
        (
            [SEARCH],
            "«tool_search»{query: ci}",
            {"type": "tool_search_call", "execution": "client", "arguments": "{query: ci}"},
        ),
    ],
    ids=str,
)
async def test_calls_come_back_as_the_client_named_its_tools(
    site: Site, tools: list[Any], said: str, expected: dict[str, Any]
) -> None:
    [whole] = (await respond(site, said, tools=tools))["output"]
    assert without_ids(whole) == expected
    found = await events(site, said, tools=tools)
    [item] = found[-1]["response"]["output"]
    assert without_ids(item) == expected
    assert [event["item"] for event in found if event["type"] == "response.output_item.done"] == [
        item
    ]


async def test_a_custom_tool_has_its_own_events_for_openais_client(site: Site) -> None:
    site.scheduler.behaviour = says(*site.tokens('«patch»{"input": "line\\nother"}'), EOS)
    tools: Any = [CUSTOM]
    async with client_of(site) as client:
        async with client.responses.stream(model="test-model", input="x", tools=tools) as stream:
            seen = [event async for event in stream]
        names = [event.type.removeprefix("response.") for event in seen]
        deltas = [e.delta for e in seen if e.type == "response.custom_tool_call_input.delta"]
        assert len(deltas) > 1
        assert names == [
            "created",
            "in_progress",
            "output_item.added",
            *["custom_tool_call_input.delta"] * len(deltas),
            "custom_tool_call_input.done",
            "output_item.done",
            "completed",
        ]
        final: Any = seen[-1]
        [call] = final.response.output
        assert "".join(deltas) == call.input == "line\nother"
        history: list[Any] = [{"role": "user", "content": "x"}, call.model_dump(exclude_none=True)]
        history.append(
            {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
        )
        site.scheduler.behaviour = says(*site.tokens("¶Good."), EOS)
        answer = await client.responses.create(model="test-model", input=history, tools=tools)
    assert answer.output_text == "Good."


async def test_a_call_that_the_limit_cuts_is_incomplete(site: Site) -> None:
    said = '«patch»{"input": "a long text that goes on"}'
    [call] = (await respond(site, said, tools=[CUSTOM], max_output_tokens=25))["output"]
    assert call["status"] == "incomplete"
    assert "a long text that goes on".startswith(call["input"])


async def test_the_answer_repeats_tools_as_the_client_sent_them(site: Site) -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
    edit = {**CUSTOM, "name": "edit", "format": form}
    tools = [NAMESPACE, edit, {**CUSTOM, "format": {"type": "text"}}, SEARCH, {"type": "mcp"}]
    answer = await respond(site, "¶hi", tools=tools)
    assert answer["tools"] == [*tools[:3], {**SEARCH, "parameters": None}]
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "custom", "name": "edit"}, {"type": "namespace", "name": "ci"}],
    }
    answer = await respond(site, "¶hi", tools=tools, tool_choice=allowed)
    assert answer["tools"] == tools[:2]
    assert answer["tool_choice"] == allowed
    one = {"type": "custom", "name": "edit"}
    assert (await respond(site, "¶hi", tools=tools, tool_choice=one))["tool_choice"] == one


@pytest.mark.parametrize(
    ("body", "n_top"),
    [
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, 2),
        ({"top_logprobs": 1}, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "said",
    [
        "¶hi there",
        "§hm hi, there¶hi there",
        "¶hi there«f»{}",
        "§ the¶the«f»{}",
    ],
)
async def test_texts_have_the_log_probabilities_of_their_own_tokens(
    site: Site, said: str, body: dict[str, Any], n_top: int
) -> None:
    content = said.partition("¶")[2].partition("«")[0]
    expected = [
        (
            site.tokenizer.token_texts.text(token_id),
            logprob_of(token_id),
            [value for _, value in tops_of(token_id, n_top)],
        )
        for token_id in site.tokens(f"¶{content}")
    ]
    answer = await respond(site, said, **body)
    found = await events(site, said, **body)
    [text] = [item["content"][0] for item in answer["output"] if item["type"] == "message"]
    columns = [
        (one["token"], one["logprob"], [top["logprob"] for top in one["top_logprobs"]])
        for one in text["logprobs"]
    ]
    assert "".join(one["token"] for one in text["logprobs"]).removeprefix("¶") == content
    assert columns == expected[-len(columns) :]
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    assert [one for event in deltas for one in event["logprobs"]] == text["logprobs"]
    [done] = [event for event in found if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == text["logprobs"]
    output = found[-1]["response"]["output"]
    assert [item["content"][0] for item in output if item["type"] == "message"] == [text]


async def test_log_probabilities_are_left_out_unless_asked_for(site: Site) -> None:
    [item] = (await respond(site, "¶hi"))["output"]
    assert item["content"][0]["logprobs"] == []


async def test_reasoning_goes_back_in_the_form_that_codex_sends(site: Site) -> None:
    include = ["reasoning.encrypted_content"]
    found = await events(site, "§hm¶hi", include=include)
    begun = next(event["item"] for event in found if "item" in event)
    assert begun["encrypted_content"] is None
    [thought, said] = found[-1]["response"]["output"]
    history = [
        {"role": "user", "content": "x"},
        {**thought, "content": None},
        said,
        {"role": "user", "content": "y"},
    ]
    await respond(site, "¶ok", input=history, include=include)
    plain = [history[0], {**thought, "encrypted_content": None}, *history[2:]]
    await respond(site, "¶ok", input=plain)
    *_, sealed, opened = site.scheduler.requests
    assert sealed.submission.prompt_token_ids == opened.submission.prompt_token_ids


@pytest.mark.parametrize(
    "body",
    [
        {"input": "x"},
        {"input": "x", "instructions": "be brief"},
        {"input": [{"role": "user", "content": "x"}], "model": "test-model"},
        {"input": "x", "tools": [NAMESPACE, CUSTOM, {"type": "web_search"}]},
        {"input": "x", "reasoning": {"effort": "low"}, "text": {"verbosity": "low"}},
        {
            "input": [
                {"type": "compaction", "encrypted_content": "z"},
                {"role": "user", "content": "x"},
            ]
        },
    ],
    ids=str,
)
async def test_input_tokens_are_those_of_the_prompt(site: Site, body: dict[str, Any]) -> None:
    counted = await site.http.post("/v1/responses/input_tokens", json=body)
    assert counted.status_code == 200, counted.text
    usage = (await respond(site, "¶hi", **body))["usage"]
    expected = {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}
    assert counted.json() == expected


async def test_prompts_that_are_too_long_are_counted_too(site: Site) -> None:
    body = {"input": "hello " * PIPELINE.max_model_len}
    counted = await site.http.post("/v1/responses/input_tokens", json=body)
    assert counted.json()["input_tokens"] > PIPELINE.max_model_len
    refused = await site.http.post("/v1/responses", json=body)
    assert refused.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("field", ["previous_response_id", "conversation"])
async def test_counting_wants_the_whole_conversation(site: Site, field: str) -> None:
    body = {"input": "x", field: "id_1"}
    counted = await site.http.post("/v1/responses/input_tokens", json=body)
    assert (counted.status_code, counted.json()["error"]["param"]) == (400, field)


async def test_the_header_names_what_was_left_out(site: Site) -> None:
    items = [{"type": "web_search_call", "status": "completed"}, {"role": "user", "content": "x"}]
    site.scheduler.behaviour = says(*site.tokens("¶hi"), EOS)
    tools = [{"type": "file_search", "vector_store_ids": ["v"]}, FUNCTION]
    for stream in (False, True):
        response = await site.http.post(
            "/v1/responses", json={"input": items, "tools": tools, "stream": stream}
        )
        assert response.status_code == 200
        named = response.headers["x-orcinus-ignored-fields"]
        assert named == "input.web_search_call, tools.file_search"


@pytest.mark.parametrize(
    ("definition", "unenforced"),
    [
        ("[a-z]+( [a-z]+)*", None),
        ("a|b", None),
        ("\\d{4}-\\d{2}", None),
        ("(", "tools.1.format"),
        ("(?=a)b", "tools.1.format"),
    ],
    ids=str,
)
@pytest.mark.parametrize("choice", ["auto", {"type": "custom", "name": "patch"}], ids=str)
async def test_an_input_keeps_its_regular_expression_or_the_header_names_it(
    site: Site, definition: str, unenforced: str | None, choice: Any
) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": definition}
    tools = [{"type": "web_search"}, {**CUSTOM, "format": form}]
    site.scheduler.behaviour = says(*site.tokens("¶hi"), EOS)
    body: dict[str, Any] = {"input": "x", "tools": tools, "tool_choice": choice}
    response = await site.http.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    [submitted] = site.scheduler.requests
    assert "input" in submitted.submission.sampling.grammar
    assert response.headers.get("x-orcinus-unenforced") == unenforced


async def test_a_grammar_that_the_model_only_reads_is_named_in_the_header(site: Site) -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
    tools = [CUSTOM, {**CUSTOM, "name": "edit", "format": form}]
    for is_streamed in (False, True):
        site.scheduler.behaviour = says(*site.tokens("¶hi"), EOS)
        body = {"input": "x", "tools": tools, "stream": is_streamed}
        response = await site.http.post("/v1/responses", json=body)
        assert response.headers["x-orcinus-unenforced"] == "tools.1.format"
