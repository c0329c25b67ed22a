"""What the items of an agent's history become: turns, tools, or nothing."""

import json
from typing import Any

import pytest

from services.common import errors
from services.frontend.http.bodies.reader import parse_body
from services.frontend.http.responses import reasoning_text
from services.frontend.http.responses.request import ResponsesBody
from services.frontend.request.conversation import ChatMessage, EarlierCall

USER = {"role": "user", "content": "x"}
ASKED = ChatMessage("user", "x")
FUNCTION: dict[str, Any] = {"type": "function", "name": "status", "parameters": {"type": "object"}}
CUSTOM: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Edits files."}
NAMESPACE: dict[str, Any] = {
    "type": "namespace",
    "name": "ci",
    "description": "About builds.",
    "tools": [FUNCTION],
}
SEARCH: dict[str, Any] = {"type": "tool_search", "execution": "client", "description": "Finds."}


def read(*items: Any, **fields: Any) -> tuple[ResponsesBody, tuple[str, ...]]:
    """Returns the body of a request, and what the answer's header names."""
    told: list[tuple[str, ...]] = []
    data = json.dumps({"input": [USER, *items], **fields}).encode()
    return parse_body(ResponsesBody, data, told.append), told[0] if told else ()


def called(call_id: str, name: str, arguments: Any, result: str | None = None) -> list[ChatMessage]:
    """Returns the turns of a call and of its result."""
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
    call = EarlierCall(call_id, name, arguments.replace(": ", ":").replace(", ", ","))
    turns = [ChatMessage("assistant", None, tool_calls=(call,))]
    if result is not None:
        turns.append(ChatMessage("tool", result, tool_call_id=call_id))
    return turns


@pytest.mark.parametrize(
    ("items", "turns"),
    [
        (
            [
                {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": 'a\n"b"'},
                {"type": "custom_tool_call_output", "call_id": "1", "output": "done"},
            ],
            called("1", "patch", {"input": 'a\n"b"'}, "done"),
        ),
        (
            [
                {
                    "type": "tool_search_call",
                    "call_id": "1",
                    "execution": "client",
                    "arguments": {"q": "ci"},
                },
                {"type": "tool_search_output", "call_id": "1", "tools": [NAMESPACE]},
            ],
            called("1", "tool_search", {"q": "ci"}, '{"tools":["status"]}'),
        ),
        (
            [
                {"type": "tool_search_call", "call_id": None, "arguments": {"q": "ci"}},
                {"type": "tool_search_output", "call_id": None, "tools": [FUNCTION]},
            ],
            [],
        ),
        (
            [
                {
                    "type": "function_call",
                    "call_id": "1",
                    "namespace": "gone",
                    "name": "f",
                    "arguments": "{}",
                },
                {"type": "function_call_output", "call_id": "1", "output": "ok"},
            ],
            called("1", "gone__f", {}, "ok"),
        ),
        (
            [
                {
                    "type": "local_shell_call",
                    "id": "lsh",
                    "call_id": "1",
                    "action": {"command": ["ls"]},
                },
                {"type": "local_shell_call_output", "id": "lsh", "output": "a.txt"},
            ],
            called("1", "local_shell", {"command": ["ls"]}, "a.txt"),
        ),
        (
            [
                {"type": "local_shell_call", "call_id": "1", "action": {"command": ["ls"]}},
                {"type": "function_call_output", "call_id": "1", "output": "a.txt"},
            ],
            called("1", "local_shell", {"command": ["ls"]}, "a.txt"),
        ),
        (
            [
                {"type": "shell_call", "call_id": "1", "action": {"commands": ["ls"]}},
                {"type": "shell_call_output", "call_id": "1", "output": [{"stdout": "a"}]},
            ],
            called("1", "shell", {"commands": ["ls"]}, '[{"stdout":"a"}]'),
        ),
        (
            [
                {"type": "apply_patch_call", "call_id": "1", "operation": {"path": "a"}},
                {"type": "apply_patch_call_output", "call_id": "1", "status": "failed"},
            ],
            called("1", "apply_patch", {"path": "a"}, "failed"),
        ),
        (
            [
                {
                    "type": "mcp_call",
                    "id": "1",
                    "server_label": "s",
                    "name": "f",
                    "arguments": "{}",
                    "output": "ok",
                }
            ],
            called("1", "f", {}, "ok"),
        ),
        (
            [
                {
                    "type": "code_interpreter_call",
                    "id": "1",
                    "code": "1+1",
                    "outputs": [{"type": "logs", "logs": "2"}, {"type": "image", "url": "u"}],
                }
            ],
            called("1", "code_interpreter", {"code": "1+1"}, "2"),
        ),
        (
            [
                {
                    "type": "file_search_call",
                    "id": "1",
                    "queries": ["q"],
                    "results": [{"text": "found"}],
                }
            ],
            called("1", "file_search", {"queries": ["q"]}, "found"),
        ),
        (
            [{"type": "mcp_approval_response", "approve": False, "reason": "too dear"}],
            [ChatMessage("user", "too dear")],
        ),
        (
            [
                {
                    "type": "agent_message",
                    "author": "ann",
                    "content": [{"type": "text", "text": "y"}],
                }
            ],
            [ChatMessage("user", "ann: y")],
        ),
        (
            [
                {
                    "type": "reasoning",
                    "summary": [],
                    "encrypted_content": reasoning_text.sealed("hm ü"),
                },
                {"role": "assistant", "content": "so"},
            ],
            [ChatMessage("assistant", "so", reasoning_content="hm ü")],
        ),
        (
            [
                {
                    "type": "reasoning",
                    "summary": [{"type": "summary_text", "text": "short"}],
                    "content": [{"type": "reasoning_text", "text": "long"}],
                    "encrypted_content": "gAAAA",
                },
                {"role": "assistant", "content": "so"},
            ],
            [ChatMessage("assistant", "so", reasoning_content="long")],
        ),
        (
            [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}],
            [],
        ),
    ],
    ids=lambda value: value[0]["type"] if value and isinstance(value[0], dict) else "",
)
def test_items_of_agents_become_turns(items: list[Any], turns: list[ChatMessage]) -> None:
    body, told = read(*items)
    assert list(body.to_conversation().messages) == [ASKED, *turns]
    assert told == ()


