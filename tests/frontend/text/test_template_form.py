"""Each template gets turns in the form that it takes, and no message is lost silently."""

import dataclasses
from typing import Any

import pytest

from services.common import errors
from services.frontend.request.conversation import (
    ChatMessage,
    Conversation,
    EarlierCall,
    Tool,
)
from services.frontend.text.chat_template import ChatTemplate
from services.frontend.text.message_format import MessageFormat
from tests.frontend.text.formats.checkpoint import Checkpoint

CALL = EarlierCall("call12345", "find", '{"city":  "Rome"}')
USER = ChatMessage("user", "x")
CALLING = ChatMessage("assistant", None, tool_calls=(CALL,))
RESULT = ChatMessage("tool", "12", tool_call_id="call12345")
OTHER_CALL = EarlierCall("call12346", "dive", "{}")

LOOP = "{% for m in messages %}BODY{% endfor %}"


def rendered(source: str, *messages: ChatMessage, **fields: Any) -> str:
    conversation = Conversation(messages, **fields)
    return ChatTemplate(source).render(conversation, limit_s=10.0, max_characters=10_000)


def looped(body: str, *messages: ChatMessage, **fields: Any) -> str:
    return rendered(LOOP.replace("BODY", body), *messages, **fields)


NAME = "{{ m.tool_calls[0].function.name }}"
ARGUMENTS = "m.tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("{% if m.content is none %}[NAME]{% else %}[{{ m.content }}]{% endif %}", "[x][find][12]"),
        ("{{ '[' + m.content + ']' }}{% if m.tool_calls %}NAME{% endif %}", "[x][]find[12]"),
        ("[{{ m.content }}]{% if m.tool_calls %}NAME{% endif %}", "[x][]find[12]"),
        ("{{ m.content or '-' }}", "x-12"),
    ],
    ids=["asks-for-none", "adds-texts", "prints-none", "no-calls"],
)
def test_content_of_calls_is_null_where_templates_take_null(body: str, expected: str) -> None:
    assert looped(body.replace("NAME", NAME), USER, CALLING, RESULT) == expected


def test_empty_content_without_calls_is_a_text() -> None:
    assert looped("[{{ m.content }}]", USER, ChatMessage("assistant", None)) == "[x][]"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (f"'<' + {ARGUMENTS} + '>'", '<{"city":  "Rome"}>'),
        (f"'<' ~ {ARGUMENTS} ~ '>'", '<{"city":  "Rome"}>'),
        (f"{ARGUMENTS} | tojson", '{"city": "Rome"}'),
        (f"{ARGUMENTS}.city", "Rome"),
        (f"{ARGUMENTS} if {ARGUMENTS} is string else {ARGUMENTS} | tojson", '{"city": "Rome"}'),
    ],
    ids=["adds", "joins", "json", "looks-up", "either"],
)
def test_arguments_are_a_mapping_unless_templates_take_text(written: str, expected: str) -> None:
    body = (
        f"{{% if m.tool_calls %}}{{{{ {written} }}}}{{% else %}}[{{{{ m.content }}}}]{{% endif %}}"
    )
    assert looped(body, USER, CALLING, RESULT) == f"[x]{expected}[12]"


PARTS = "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (PARTS, "xyz"),
        ("{{ m.content[0].text }}", "xyz"),
        (
            "{% if m.role == 'user' %}" + PARTS + "{% else %}{{ '<' + m.content }}{% endif %}",
            "x<yz",
        ),
        (
            "{% if m.content is string %}={{ m.content }}{% else %}" + PARTS + "{% endif %}",
            "=x=y=z",
        ),
    ],
    ids=["loop", "index", "of-one-role", "either"],
)
def test_content_is_parts_where_templates_take_parts(body: str, expected: str) -> None:
    assert looped(body, USER, ChatMessage("assistant", "y"), ChatMessage("user", "z")) == expected


