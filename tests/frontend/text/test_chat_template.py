"""Chat templates are rendered as the library they were made for renders them."""

import json
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from services.common import errors
from services.frontend.request.conversation import ChatMessage, Conversation, Tool
from services.frontend.text.chat_template import ChatTemplate
from services.frontend.text.template_sandbox import TooMuch
from tests.checkpoints import write_checkpoint
from tests.ggufs import write_gguf

HELLO = [ChatMessage("user", "hello <b> ü")]


def rendered(template: ChatTemplate, messages: list[ChatMessage]) -> str:
    return template.render(Conversation(tuple(messages)), limit_s=10.0, max_characters=10_000)


def render(source: str, messages: list[ChatMessage] | None = None) -> str:
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    return rendered(template, HELLO if messages is None else messages)


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
    assert rendered(found, HELLO) == "<s></s>"


def test_template_file_comes_before_the_configuration(tmp_path: Path) -> None:
    write_config(tmp_path, chat_template="old", bos_token="<s>")
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}new", encoding="utf-8")
    found = ChatTemplate.from_directory(tmp_path)
    assert found is not None
    assert rendered(found, HELLO) == "<s>new"


LISTED: dict[str, object] = {"added_tokens_decoder": {}}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"chat_template.json": {"chat_template": "json"}}, "json"),
        (
            {
                "chat_template.json": {"chat_template": "json"},
                "tokenizer_config.json": {"chat_template": "config"},
            },
            "json",
        ),
        ({"chat_template.json": {"chat_template": "json"}, "chat_template.jinja": "new"}, "new"),
        ({"chat_template.jinja": "new", "additional_chat_templates/rag.jinja": "rag"}, "new"),
        (
            {"chat_template.jinja": "new", "additional_chat_templates/tool_use.jinja": "tools"},
            "new, tools",
        ),
        (
            {
                "chat_template.jinja": "new",
                "tokenizer_config.json": {
                    "chat_template": [{"name": "tool_use", "template": "old"}]
                },
            },
            "new",
        ),
        (
            {
                "chat_template.jinja": "{{ bos_token }}{{ image_token }}",
                "tokenizer_config.json": {
                    "bos_token": "<old>",
                    "add_bos_token": True,
                    "extra_special_tokens": {"image_token": "<i>"},
                },
                "special_tokens_map.json": {"bos_token": {"content": "<s>"}},
            },
            "<s><i>",
        ),
        (
            {
                "chat_template.jinja": "{{ bos_token }}",
                "tokenizer_config.json": {"bos_token": "<s>", **LISTED},
                "special_tokens_map.json": {"bos_token": "<old>"},
            },
            "<s>",
        ),
    ],
    ids=[
        "json",
        "json-config",
        "json-jinja",
        "other-name",
        "for-tools",
        "replaced",
        "map",
        "listed",
    ],
)
def test_templates_and_tokens_come_from_the_files_that_count(
    tmp_path: Path, files: dict[str, object], expected: str
) -> None:
    for name, content in files.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    found = ChatTemplate.from_directory(tmp_path)
    assert found is not None
    conversation = Conversation(tuple(HELLO), tools=(Tool(name="f"),))
    plain, with_tools = (
        found.render(one, limit_s=10.0, max_characters=100)
        for one in (replace(conversation, tools=()), conversation)
    )
    assert ", ".join(dict.fromkeys([plain, with_tools])) == expected


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
        ("chat_template.json", b"{"),
        ("special_tokens_map.json", b'{"bos_token": {}}'),
    ],
    ids=["json", "utf8", "list", "nameless", "token", "template", "file", "filter", "long", "loops",
         "parentheses", "nested", "older", "map"],
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


def in_gguf(directory: Path, **metadata: object) -> Path:
    """A GGUF file with nothing but what chats need."""
    vocabulary = {"tokens": ["<s>", "</s>"], "bos_token_id": 0, "eos_token_id": 1, **metadata}
    return write_gguf(write_checkpoint(directory), directory / "m.gguf", tokenizer=vocabulary)


def test_the_template_of_a_gguf_file_knows_its_special_tokens(tmp_path: Path) -> None:
    source = "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}"
    found = ChatTemplate.from_model(in_gguf(tmp_path, chat_template=source))
    assert found is not None
    assert rendered(found, HELLO) == "<s>hello <b> ü</s>"
    assert ChatTemplate.from_model(in_gguf(tmp_path / "other")) is None


@pytest.mark.parametrize("source", ["{% if %}", " " * (1 << 20) + " "], ids=["broken", "long"])
def test_a_broken_template_of_a_gguf_file_is_a_value_error(tmp_path: Path, source: str) -> None:
    file = in_gguf(tmp_path, chat_template=source)
    with pytest.raises(ValueError, match=rf"{file}: tokenizer\.chat_template"):
        ChatTemplate.from_model(file)


LIMIT_S, MAX_CHARACTERS = 0.05, 10_000

