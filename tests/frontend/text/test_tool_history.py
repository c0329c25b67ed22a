"""Calls and their results replay through templates of the kinds that checkpoints have."""

from typing import Any

import pytest

from services.common import errors
from services.frontend.request.conversation import (
    ChatMessage,
    Conversation,
    EarlierCall,
    Tool,
    ToolChoice,
)
from services.frontend.text.chat_template import ChatTemplate
from tests.frontend import chat_templates

FIND = Tool(
    name="find",
    description="Finds it.",
    parameters='{"type": "object", "properties": {"what": {"type": "string"}}}',
)
CALL = EarlierCall("call12345", "find", '{"what": "wh\\u00e4les", "n": [1]}')
HISTORY = (
    ChatMessage("user", "Where?"),
    ChatMessage("assistant", None, tool_calls=(CALL,)),
    ChatMessage("tool", "There.", tool_call_id=CALL.id, name="find"),
)


def render(source: str, *messages: ChatMessage, **fields: Any) -> str:
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    conversation = Conversation(messages, **fields)
    return template.render(conversation, limit_s=1.0, max_characters=10_000)


WRITTEN = '"find", "arguments": {"what": "whäles", "n": [1]}'


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (chat_templates.HERMES, f'<tool_call>\n{{"name": {WRITTEN}}}\n</tool_call><|im_end|>'),
        (
            chat_templates.LLAMA3,
            f'{{"name": {WRITTEN.replace("arguments", "parameters")}}}<|eot_id|>',
        ),
        (chat_templates.MISTRAL, f'[{{"name": {WRITTEN}, "id": "call12345"}}]</s>'),
        (chat_templates.SMOLLM2, "<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\nThere."),
    ],
    ids=["hermes", "llama3", "mistral", "smollm2"],
)
def test_history_of_calls_replays(source: str, expected: str) -> None:
    written = render(source, *HISTORY, tools=(FIND,))
    assert expected in written
    assert "There." in written
    assert "None" not in written


def test_half_a_character_in_arguments_is_refused() -> None:
    call = EarlierCall("1", "find", '{"what": "\ud800"}')
    with pytest.raises(errors.InvalidRequest):
        render(chat_templates.HERMES, ChatMessage("assistant", "", tool_calls=(call,)))


def test_arguments_that_are_no_object_replay_as_text() -> None:
    call = EarlierCall("1", "find", '{"what": "wh')
    written = render(chat_templates.HERMES, ChatMessage("assistant", "", tool_calls=(call,)))
    assert '"arguments": "{\\"what\\": \\"wh"}' in written


TOOL = (
    '{"type": "function", "function": {"name": "find", "description": "Finds it.", '
    '"parameters": {"type": "object", "properties": {"what": {"type": "string"}}}}}'
)


def test_template_sees_tools_as_clients_write_them() -> None:
    assert f"Tools:\n{TOOL}\n" in render(chat_templates.HERMES, *HISTORY, tools=(FIND,))


def test_template_sees_no_tools_if_none_may_be_called() -> None:
    choice = ToolChoice(mode="none")
    written = render(chat_templates.HERMES, *HISTORY, tools=(FIND,), tool_choice=choice)
    assert "Tools:" not in written
    assert written == render(chat_templates.HERMES, *HISTORY)


def test_template_for_tools_is_taken_where_there_are_tools() -> None:
    template = ChatTemplate("plain", tool_source="{{ tools[0].function.name }}")
    plain, with_tools = Conversation(HISTORY[:1]), Conversation(HISTORY[:1], tools=(FIND,))
    assert template.render(plain, limit_s=1.0, max_characters=99) == "plain"
    assert template.render(with_tools, limit_s=1.0, max_characters=99) == "find"


FIRST = "{{ messages[0].role }} {{ messages[0].content }}"


@pytest.mark.parametrize(
    ("source", "role"),
    [
        (FIRST, "system"),
        (FIRST + "{# developer #}", "developer"),
        ("{% if messages[0].role != 'developer' %}" + FIRST + "{% endif %}", "system"),
    ],
    ids=["unknown", "known", "left-out"],
)
def test_developer_is_the_system_where_templates_do_not_know_it(source: str, role: str) -> None:
    assert render(source, ChatMessage("developer", "x")) == f"{role} x"


def test_client_sets_variables_of_the_template() -> None:
    user = ChatMessage("user", "x")
    written = render(chat_templates.HERMES, user, template_kwargs={"enable_thinking": False})
    assert written.endswith("assistant\n<think>\n\n</think>\n\n")
    assert render(chat_templates.HERMES, user).endswith("assistant\n")
    assert render("{{ a.b }}", user, template_kwargs={"a": {"b": 1}}) == "1"


def test_reasoning_of_earlier_turns_replays() -> None:
    said = ChatMessage("assistant", "Yes.", reasoning_content="Hm.")
    assert "<think>\nHm.\n</think>\nYes." in render(chat_templates.HERMES, said)


def test_answer_may_continue_the_last_turn() -> None:
    messages = ChatMessage("user", "x"), ChatMessage("assistant", "Once upon ")
    fields = {"adds_generation_prompt": False, "continues_last": True}
    written = render(chat_templates.SMOLLM2, *messages, **fields)
    assert written.endswith("<|im_start|>assistant\nOnce upon ")
    with pytest.raises(errors.InvalidRequest) as caught:
        render("{{ messages | length }}", *messages, **fields)
    assert caught.value.field == "continue_final_message"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": (FIND,) * 513}, "tools"),
        ({"tools": (Tool(name=""),)}, "tools.0.function.name"),
        ({"tools": (FIND, Tool(name="x" * 257))}, "tools.1.function.name"),
        ({"tool_choice": ToolChoice(mode="required")}, "tool_choice"),
        ({"tools": (FIND,), "tool_choice": ToolChoice(mode="named", name="dive")}, "tool_choice"),
        ({"template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"template_kwargs": {"x": "y" * 16_384}}, "chat_template_kwargs"),
        ({"continues_last": True}, "continue_final_message"),
    ],
    ids=[
        "many",
        "no-name",
        "long-name",
        "none",
        "unknown",
        "kwargs",
        "kwargs-tools",
        "long",
        "both",
    ],
)
def test_wrong_conversations_are_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        Conversation(HISTORY, **fields).check()
    assert caught.value.field == field


def test_everything_that_a_client_sends_is_counted() -> None:
    plain = Conversation(HISTORY)
    more = Conversation(
        HISTORY,
        tools=(Tool(name="n" * 100, description="d" * 100, parameters="p" * 100),),
        template_kwargs={"x": "k" * 100},
    )
    assert more.n_characters >= plain.n_characters + 400
    assert more.n_bytes >= plain.n_bytes + 400
    assert more.n_json_characters >= plain.n_json_characters + 200
    assert (plain.n_parts, more.n_parts) == (4, 5)
