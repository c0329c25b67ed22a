"""Real chat templates write the same text as in the library that they were made for.

The library does not adapt messages to templates. It is given a conversation in each form that
OpenAI's clients could adapt it to: our text must be one of its texts, and show every message if one
of its texts does.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from services.common import errors
from services.frontend.request.conversation import ChatMessage, Conversation, EarlierCall, Tool
from services.frontend.text.chat_template import ChatTemplate
from services.frontend.text.template_program import TEMPLATE_ERRORS
from tests.frontend.text import templates_beside

TOKENS: dict[str, Any] = {"bos_token": "<bos>", "eos_token": "<eos>"}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Where."}},
    "required": ["city"],
}
TOOLS = (
    Tool(name="zfind", description="Finds.", parameters=json.dumps(PARAMETERS), is_strict=True),
    Tool(name="zdive", parameters=json.dumps(PARAMETERS)),
)
CALLS = (
    EarlierCall("call00001", "zfind", '{"city": "zrome"}'),
    EarlierCall("call00002", "zdive", '{"city": "zoslo"}'),
)
SYSTEM, USER = ChatMessage("system", "zrules"), ChatMessage("user", "zasks")
RESULTS = (
    ChatMessage("tool", "zsunny", tool_call_id="call00001"),
    ChatMessage("tool", "zrainy", tool_call_id="call00002"),
)


def calling(n_calls: int, content: str | None = None, **fields: Any) -> tuple[ChatMessage, ...]:
    """A question, a turn of calls, and the results."""
    turn = ChatMessage("assistant", content, tool_calls=CALLS[:n_calls], **fields)
    return USER, turn, *RESULTS[:n_calls]


@dataclass(frozen=True)
class Kind:
    """A kind of conversation, and the words that its text should show."""

    conversation: Conversation
    words: tuple[str, ...]


KINDS = {
    "plain": Kind(Conversation((USER,)), ("zasks",)),
    "turns": Kind(
        Conversation((USER, ChatMessage("assistant", "zsays"), USER)), ("zasks", "zsays")
    ),
    "system": Kind(Conversation((SYSTEM, USER)), ("zasks", "zrules")),
    "late-system": Kind(
        Conversation((SYSTEM, USER, ChatMessage("system", "zlater"))), ("zasks", "zrules", "zlater")
    ),
    "tools": Kind(Conversation((USER,), tools=TOOLS), ("zasks",)),
    "one-call": Kind(Conversation(calling(1), tools=TOOLS), ("zasks", "zrome", "zsunny")),
    "two-calls": Kind(
        Conversation(calling(2), tools=TOOLS), ("zasks", "zrome", "zoslo", "zsunny", "zrainy")
    ),
    "content": Kind(
        Conversation(calling(1, "zsays"), tools=TOOLS), ("zasks", "zsays", "zrome", "zsunny")
    ),
    "reasoning": Kind(
        Conversation(calling(1, reasoning_content="zthinks"), tools=TOOLS),
        ("zasks", "zrome", "zsunny"),
    ),
    "no-prompt": Kind(
        Conversation((USER, ChatMessage("assistant", "zsays")), adds_generation_prompt=False),
        ("zasks", "zsays"),
    ),
}


def as_client(message: ChatMessage, *, is_null: bool, is_text: bool) -> dict[str, Any]:
    """A message as a client of OpenAI writes it, adapted to a template."""
    content = message.content if message.content is not None or is_null else ""
    turn: dict[str, Any] = {"role": message.role, "content": content}
    for name in ("tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            turn[name] = getattr(message, name)
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call.arguments if is_text else json.loads(call.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return turn


def as_tools(*, is_described: bool) -> list[Any]:
    find: dict[str, Any] = {"name": "zfind", "description": "Finds.", "parameters": PARAMETERS}
    dive: dict[str, Any] = {"name": "zdive", "parameters": PARAMETERS}
    if is_described:
        dive = {"name": "zdive", "description": "", "parameters": PARAMETERS}
    return [{"type": "function", "function": one} for one in (find | {"strict": True}, dive)]


def messages_of(conversation: Conversation) -> Iterator[tuple[ChatMessage, ...]]:
    """The messages as they are, with one system message, and with one call in each turn."""
    messages = conversation.messages
    yield messages
    systems = [one.content or "" for one in messages if one.role == "system"]
    if len(systems) > 1:
        rest = (one for one in messages if one.role != "system")
        yield (ChatMessage("system", "\n\n".join(systems)), *rest)
    if len(messages) > 1 and len(messages[1].tool_calls) > 1:
        yield (*calling(1), ChatMessage("assistant", None, tool_calls=CALLS[1:]), *RESULTS[1:])


def texts_of_library(source: str, conversation: Conversation) -> Iterator[str]:
    """The texts for all forms of a conversation that the template takes."""
    has_calls = any(message.tool_calls for message in conversation.messages)
    has_null = any(message.content is None for message in conversation.messages)
    for messages, is_described, is_null, is_text in product(
        messages_of(conversation),
        (False, True) if conversation.tools else (False,),
        (True, False) if has_null else (False,),
        (False, True) if has_calls else (False,),
    ):
        with suppress(*TEMPLATE_ERRORS):
            yield render_jinja_template(
                [[as_client(one, is_null=is_null, is_text=is_text) for one in messages]],
                tools=as_tools(is_described=is_described) if conversation.tools else None,
                chat_template=source,
                add_generation_prompt=conversation.adds_generation_prompt,
                **TOKENS,
            )[0][0]


@pytest.mark.skipif(not templates_beside.PATHS, reason="there are no chat templates")
@pytest.mark.parametrize("path", templates_beside.PATHS, ids=lambda path: path.stem)
def test_template_writes_what_it_writes_in_the_library(path: Path) -> None:
    source = path.read_text()
    template = ChatTemplate(source, special_tokens=TOKENS)
    for name, kind in KINDS.items():
        ours = None
        with suppress(errors.InvalidRequest):
            ours = template.render(kind.conversation, limit_s=10.0, max_characters=100_000)
        others, has_whole = [], False
        for text in texts_of_library(source, kind.conversation):
            is_whole = all(word in text for word in kind.words)
            if is_whole and text == ours:
                break
            others.append(text)
            has_whole = has_whole or is_whole
        else:
            assert not has_whole, name
            assert ours is None or ours in others, name