@pytest.mark.parametrize(
    "item",
    [
        {"type": "compaction", "encrypted_content": "gAAAA"},
        {"type": "compaction_summary", "encrypted_content": "gAAAA"},
        {"type": "context_compaction", "encrypted_content": "gAAAA"},
        {"type": "web_search_call", "action": {"type": "search", "query": "q"}},
        {"type": "image_generation_call", "result": "iVBOR", "revised_prompt": "a cat"},
        {"type": "computer_call", "call_id": "1", "action": {"type": "click"}},
        {"type": "computer_call_output", "call_id": "1", "output": {"type": "computer_screenshot"}},
        {
            "type": "mcp_list_tools",
            "server_label": "s",
            "tools": [{"name": "f", "description": "d"}],
        },
        {"type": "mcp_approval_request", "name": "f", "arguments": '{"a": "b"}'},
        {"type": "program", "code": "f()"},
        {"type": "program_output", "result": "ok"},
        {"type": "ghost_snapshot", "ghost_commit": {"id": "1"}},
        {"type": "somersault_call", "arguments": "high"},
        {"type": "marker"},
    ],
    ids=lambda item: str(item["type"]),
)
def test_items_without_text_of_the_user_are_left_out_and_named(item: dict[str, Any]) -> None:
    body, told = read(item)
    assert body.to_conversation().messages == (ASKED,)
    assert told == (f"input.{item['type']}",)


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ({"type": "letter", "body": "Dear model,"}, "input.1.type"),
        ({"type": "input_file", "file_id": "f"}, "input.1.type"),
        ({"type": "item_reference", "id": "msg_1"}, "input.1.id"),
        ({"id": "msg_1"}, "input.1.id"),
        ({"type": "compaction_trigger"}, "input.1.type"),
        ({"role": "user", "content": [{"type": "poem", "lines": ["a"]}]}, "input.1.content.0.type"),
    ],
    ids=str,
)
def test_items_that_would_be_missed_are_refused_by_name(item: dict[str, Any], field: str) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        read(item)
    assert caught.value.field == field
    assert item.get("id", "") in caught.value.message


