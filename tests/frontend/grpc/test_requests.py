"""Messages of clients become the requests that both protocols share."""

from typing import Any

import pytest
from orcinus.v1 import inference_pb2

from services.common import errors
from services.frontend.grpc.requests import to_request
from services.frontend.request.conversation import (
    MAX_TOOLS,
    MAX_TURNS,
    ChatMessage,
    Conversation,
    EarlierCall,
    Tool,
    ToolChoice,
)
from services.frontend.request.generation_request import MAX_ANSWERS

TEXT = inference_pb2.Prompt(text="x")
NEW_FIELD = b"\xf8\x06\x01"
"""A field that a later version may have: number 111, a whole number."""


def conversation(**fields: Any) -> inference_pb2.GenerateRequest:
    message = inference_pb2.Conversation(**fields)
    return inference_pb2.GenerateRequest(prompt=inference_pb2.Prompt(conversation=message))


def read(**fields: Any) -> Conversation:
    (prompt,) = to_request(conversation(**fields)).prompts
    assert isinstance(prompt, Conversation)
    return prompt


def refusal(request: inference_pb2.GenerateRequest) -> str:
    with pytest.raises(errors.InvalidRequest) as caught:
        to_request(request)
    return caught.value.field


def test_turns_have_all_that_an_openai_client_sends() -> None:
    call = inference_pb2.ToolCall(id="call_1", name="look", arguments='{"at": 1}', index=3)
    turns = [
        inference_pb2.ChatMessage(role="user", content="hi", name="Ann"),
        inference_pb2.ChatMessage(
            role="assistant", tool_calls=[call, call], reasoning_content="hm"
        ),
        inference_pb2.ChatMessage(role="tool", content="seen", tool_call_id="call_1"),
    ]
    made = EarlierCall("call_1", "look", '{"at": 1}')
    assert read(messages=turns).messages == (
        ChatMessage("user", "hi", "Ann"),
        ChatMessage("assistant", None, tool_calls=(made, made), reasoning_content="hm"),
        ChatMessage("tool", "seen", tool_call_id="call_1"),
    )


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({}, ""),
        ({"content": ""}, ""),
        ({"tool_calls": [inference_pb2.ToolCall(id="a")]}, None),
        ({"tool_calls": [inference_pb2.ToolCall(id="a")], "content": ""}, ""),
    ],
    ids=["not set", "empty", "not set with calls", "empty with calls"],
)
def test_a_turn_has_no_content_only_where_it_has_calls(
    fields: dict[str, Any], content: str | None
) -> None:
    (turn,) = read(messages=[inference_pb2.ChatMessage(role="assistant", **fields)]).messages
    assert turn.content == content


def test_tools_and_variables_come_along() -> None:
    look = inference_pb2.Tool(
        name="look", description="Looks.", parameters='{"type": "object"}', strict=True
    )
    prompt = read(
        tools=[look, inference_pb2.Tool(name="go")],
        chat_template_kwargs='{"enable_thinking": false, "n": [1, null]}',
    )
    assert prompt.tools == (
        Tool(name="look", description="Looks.", parameters='{"type": "object"}', is_strict=True),
        Tool(name="go"),
    )
    assert prompt.template_kwargs == {"enable_thinking": False, "n": [1, None]}


@pytest.mark.parametrize(
    ("fields", "choice"),
    [
        ({}, ToolChoice()),
        ({"mode": "MODE_AUTO"}, ToolChoice()),
        ({"mode": "MODE_UNSPECIFIED", "parallel_tool_calls": True}, ToolChoice()),
        ({"mode": "MODE_NONE"}, ToolChoice(mode="none")),
        ({"mode": "MODE_REQUIRED"}, ToolChoice(mode="required")),
        ({"name": "look"}, ToolChoice(mode="named", name="look")),
        ({"parallel_tool_calls": False}, ToolChoice(allows_parallel=False)),
        (
            {"name": "look", "parallel_tool_calls": False},
            ToolChoice(mode="named", name="look", allows_parallel=False),
        ),
    ],
    ids=str,
)
def test_tool_choice_is_that_of_the_openai_api(fields: dict[str, Any], choice: ToolChoice) -> None:
    assert read(tool_choice=inference_pb2.ToolChoice(**fields)).tool_choice == choice


def with_new_field(message: Any) -> Any:
    """The message as a later version sends it."""
    return type(message).FromString(message.SerializeToString() + NEW_FIELD)


TOOL = inference_pb2.Tool(name="a")
TURN = inference_pb2.ChatMessage(role="user")


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (inference_pb2.GenerateRequest(prompt=TEXT, prompts=[TEXT]), "prompts"),
        (inference_pb2.GenerateRequest(prompts=[conversation().prompt]), "prompts"),
        (inference_pb2.GenerateRequest(prompts=[inference_pb2.Prompt()]), "prompt"),
        (inference_pb2.GenerateRequest(prompts=[TEXT] * (MAX_ANSWERS + 1)), "prompt"),
        (conversation(messages=[TURN] * (MAX_TURNS + 1)), "messages"),
        (conversation(tools=[TOOL] * (MAX_TOOLS + 1)), "tools"),
        (
            conversation(tools=[TOOL, inference_pb2.Tool(name="b", parameters="[]")]),
            "tools.1.function.parameters",
        ),
        (
            conversation(tools=[inference_pb2.Tool(name="b", parameters="{")]),
            "tools.0.function.parameters",
        ),
        (
            conversation(tools=[inference_pb2.Tool(parameters='{"a": "%s"}' % ("x" * 2**16))] * 8),
            "tools",
        ),
        (conversation(tool_choice=inference_pb2.ToolChoice(mode=9)), "tool_choice"),  # type: ignore[arg-type]
        (conversation(chat_template_kwargs="[]"), "chat_template_kwargs"),
        (conversation(chat_template_kwargs="{"), "chat_template_kwargs"),
        (
            conversation(chat_template_kwargs='{"a": "%s"}' % ("x" * 2**14)),
            "chat_template_kwargs",
        ),
        (conversation(chat_template_kwargs="[" * 2000), "chat_template_kwargs"),
        (conversation(messages=[with_new_field(TURN)]), "messages"),
        (conversation(tools=[with_new_field(TOOL)]), "tools"),
        (
            conversation(tool_choice=with_new_field(inference_pb2.ToolChoice(name="a"))),
            "tool_choice",
        ),
        (
            inference_pb2.GenerateRequest(
                prompt=conversation(messages=[TURN]).prompt,
                options=inference_pb2.GenerationOptions(echo=True),
            ),
            "echo",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "-",
)
def test_wrong_request_is_refused_by_name(
    request_: inference_pb2.GenerateRequest, field: str
) -> None:
    assert refusal(request_) == field


def test_lists_of_prompts_are_texts_and_tokens() -> None:
    tokens = inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=[5, 6]))
    request = to_request(inference_pb2.GenerateRequest(prompts=[TEXT, tokens, TEXT]))
    assert request.prompts == ("x", (5, 6), "x")


def test_a_conversation_has_as_many_turns_as_over_http() -> None:
    read(messages=[TURN] * MAX_TURNS)
