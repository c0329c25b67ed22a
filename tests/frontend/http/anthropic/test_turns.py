"""What the turns of Anthropic's protocol become: messages of a conversation, and tools."""

import json
from typing import Any

import pytest

from services.common import errors
from services.frontend.http.anthropic.request import CountBody, MessagesBody
from services.frontend.http.bodies.reader import parse_body
from services.frontend.request.conversation import ChatMessage, Conversation

USER = {"role": "user", "content": "x"}
CALL = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "t1"}
CALLED = [USER, {"role": "assistant", "content": [CALL]}]
TEXT = {"type": "text", "text": "hello"}
F: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}
G: dict[str, Any] = {"name": "g", "input_schema": {"type": "object"}}


def read(messages: Any, **body: Any) -> tuple[Conversation, tuple[str, ...]]:
    """Returns the conversation in a body, and the names of what is ignored."""
    told: list[tuple[str, ...]] = []
    data = json.dumps({"messages": messages, **body}).encode()
    with (parsed := parse_body(CountBody, data, told.append)).in_own_words():
        return parsed.to_conversation(), told[0] if told else ()


def plain(source: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, **more}


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (plain({"type": "text", "media_type": "text/plain", "data": "d"}), "d"),
        (plain({"type": "text", "data": "d"}, title="T", context="C"), "T\nC\nd"),
        (plain({"type": "content", "content": "whole"}, citations={"enabled": True}), "whole"),
        (plain({"type": "content", "content": [TEXT, TEXT]}), "hello\nhello"),
        (plain({"type": "text", "data": ""}, title=None), ""),
        ({"type": "search_result", "title": "T", "source": "u", "content": [TEXT]}, "T\nu\nhello"),
        ({**TEXT, "cache_control": {"type": "ephemeral"}, "citations": None}, "hello"),
    ],
    ids=lambda value: str(value)[:60],
)
@pytest.mark.parametrize("is_result", [False, True], ids=["user", "result"])
def test_text_in_blocks_of_all_kinds_is_read(
    block: dict[str, Any], text: str, is_result: bool
) -> None:
    if is_result:
        result = {**RESULT, "content": [block, TEXT], "is_error": True}
        conversation, ignored = read([*CALLED, {"role": "user", "content": [result]}])
        assert conversation.messages[-1] == ChatMessage("tool", f"{text}\nhello", tool_call_id="t1")
    else:
        conversation, ignored = read([{"role": "user", "content": [block, TEXT]}])
        assert conversation.messages == (ChatMessage("user", f"{text}\nhello"),)
    assert ignored == ()


@pytest.mark.parametrize(
    ("content", "text", "ignored"),
    [
        ([{"type": "tool_reference", "tool_name": "f"}], "Found tool: f", ()),
        (
            [{"type": "tool_reference", "tool_name": name} for name in "fg"],
            "Found tool: f\nFound tool: g",
            (),
        ),
        (
            [TEXT, {"type": "image", "source": {"type": "base64", "data": "AAAA"}}],
            "hello\n[image left out]",
            ("image",),
        ),
        (
            [TEXT, plain({"type": "base64", "media_type": "application/pdf", "data": "AA"})],
            "hello\n[document left out]",
            ("document",),
        ),
        (
            [{"type": "browser_state", "tabs": [{"title": "Home"}]}],
            "[browser_state left out]",
            ("browser_state",),
        ),
        ([{"type": "mood", "text": "glad"}, TEXT], "[mood left out]\nhello", ("mood",)),
        ([], "", ()),
        (None, "", ()),
        ("plain", "plain", ()),
    ],
    ids=str,
)
def test_results_keep_what_is_text_and_note_the_rest(
    content: Any, text: str, ignored: tuple[str, ...]
) -> None:
    turn = {"role": "user", "content": [{**RESULT, "content": content}]}
    conversation, names = read([*CALLED, turn])
    assert conversation.messages[-1] == ChatMessage("tool", text, tool_call_id="t1")
    assert names == tuple(f"messages.content.content.{name}" for name in ignored)


def test_a_note_stands_in_the_place_of_a_picture_of_the_user() -> None:
    picture = {"type": "image", "source": {"type": "base64", "data": "AAAA"}}
    turns = [{"role": "user", "content": [TEXT, picture]}, {"role": "assistant", "content": "a"}]
    conversation, ignored = read([*turns, {"role": "user", "content": [picture, TEXT]}])
    contents = [turn.content for turn in conversation.messages]
    assert contents == ["hello\n[image left out]", "a", "[image left out]\nhello"]
    assert ignored == ("messages.content.image",)