def test_answer_continues_a_turn_of_parts() -> None:
    messages = (USER, ChatMessage("assistant", "Once "))
    fields = {"adds_generation_prompt": False, "continues_last": True}
    assert looped(f"[{PARTS}]", *messages, **fields) == "[x][Once "


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("{{ m.reasoning_content }}", "Hm."),
        ("{{ m.thinking }}", "Hm."),
        ("{{ m['reasoning'] }}", "Hm."),
        ("{{ m.thinking }}{{ m.reasoning_content }}", "Hm.Hm."),
        ("{{ m | length }}", "3"),
    ],
    ids=["reasoning_content", "thinking", "reasoning", "two", "none"],
)
def test_reasoning_has_the_names_that_templates_use(body: str, expected: str) -> None:
    said = ChatMessage("assistant", "Yes.", reasoning_content="Hm.")
    assert looped(body, said) == expected


def test_reasoning_beside_calls_is_kept_where_only_one_text_is_taken() -> None:
    body = (
        "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
        "[{{ m.content or m.thinking }}]"
    )
    turn = dataclasses.replace(CALLING, reasoning_content="Hm.")
    assert looped(body, USER, turn, RESULT) == "[x][Hm.][12]"
    both = dataclasses.replace(turn, content="So.")
    assert looped(body, USER, both, RESULT) == "[x][Hm.\n\nSo.][12]"


@pytest.mark.parametrize(
    ("source", "tool", "expected"),
    [
        ("{{ tools[0].function | tojson }}", {}, '{"name": "f"}'),
        (
            "{{ tools[0].function | tojson }}",
            {"description": "d", "parameters": '{"type": "object"}', "is_strict": True},
            '{"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": true}',
        ),
        ("{{ '<' + tools[0].function.description + '>' }}", {}, "<>"),
    ],
    ids=["bare", "whole", "adds-description"],
)
def test_template_sees_of_tools_what_clients_say(
    source: str, tool: dict[str, Any], expected: str
) -> None:
    assert rendered(source, USER, tools=(Tool(name="f", **tool),)) == expected


SYSTEMS = (ChatMessage("system", "a"), USER, ChatMessage("system", "b"))
TURN = "[{{ m.role[0] }}: {{ m.content }}]"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (TURN, "[s: a][u: x][s: b]"),
        (
            "{% if m.role == 'system' and not loop.first %}{{ raise_exception('1') }}{% endif %}"
            + TURN,
            "[s: a\n\nb][u: x]",
        ),
        ("{% if m.role != 'system' or loop.first %}" + TURN + "{% endif %}", "[s: a\n\nb][u: x]"),
    ],
    ids=["takes", "raises", "drops"],
)
def test_later_system_messages_are_merged_where_templates_do_not_take_them(
    body: str, expected: str
) -> None:
    assert looped(body, *SYSTEMS) == expected
    if "\n" in expected:
        assert looped(body, *SYSTEMS[1:]) == "[s: b][u: x]"
        assert looped(body, ChatMessage("developer", "a"), *SYSTEMS[1:]) == expected


@pytest.mark.parametrize("role", ["tool", "system"])
def test_messages_that_templates_leave_out_are_refused(role: str) -> None:
    body = "{% if m.role != 'ROLE' %}[{{ m.content }}]{% endif %}".replace("ROLE", role)
    with pytest.raises(errors.InvalidRequest, match=f"leaves out messages of the role '{role}'"):
        looped(body, USER, CALLING, ChatMessage(role, "12"))
    assert looped(body, USER, CALLING) == "[x][]"


@pytest.mark.parametrize(
    "body",
    [
        "{% if m.role == 'user' or m.role.startswith('note') %}[{{ m.content }}]{% endif %}",
        "{% if m['role'] in ['user', 'note'] %}[{{ m['content'] }}]{% endif %}",
        "{% if m.role in ('user', 'note') %}[{% for c in m.content %}{{ c.text }}{% endfor %}]"
        "{% endif %}",
    ],
    ids=["beginning", "list", "parts"],
)
@pytest.mark.parametrize("role", ["critic", "ipython", "function result"])
def test_roles_that_templates_would_leave_out_are_refused(body: str, role: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=f"leaves out messages of the role '{role}'"):
        looped(body, USER, ChatMessage(role, "12"))
    assert looped(body, USER, ChatMessage("note", "12")).startswith("[x][")
    assert looped("[{{ m.role }}: {{ m.content }}]", ChatMessage(role, "y")) == f"[{role}: y]"