BOMBS = {
    "loops": "{% set r = range(100000) %}"
    "{% for i in r %}{% for j in r %}{% for k in r %}{% endfor %}{% endfor %}{% endfor %}",
    "loop-of-text": "{% for i in range(100000) %}xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}",
    "kept-text": "{% set x %}{% for i in range(100000) %}xxxxxxxxxxxxxxxxx{% endfor %}{% endset %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "wide-recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "recursive-loop": "{% set r = range(1000) %}"
    "{% for i in r recursive %}{% if loop.depth < 50 %}{{ loop(r) }}{% endif %}{% endfor %}",
    "times": "{{ 'x' * 10 ** 9 }}",
    "times-text": "{{ 10 ** 9 * 'x' }}",
    "list-times": "{{ ([1] * 10 ** 9) | length }}",
    "power": "{{ (10 ** 100000000) % 7 }}",
    "doubling": "{% set ns = namespace(x='x') %}"
    "{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "joining": "{% set ns = namespace(x='x') %}"
    "{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "nesting": "{% set ns = namespace(x=['x']) %}"
    "{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "nesting-json": "{% set ns = namespace(x=['x']) %}"
    "{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}",
    "json-indent": "{{ [1] | tojson(indent=10 ** 9) }}",
    "center": "{{ 'x' | center(10 ** 9) }}",
    "constant-center": "{{ 'x' | center(1000000000) }}",
    "ljust": "{{ 'x'.ljust(10 ** 9) }}",
    "zfill": "{{ 'x'.zfill(10 ** 9) }}",
    "replace": "{% set x = 'x' * 9000 %}{{ x.replace('x', x) }}",
    "replace-filter": "{% set x = 'x' * 9000 %}{{ x | replace('x', x) }}",
    "join": "{% set x = 'x' * 9000 %}{{ ([x] * 9000) | join }}",
    "join-method": "{% set x = 'x' * 9000 %}{{ x.join([x] * 9000) }}",
    "format": "{{ '{:>1000000000}'.format(1) }}",
    "nested-format": "{{ '{:>{}}'.format(1, '1000000000') }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent-star": "{{ '%*d' % (1000000000, 1) }}",
    "format-filter": "{{ '%1000000000d' | format(1) }}",
    "map": "{% set r = range(100000) %}{{ ([r] * 9000) | map('list') | map('length') | sum }}",
    "capture": "{% for i in range(100000) %}{% set x %}{{ 'x' * 9000 }}{% endset %}{% endfor %}",
}


@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS.keys())
def test_template_that_takes_too_much_is_ended(source: str) -> None:
    # It harms nothing when the template is loaded, since probes have a second each.
    template = ChatTemplate("{% if messages[0].content == 'now' %}" + source + "{% endif %}")
    now = Conversation((ChatMessage("user", "now"),))
    tracemalloc.start()
    began = time.thread_time()
    try:
        with pytest.raises((TooMuch, errors.InvalidRequest)):
            template.render(now, limit_s=LIMIT_S, max_characters=MAX_CHARACTERS)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.thread_time() - began < 80 * LIMIT_S
    assert peak < 50 * 2**20


def test_conversation_that_is_written_too_often_is_ended() -> None:
    template = ChatTemplate("{% for m in messages %}{{ messages | tojson }}{% endfor %}")
    many, two = (Conversation((ChatMessage("user", "x" * 90),) * n) for n in (100, 2))
    with pytest.raises(TooMuch):
        template.render(many, limit_s=10.0, max_characters=MAX_CHARACTERS)
    assert template.render(two, limit_s=10.0, max_characters=MAX_CHARACTERS)


def test_half_a_character_is_refused() -> None:
    with pytest.raises(errors.InvalidRequest):
        render("{{ '%c' % 55296 }}")


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ CONTENT }}<|im_end|>\n{% endfor %}"
    "{% if tools %}end{% endif %}"
)


def continued(content: str, said: str) -> str:
    messages = (ChatMessage("user", "Q"), ChatMessage("assistant", said))
    template = ChatTemplate(CHATML.replace("CONTENT", content))
    conversation = Conversation(messages, adds_generation_prompt=False, continues_last=True)
    return template.render(conversation, limit_s=10.0, max_characters=10_000)


@pytest.mark.parametrize("said", ["<", "|", "e", "end", "\n", "Sure,", "The answer is ", " a\n"])
def test_prompt_ends_with_what_the_last_turn_says(said: str) -> None:
    if not said.strip():
        with pytest.raises(errors.InvalidRequest, match="continue_final_message"):
            continued("m.content", said)
        return
    start = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    assert continued("m.content", said) == start + said
    assert continued("m.content | trim", said) == start + said.strip()


def test_last_turn_that_the_template_does_not_show_cannot_go_on() -> None:
    with pytest.raises(errors.InvalidRequest, match="continue_final_message"):
        continued("m.role", "user")