@pytest.mark.parametrize(
    "kind",
    [
        "server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "mcp_tool_use",
        "mcp_tool_result", "code_execution_tool_result", "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result", "tool_search_tool_result", "mcp_tool_listing",
        "advisor_tool_result", "fallback", "container_upload", "a_type_of_next_year",
    ],
)  # fmt: skip
def test_what_servers_did_in_an_assistants_turn_is_left_out(kind: str) -> None:
    block = {"type": kind, "id": "s1", "content": [{"title": "A page", "text": "words"}]}
    conversation, ignored = read([USER, {"role": "assistant", "content": [block, TEXT]}, USER])
    assert [turn.content for turn in conversation.messages] == ["x", "hello", "x"]
    assert ignored == (f"messages.content.{kind}",)
    conversation, _ = read([USER, {"role": "assistant", "content": [block]}, USER])
    assert [turn.content for turn in conversation.messages] == ["x", "", "x"]


@pytest.mark.parametrize(
    ("role", "block", "field"),
    [
        ("user", {"type": "container_upload", "file_id": "f1"}, "type"),
        ("user", {"type": "mood", "text": "glad"}, "type"),
        ("user", {"type": "mood", "deep": [{"note": "glad"}]}, "type"),
        ("system", {"type": "rule", "rule": "be brief"}, "type"),
        ("user", plain({"type": "base64", "media_type": "application/pdf"}), "source.type"),
        ("user", plain({"type": "url", "url": "u"}), "source.type"),
        ("user", plain({"type": "file", "file_id": "f1"}), "source.type"),
        ("user", {"type": 5}, "type"),
        ("assistant", {"type": None}, "type"),
        ("assistant", {"text": "x"}, "type"),
    ],
    ids=str,
)
def test_an_item_whose_loss_would_matter_is_refused_by_its_path(
    role: str, block: dict[str, Any], field: str
) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        read([USER, USER, USER, {"role": role, "content": [TEXT, block]}])
    assert caught.value.field == f"messages.3.content.1.{field}"


@pytest.mark.parametrize(
    "block",
    [
        {"type": "marker"},
        {"type": "marker", "id": "m1", "level": 3, "is_on": True, "cache_control": None},
        {"type": "marker", "status": "done", "parts": [], "text": " "},
        {"type": "remote_call_output", "output": "computed"},
        {"type": "tool_reference", "tool_name": "f"},
    ],
    ids=str,
)
def test_a_users_item_without_text_is_left_out(block: dict[str, Any]) -> None:
    conversation, ignored = read([{"role": "user", "content": [block, TEXT]}])
    assert conversation.messages == (ChatMessage("user", "hello"),)
    assert ignored == (f"messages.content.{block['type']}",)