def test_role_that_a_template_refuses_has_the_templates_error() -> None:
    body = "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}[{{ m.content }}]"
    with pytest.raises(errors.InvalidRequest, match="no tools"):
        looped(body, USER, CALLING, RESULT)


CALL_OR_CONTENT = "{% if m.tool_calls %}NAME{% else %}[{{ m.content }}]{% endif %}"


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (CALL_OR_CONTENT, ("messages.content",)),
        (CALL_OR_CONTENT.replace("[{{ m.content }}]", PARTS), ("messages.content",)),
        ("[{{ m.content or '' }}]{% if m.tool_calls %}NAME{% endif %}", ()),
    ],
    ids=["call-or-content", "call-or-parts", "both"],
)
def test_content_beside_calls_that_a_template_leaves_out_is_named(
    body: str, names: tuple[str, ...]
) -> None:
    template = ChatTemplate(LOOP.replace("BODY", body.replace("NAME", NAME)))
    said = dataclasses.replace(CALLING, content="y")
    assert template.left_out(Conversation((USER, said, RESULT))) == names
    assert template.left_out(Conversation((USER, CALLING, RESULT))) == ()
    assert template.left_out(Conversation((USER, ChatMessage("assistant", "y"), USER))) == ()


ONE_CALL = {
    "raises": "{% if m.tool_calls and m.tool_calls | length != 1 %}{{ raise_exception('one') }}"
    "{% endif %}[{{ m.tool_calls }}{{ m.content }}]",
    "drops": "[{% if m.tool_calls %}{{ m.tool_calls[0] }}{% endif %}{{ m.content }}]",
}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        *[(body, False) for body in ONE_CALL.values()],
        ("[{{ m.tool_calls }}{{ m.content }}]", True),
        ("[{{ m.content }}]", True),
    ],
    ids=[*ONE_CALL, "takes", "shows-none"],
)
def test_answers_have_one_call_where_templates_take_one(
    tmp_path: Any, body: str, expected: bool
) -> None:
    template = ChatTemplate(LOOP.replace("BODY", body))
    assert template.renders_parallel_calls is expected
    tokenizer = Checkpoint(tmp_path).tokenizer
    conversation = Conversation((USER,), tools=(Tool(name="find"),))
    answers = MessageFormat(
        tokenizer, "", renders_parallel_calls=expected, tool_parser="hermes"
    ).of(conversation, ())
    assert answers.is_single is not expected


@pytest.mark.parametrize("end", ["raises", "drops"])
def test_turn_of_several_calls_becomes_turns_where_templates_take_one_call(end: str) -> None:
    body = "{% if m.tool_calls %}({{ m.content or '' }}NAME){% endif %}".replace("NAME", NAME)
    body += "{% if not m.tool_calls %}[{{ m.content }}]{% endif %}"
    if end == "raises":
        body = (
            "{% if m.tool_calls and m.tool_calls[1] %}{{ raise_exception('1') }}{% endif %}" + body
        )
    turn = dataclasses.replace(CALLING, content="y", tool_calls=(CALL, OTHER_CALL))
    other, stray = (
        dataclasses.replace(RESULT, content=content, tool_call_id=name)
        for content, name in (("13", OTHER_CALL.id), ("14", None))
    )
    expected = "[x](yfind)[12](dive)[13][14][x]"
    assert looped(body, USER, turn, other, RESULT, stray, USER) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10 ** 9 }}",
        "{% for i in range(10 ** 5) %}{% for j in range(10 ** 5) %}{% endfor %}{% endfor %}",
        "{{ 1 // 0 }}",
    ],
    ids=["long", "slow", "fails"],
)
def test_template_that_fails_in_probes_is_taken_as_it_is(source: str) -> None:
    template = ChatTemplate(source)
    assert template.renders_parallel_calls
    with pytest.raises(Exception, match=r"it writes|it takes|refuses"):
        template.render(Conversation((USER,)), limit_s=0.1, max_characters=10_000)