def test_a_note_stands_in_the_place_of_a_picture_of_the_user() -> None:
    picture = {"type": "input_image", "image_url": "data:"}
    text = {"type": "input_text", "text": "What is it?"}
    body, told = read(picture, {"role": "user", "content": [picture, text]})
    notes = ["[image left out]", "[image left out]\nWhat is it?"]
    assert list(body.to_conversation().messages) == [
        ASKED,
        *(ChatMessage("user", note) for note in notes),
    ]
    assert told == ("input.input_image", "input.content.input_image")


def test_notes_stand_in_the_place_of_pictures_of_tools() -> None:
    image = {"type": "input_image", "image_url": "data:"}
    text = {"type": "input_text", "text": "a cat"}
    body, told = read(
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [text, image]},
        {"type": "custom_tool_call", "call_id": "2", "name": "g", "input": ""},
        {"type": "custom_tool_call_output", "call_id": "2", "output": [image]},
    )
    results = [turn.content for turn in body.to_conversation().messages if turn.role == "tool"]
    assert results == ["a cat\n[image left out]", "[image left out]"]
    assert told == ("input.output.input_image",)


@pytest.mark.parametrize(
    ("tools", "names"),
    [
        ([FUNCTION], ["patch", "status"]),
        ([{**CUSTOM, "name": "edit"}], ["patch", "edit"]),
        ([NAMESPACE], ["patch", "status"]),
        ([FUNCTION, {**FUNCTION, "name": "other"}], ["patch", "status", "other"]),
        ([SEARCH], ["patch", "tool_search"]),
        ([{**CUSTOM, "description": "newer"}], ["patch"]),
        ([{"type": "web_search"}], ["patch"]),
        ([], ["patch"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["additional_tools", "tool_search_output"])
def test_the_model_is_told_the_tools_of_items(
    kind: str, tools: list[Any], names: list[str]
) -> None:
    body, _ = read({"type": kind, "role": "developer", "tools": tools}, tools=[CUSTOM])
    conversation = body.to_conversation()
    assert [tool.name for tool in conversation.tools] == names
    assert conversation.messages == (ASKED,)


def test_developers_and_their_tools_begin_with_one_system_message() -> None:
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [FUNCTION]},
        {"role": "developer", "content": "a"},
        {"type": "configuration_update", "reasoning": {"effort": "low"}},
        {"role": "system", "content": "b"},
        USER,
    ]
    body = parse_body(ResponsesBody, json.dumps({"input": items, "instructions": "c"}).encode())
    assert body.to_conversation().messages == (ChatMessage("system", "c\n\na\n\nb"), ASKED)


def test_tools_come_in_items_too() -> None:
    body, told = read(
        {"type": "additional_tools", "role": "developer", "tools": [FUNCTION, {"type": "mcp"}]},
        {"role": "user", "content": "y"},
        tools=[{"type": "web_search"}, CUSTOM],
    )
    conversation = body.to_conversation()
    assert [tool.name for tool in conversation.tools] == ["patch", "status"]
    assert [turn.content for turn in conversation.messages] == ["x", "y"]
    assert told == ("input.tools.mcp", "tools.web_search")
    with pytest.raises(errors.InvalidRequest) as caught, body.in_own_words():
        raise errors.InvalidRequest("tools.1.function.parameters", "is wrong")
    assert caught.value.field == "input.1.tools.0.parameters"


@pytest.mark.parametrize(
    ("tools", "names"),
    [
        ([NAMESPACE], ["status"]),
        ([NAMESPACE, FUNCTION], ["ci__status", "status"]),
        ([NAMESPACE, {**NAMESPACE, "name": "cd"}], ["ci__status", "cd__status"]),
        ([NAMESPACE, {**FUNCTION, "name": "ci__status"}], ["status", "ci__status"]),
        (
            [NAMESPACE, FUNCTION, {**FUNCTION, "name": "ci__status"}],
            ["ci__status_", "status", "ci__status"],
        ),
        ([{**NAMESPACE, "name": "mcp__ci__"}, FUNCTION], ["mcp__ci__status", "status"]),
        ([NAMESPACE, {**NAMESPACE, "tools": [CUSTOM]}], ["status", "patch"]),
        ([FUNCTION, {**FUNCTION, "description": "new"}], ["status"]),
        ([{**FUNCTION, "defer_loading": True}], ["status"]),
        ([{**FUNCTION, "defer_loading": True}, SEARCH], ["tool_search"]),
        ([{"type": "tool_search"}, FUNCTION], ["status"]),
    ],
    ids=str,
)
def test_the_model_sees_each_tool_by_a_name_of_its_own(tools: list[Any], names: list[str]) -> None:
    body, _ = read(tools=tools)
    assert [tool.name for tool in body.to_conversation().tools] == names


def test_tools_that_a_search_found_are_seen() -> None:
    found = {**FUNCTION, "defer_loading": True}
    body, _ = read(
        {"type": "tool_search_call", "call_id": "1", "arguments": {}},
        {"type": "tool_search_output", "call_id": "1", "tools": [found]},
        tools=[SEARCH, found, {**found, "name": "other"}],
    )
    assert [tool.name for tool in body.to_conversation().tools] == ["tool_search", "status"]


def test_the_description_of_a_namespace_is_told_once() -> None:
    body, _ = read(tools=[{**NAMESPACE, "tools": [FUNCTION, CUSTOM]}])
    first, second = body.to_conversation().tools
    assert first.description == "Group ci (status, patch): About builds."
    assert second.description == "Edits files."


@pytest.mark.parametrize(
    ("form", "kept"),
    [
        (None, {"type": "string"}),
        ({"type": "text"}, {"type": "string"}),
        (
            {"type": "grammar", "syntax": "regex", "definition": "a|b"},
            {"type": "string", "pattern": "^(?:a|b)$"},
        ),
        (
            {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'},
            {"type": "string", "description": 'A text of this grammar (Lark):\nstart: "a"'},
        ),
    ],
    ids=["none", "text", "regex", "lark"],
)
def test_a_custom_tool_is_a_function_of_one_text(form: Any, kept: dict[str, Any]) -> None:
    body, _ = read(tools=[{**CUSTOM, "format": form}])
    [tool] = body.to_conversation().tools
    assert json.loads(tool.parameters) == {
        "type": "object",
        "properties": {"input": kept},
        "required": ["input"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    ("choice", "mode", "name"),
    [
        ({"type": "function", "name": "status"}, "named", "status"),
        ({"type": "custom", "name": "patch"}, "named", "patch"),
        ({"type": "function", "name": "status", "namespace": "cd"}, "named", "cd__status"),
        ({"type": "function", "name": "only"}, "named", "only"),
    ],
    ids=str,
)
def test_a_tool_is_chosen_by_the_clients_name(choice: Any, mode: str, name: str) -> None:
    second = {**NAMESPACE, "name": "cd", "tools": [FUNCTION, {**FUNCTION, "name": "only"}]}
    body, _ = read(tools=[FUNCTION, CUSTOM, NAMESPACE, second], tool_choice=choice)
    chosen = body.to_conversation().tool_choice
    assert (chosen.mode, chosen.name) == (mode, name)


def test_whole_namespaces_may_be_allowed() -> None:
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "namespace", "name": "ci"}, {"type": "tool_search"}, {"type": "mcp"}],
    }
    body, _ = read(tools=[CUSTOM, NAMESPACE, SEARCH], tool_choice=allowed)
    conversation = body.to_conversation()
    assert [tool.name for tool in conversation.tools] == ["status", "tool_search"]
    assert conversation.tool_choice.mode == "required"


def test_the_last_change_of_the_effort_counts() -> None:
    changes = [
        {"type": "configuration_update", "reasoning": {"effort": effort}}
        for effort in ("low", "high")
    ]
    body, told = read(*changes, reasoning={"effort": "medium"})
    assert body.to_conversation().template_kwargs["reasoning_effort"] == "high"
    assert told == ()
