"""Conversations of checkpoints that have only `tekken.json`, against `mistral-common`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.common import errors
from services.frontend.request.conversation import ChatMessage, Conversation, EarlierCall, Tool
from services.frontend.text.chat_template import ChatTemplate
from services.frontend.text.message_format import MessageFormat
from services.frontend.text.tokenizer import Tokenizer
from tests.common.tokenizer_files.tekken_file import contents

pytest.importorskip("mistral_common", reason="the locked mistral-common refuses this Python")

from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

NAMES = [
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]",
    "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
]  # fmt: skip
LATER = ["[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"]
VERSIONS = [3, 7, 11, 13]

SYSTEM = ChatMessage("system", "Be größer 漢字.")
ASKS = ChatMessage("user", "the quick 👍🏽 fox\n\x00 [x] ")
SAYS = ChatMessage("assistant", "it is done  ")
AGAIN = ChatMessage("user", " and again?")
FIND = Tool(
    name="find",
    description="Finds é.",
    parameters='{"type": "object", "properties": {"what": {"type": "string"}}}',
)
DIVE = Tool(name="dive", description="Dives.", parameters='{"type": "object", "properties": {}}')
CALLS = (
    EarlierCall("abc000001", "find", '{"what": "wh\\u00e4les", "n": [1, 2.5, null]}'),
    EarlierCall("abc000002", "dive", "{}"),
)
CALLING = (
    ASKS,
    ChatMessage("assistant", None, tool_calls=CALLS),
    ChatMessage("tool", "in the größer sea", name="find", tool_call_id="abc000001"),
    ChatMessage("tool", '{"deep": true}', name="dive", tool_call_id="abc000002"),
)

CASES: dict[str, tuple[tuple[ChatMessage, ...], tuple[Tool, ...]]] = {
    "user": ((ASKS,), ()),
    "system": ((SYSTEM, ASKS), ()),
    "turns": ((SYSTEM, ASKS, SAYS, AGAIN), ()),
    "two users": ((ASKS, AGAIN), ()),
    "tools": ((SYSTEM, ASKS, SAYS, AGAIN), (FIND, DIVE)),
    "tools and two users": ((ASKS, SAYS, ASKS, AGAIN), (FIND,)),
    "calls": (CALLING, (FIND, DIVE)),
    "calls before": ((*CALLING, SAYS, AGAIN), (FIND, DIVE)),
}


def write(directory: Path, version: int) -> Path:
    names = NAMES if version < 11 else [*NAMES, *LATER]
    said = contents(names=names, version=f"v{version}")
    path = directory / "tekken.json"
    path.write_text(json.dumps(said))
    return path


def theirs(path: Path, messages: tuple[ChatMessage, ...], tools: tuple[Tool, ...]) -> list[int]:
    said: list[dict[str, Any]] = []
    for message in messages:
        one: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.tool_calls:
            one["tool_calls"] = [
                {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
                for call in message.tool_calls
            ]
        if message.role == "tool":
            one |= {"tool_call_id": message.tool_call_id, "name": message.name}
        said.append(one)
    functions: list[Any] = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": json.loads(tool.parameters),
            },
        }
        for tool in tools
    ]
    request: Any = ChatCompletionRequest(messages=said, tools=functions or None)
    tokens: list[int] = MistralTokenizer.from_file(path).encode_chat_completion(request).tokens
    return tokens


@pytest.mark.parametrize("version", VERSIONS)
def test_conversations_have_the_tokens_of_mistral_common(tmp_path: Path, version: int) -> None:
    path = write(tmp_path, version)
    template, tokenizer = ChatTemplate.from_model(tmp_path), Tokenizer.from_model(tmp_path)
    assert template is not None
    for name, (messages, tools) in CASES.items():
        conversation = Conversation(messages, tools=tools)
        text = template.render(conversation, limit_s=5, max_characters=10_000)
        tokens = list(tokenizer.to_tokens(text, add_special_tokens=False))
        expected = theirs(path, messages, tools)
        assert tokens == expected, (name, tokenizer.to_marked_text(expected), text)


@pytest.mark.parametrize("version", VERSIONS)
def test_calls_are_read_as_they_are_written(tmp_path: Path, version: int) -> None:
    write(tmp_path, version)
    template, tokenizer = ChatTemplate.from_model(tmp_path), Tokenizer.from_model(tmp_path)
    assert template is not None
    assert template.takes_tool_results
    assert template.renders_parallel_calls
    assert MessageFormat(tokenizer, template.source).tools == "mistral"


def test_reasoning_stands_between_its_tokens(tmp_path: Path) -> None:
    write(tmp_path, 13)
    template = ChatTemplate.from_model(tmp_path)
    assert template is not None
    said = ChatMessage("assistant", "yes", reasoning_content="hm")
    text = template.render(Conversation((ASKS, said, AGAIN)), limit_s=5, max_characters=10_000)
    assert "[/INST][THINK]hm[/THINK]yes</s>[INST]" in text


EFFORT = {"type": "enum", "accepts_none": True, "default": "none", "values": ["high", "none"]}
"""The setting `reasoning_effort` of a file of version 15."""


def written(directory: Path, conversation: Conversation, effort: dict[str, Any]) -> str:
    path = write(directory, 15)
    said = {**json.loads(path.read_text()), "model_settings_builder": {"reasoning_effort": effort}}
    path.write_text(json.dumps(said))
    template = ChatTemplate.from_model(directory)
    assert template is not None
    return template.render(conversation, limit_s=5, max_characters=10_000)


def test_version_15_is_told_how_much_to_reason(tmp_path: Path) -> None:
    """As `mistral-common` 1.13 writes it, which is newer than the one that tests have."""
    settings = '[MODEL_SETTINGS]{"reasoning_effort": "none"}[/MODEL_SETTINGS]'
    asks = (ChatMessage("user", "a"), ChatMessage("assistant", "b"), ChatMessage("user", "c"))
    text = written(tmp_path, Conversation(asks), EFFORT)
    assert text == f"<s>{settings}[INST]a[/INST]b</s>[INST]c[/INST]"
    system = ChatMessage("system", "s")
    text = written(tmp_path, Conversation((system, *asks), tools=(DIVE,)), EFFORT)
    assert text.startswith("<s>[SYSTEM_PROMPT]s[/SYSTEM_PROMPT][AVAILABLE_TOOLS]")
    assert f"[/AVAILABLE_TOOLS]{settings}[INST]a[/INST]" in text
    high = Conversation(asks, template_kwargs={"reasoning_effort": "high"})
    assert '<s>[MODEL_SETTINGS]{"reasoning_effort": "high"}[' in written(tmp_path, high, EFFORT)


def test_an_effort_that_the_file_does_not_have_is_refused(tmp_path: Path) -> None:
    much = Conversation((ASKS,), template_kwargs={"reasoning_effort": "much"})
    with pytest.raises(errors.InvalidRequest, match="reasoning_effort is not one of none, high"):
        written(tmp_path, much, EFFORT)


@pytest.mark.parametrize("broken", [{}, {"default": "low"}, {"values": ["none", "}}"]}])
def test_broken_settings_are_named(tmp_path: Path, broken: dict[str, Any]) -> None:
    effort = {**EFFORT, **broken} if broken else {"type": "enum"}
    with pytest.raises(ValueError, match=r"tekken\.json.*model_settings_builder"):
        written(tmp_path, Conversation((ASKS,)), effort)


def test_a_version_that_is_not_known_has_no_template(tmp_path: Path) -> None:
    write(tmp_path, 16)
    assert ChatTemplate.from_model(tmp_path) is None
    assert Tokenizer.from_model(tmp_path).to_tokens("a")[0] == 1


def test_a_template_of_the_checkpoint_comes_first(tmp_path: Path) -> None:
    write(tmp_path, 11)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    template = ChatTemplate.from_model(tmp_path)
    assert template is not None
    text = template.render(
        Conversation((ChatMessage("user", "hi"),)), limit_s=5, max_characters=100
    )
    assert text == "<s>hi"