def addition(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_addition", "tool": tool}


def definition(tool: dict[str, Any]) -> dict[str, Any]:
    return addition({"type": "tool_definition", "definition": tool})


def removal(name: str) -> dict[str, Any]:
    return {"type": "tool_removal", "tool": {"type": "tool_reference", "name": name}}


@pytest.mark.parametrize(
    ("blocks", "names"),
    [
        ([addition({"type": "tool_reference", "name": "f"})], ["f"]),
        ([definition(G)], ["f", "g"]),
        ([definition(G), removal("f")], ["g"]),
        ([removal("f"), addition({"type": "tool_reference", "name": "f"})], ["f"]),
        ([removal("f"), removal("f"), removal("unknown")], []),
        ([definition({**F, "description": "new"})], ["f"]),
        ([definition({"type": "web_search_20250305", "name": "web_search"})], ["f"]),
        ([addition({"type": "mcp_toolset_reference", "server_name": "s"})], ["f"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("role", ["system", "user"])
def test_turns_may_add_and_remove_tools(
    blocks: list[dict[str, Any]], names: list[str], role: str
) -> None:
    turns = [USER, {"role": role, "content": blocks}]
    conversation, _ = read(turns, tools=[F])
    assert sorted(tool.name for tool in conversation.tools) == names
    said = [turn.content for turn in conversation.messages]
    assert said == (["x"] if role == "system" else ["x", ""])


def test_an_error_names_the_place_of_a_tool_in_a_turn() -> None:
    body = parse_body(
        CountBody,
        json.dumps(
            {
                "messages": [USER, {"role": "system", "content": [TEXT, definition(G)]}],
                "tools": [{"type": "memory_20250818", "name": "memory"}, F],
            }
        ).encode(),
    )
    places = {}
    for number in range(2):
        with pytest.raises(errors.InvalidRequest) as caught, body.in_own_words():
            raise errors.InvalidRequest(f"tools.{number}.function.parameters", "is wrong")
        places[number] = caught.value.field
    assert places == {
        0: "tools.1.input_schema",
        1: "messages.1.content.1.tool.definition.input_schema",
    }


@pytest.mark.parametrize(
    "kind",
    [
        "web_search_20250305", "web_search_20260318", "memory_20250818", "computer_20251124",
        "bash_20250124", "text_editor_20250728", "code_execution_20260521", "mcp_toolset",
        "tool_search_tool_regex_20251119", "a_tool_of_next_year",
    ],
)  # fmt: skip
def test_tools_of_servers_are_left_out_and_named(kind: str) -> None:
    conversation, ignored = read([USER], tools=[{"type": kind, "name": "w", "max_uses": 5}, F])
    assert [tool.name for tool in conversation.tools] == ["f"]
    assert ignored == (f"tools.{kind}",)


def test_reasoning_of_earlier_turns_is_given_to_the_template() -> None:
    thinking = [
        {"type": "thinking", "thinking": "hm", "signature": "of another server"},
        {"type": "redacted_thinking", "data": "AAAA"},
        {"type": "thinking", "thinking": "two", "signature": None},
    ]
    conversation, ignored = read(
        [USER, {"role": "assistant", "content": [*thinking, TEXT, CALL]}, USER]
    )
    turn = conversation.messages[1]
    assert (turn.reasoning_content, turn.content) == ("hm\ntwo", "hello")
    assert [call.name for call in turn.tool_calls] == ["f"]
    assert ignored == ()


def test_a_summary_by_the_assistant_is_text() -> None:
    blocks = [{"type": "compaction", "content": "so far"}, {"type": "compaction", "content": None}]
    conversation, _ = read([USER, {"role": "assistant", "content": [*blocks, TEXT]}, USER])
    assert conversation.messages[1].content == "so far\nhello"


@pytest.mark.parametrize(
    ("last", "text"),
    [
        ("{", "{"),
        ([{"type": "text", "text": "The answer is ("}], "The answer is ("),
        ([TEXT, {"type": "text", "text": "two"}], "hello\ntwo"),
        ("ends with a space ", "ends with a space "),
        ([{"type": "thinking", "thinking": "hm"}, TEXT], "hello"),
        ([{"type": "server_tool_use", "id": "s"}, TEXT], "hello"),
    ],
    ids=str,
)
def test_an_answer_continues_a_last_turn_of_the_assistant(last: Any, text: str) -> None:
    conversation, _ = read([USER, {"role": "assistant", "content": last}])
    assert (conversation.continues_last, conversation.adds_generation_prompt) == (True, False)
    assert conversation.messages[-1].content == text


@pytest.mark.parametrize(
    "last",
    ["", " \n", [], [{"type": "thinking", "thinking": "hm"}], [{**TEXT, "text": ""}]],
    ids=str,
)
def test_there_is_nothing_to_continue_in_a_turn_without_text(last: Any) -> None:
    conversation, _ = read([USER, {"role": "assistant", "content": last}])
    assert conversation == read([USER])[0]


def test_a_last_call_needs_its_result() -> None:
    with pytest.raises(errors.InvalidRequest, match="result") as caught:
        read(CALLED)
    assert caught.value.field == "messages.1.content"


@pytest.mark.parametrize(
    ("system", "shown"),
    [
        ({"content": "now"}, ["x", "now", "x"]),
        ({"content": [TEXT, TEXT]}, ["x", "hello\nhello", "x"]),
        ({"content": "now", "clear_at": "never"}, ["x", "now", "x"]),
        ({"content": "now", "clear_at": "next_user_message"}, ["x", "x"]),
        ({"output_config": {"effort": "low"}}, ["x", "x"]),
    ],
    ids=str,
)
def test_system_turns_within_a_conversation_are_passed_on(
    system: dict[str, Any], shown: list[str]
) -> None:
    conversation, ignored = read([USER, {"role": "system", **system}, USER])
    assert [turn.content for turn in conversation.messages] == shown
    assert ignored == ()
    last, _ = read([USER, {"role": "system", "content": "now", "clear_at": "next_user_message"}])
    assert [turn.content for turn in last.messages] == ["x", "now"]


@pytest.mark.parametrize(
    "fields",
    [
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"betas": ["context-1m"], "cache_control": {"type": "ephemeral"}},
        {"metadata": {"user_id": "user_1"}, "service_tier": "auto", "inference_geo": "eu"},
        {"mcp_servers": [{"type": "url", "name": "s", "url": "u"}], "container": {"skills": []}},
        {"thinking": {"type": "adaptive", "display": "summarized"}},
        {"thinking": {"type": "enabled", "budget_tokens": 2048}},
        {"output_config": {"effort": "xhigh", "task_budget": {"type": "tokens", "total": 5}}},
        {"system": [{**TEXT, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]},
        {"tools": [{**F, "defer_loading": True, "cache_control": None, "input_examples": [{}]}]},
        {"speed": "fast", "fallbacks": [], "diagnostics": None, "thread": None},
    ],
    ids=str,
)
def test_what_sdks_send_is_known(fields: dict[str, Any]) -> None:
    told: list[tuple[str, ...]] = []
    data = json.dumps({"messages": [USER], "max_tokens": 5, **fields}).encode()
    parse_body(MessagesBody, data, told.append).to_request()
    assert told == []


def test_the_older_name_of_a_format_is_read_too() -> None:
    form: dict[str, Any] = {"type": "json_schema", "schema": {"type": "object"}}
    bodies: list[dict[str, Any]] = [{"output_format": form}, {"output_config": {"format": form}}]
    schemas = []
    for more in bodies:
        data = json.dumps({"messages": [USER], "max_tokens": 5, **more}).encode()
        schemas.append(parse_body(MessagesBody, data).output_format.schema)
    assert [schema is not None and schema.text for schema in schemas] == ['{"type": "object"}'] * 2
