"""Chat templates are rendered as the library they were made for renders them."""

import json
from pathlib import Path

import pytest

from services.common import errors
from services.frontend.request.generation_request import ChatMessage
from services.frontend.text.chat_template import ChatTemplate

HELLO = [ChatMessage("user", "hello <b> ü")]


def render(source: str, messages: list[ChatMessage] | None = None) -> str:
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(HELLO if messages is None else messages)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}|{{ eos_token }}", "<s>|</s>"),
        ("{{ messages[0]['content'] }}", "hello <b> ü"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "hello <b> ü"}'),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ("{% if tools is none and not documents %}plain{% endif %}", "plain"),
        ("x\n  {% if true %}\ny\n  {% endif %}\nz", "x\ny\nz"),
        ("{% for m in messages %}{% break %}never{% endfor %}done", "done"),
        ("{% generation %}said{% endgeneration %}", "said"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = 1 %}{{ ns.n }}", "1"),
    ],
    ids=[
        "special-tokens",
        "no-escaping",
        "tojson",
        "generation-prompt",
        "no-tools",
        "trimmed-blocks",
        "loop-controls",
        "generation-block",
        "date",
        "namespace",
    ],
)
def test_template_finds_what_it_expects(source: str, expected: str) -> None:
    assert render(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content.upper() }}",
        "{{ 1 + 'a' }}",
        "{{ 1 // 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
    ],
    ids=["raises", "undefined", "type", "arithmetic", "mutation", "escape"],
)
def test_template_that_refuses_names_the_messages(source: str) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        render(source)
    assert caught.value.field == "messages"


def test_message_of_the_template_reaches_the_client() -> None:
    with pytest.raises(errors.InvalidRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def write_config(directory: Path, **config: object) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}{{ eos_token }}",
        [
            {"name": "tool_use", "template": "tools"},
            {"name": "default", "template": "{{ bos_token }}{{ eos_token }}"},
        ],
    ],
    ids=["one", "named"],
)
def test_template_and_tokens_come_from_the_configuration(tmp_path: Path, template: object) -> None:
    write_config(
        tmp_path,
        chat_template=template,
        bos_token={"content": "<s>"},
        eos_token="</s>",
        unk_token=None,
    )
    found = ChatTemplate.from_directory(tmp_path)
    assert found is not None
    assert found.render(HELLO) == "<s></s>"


def test_template_file_comes_before_the_configuration(tmp_path: Path) -> None:
    write_config(tmp_path, chat_template="old", bos_token="<s>")
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}new", encoding="utf-8")
    found = ChatTemplate.from_directory(tmp_path)
    assert found is not None
    assert found.render(HELLO) == "<s>new"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b'{"chat_template": "\xff"}'),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b'{"chat_template": [{}]}'),
        ("tokenizer_config.json", b'{"chat_template": "a", "bos_token": {}}'),
        ("tokenizer_config.json", b'{"chat_template": "{% if %}"}'),
        ("chat_template.jinja", b"a\n{% for %}\nb"),
        ("chat_template.jinja", b"{{ 'a' | unknown }}"),
        ("chat_template.jinja", b" " * (1 << 20) + b" "),
        ("chat_template.jinja", b"{% for a in b %}" * 30 + b"{% endfor %}" * 30),
        ("chat_template.jinja", b"{{" + b"(" * 10_000),
        ("tokenizer_config.json", b'{"a":' * 10_000),
    ],
    ids=["json", "utf8", "list", "nameless", "token", "template", "file", "filter", "long", "loops",
         "parentheses", "nested"],
)  # fmt: skip
def test_broken_template_is_a_value_error_of_one_line(
    tmp_path: Path, file: str, content: bytes
) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match="is broken") as caught:
        ChatTemplate.from_directory(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config", [None, {}, {"chat_template": None}], ids=["none", "empty", "null"]
)
def test_checkpoint_without_a_template_has_none(
    tmp_path: Path, config: dict[str, object] | None
) -> None:
    if config is not None:
        write_config(tmp_path, **config)
    assert ChatTemplate.from_directory(tmp_path) is None
