"""The turns of a conversation in Anthropic's protocol, and the conversion of turns to messages.

A user's turn may hold results of tools, each of which becomes a separate message. Signatures of
reasoning and the options of caching (`cache_control`) are ignored.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, Tag
from typing_extensions import TypeAliasType

from services.common import errors
from services.frontend.http.bodies.object_kinds import ExactModel, UnknownKind, UnknownRole, by_type
from services.frontend.http.protocol import gathered_turn
from services.frontend.http.protocol.conversation_tools import ToolName, json_text
from services.frontend.http.protocol.text_parts import TEXT_OR_LIST, joined
from services.frontend.request.conversation import MAX_TURNS, ChatMessage, EarlierCall


class TextBlock(ExactModel):
    """A block of text."""

    type: Literal["text"]
    """Kind of the block."""
    text: str
    """Text of the block; several blocks are joined by line ends."""


TextOnly = Annotated[
    Annotated[TextBlock, Tag("text")] | Annotated[UnknownKind, Tag("unknown")],
    by_type({"text": "text"}),
]
TextBlocks = TypeAliasType(
    "TextBlocks", Annotated[list[TextOnly], FailFast(), Field(max_length=MAX_TURNS)]
)
Text = Annotated[Annotated[str, Tag("text")] | Annotated[TextBlocks, Tag("list")], TEXT_OR_LIST]
"""A text, whole or in blocks."""


class ThinkingBlock(ExactModel):
    """Reasoning of the assistant, which a client sends back unchanged."""

    type: Literal["thinking"]
    """Kind of the block."""
    thinking: str
    """Reasoning of the assistant before a text or a call."""


class RedactedThinkingBlock(ExactModel):
    """Encrypted reasoning, which only the server that wrote it can read. The block is left out of
    the prompt."""

    type: Literal["redacted_thinking"]
    """Kind of the block. The block is left out of the prompt, since only the server that wrote it
    can read it."""


class ToolUseBlock(ExactModel):
    """A call of a tool by the assistant."""

    type: Literal["tool_use"]
    """Kind of the block."""
    id: str
    """Id of the call. The block with the call's result repeats the id."""
    name: ToolName
    """Name of the tool."""
    input: dict[str, Any]
    """Arguments."""


class ToolResultBlock(ExactModel):
    """The result of a call."""

    type: Literal["tool_result"]
    """Kind of the block."""
    tool_use_id: str
    """Id of the call, which must be an earlier block."""
    content: Text | None = None
    """Result of the call, as a text or in blocks; empty by default."""


_USER_TYPES = ("text", "tool_result")
_ASSISTANT_TYPES = ("text", "thinking", "redacted_thinking", "tool_use")

UserBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[UnknownKind, Tag("unknown")],
    by_type({kind: kind for kind in _USER_TYPES}),
]
AssistantBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[UnknownKind, Tag("unknown")],
    by_type({kind: kind for kind in _ASSISTANT_TYPES}),
]
UserBlocks = TypeAliasType(
    "UserBlocks", Annotated[list[UserBlock], FailFast(), Field(max_length=MAX_TURNS)]
)
AssistantBlocks = TypeAliasType(
    "AssistantBlocks", Annotated[list[AssistantBlock], FailFast(), Field(max_length=MAX_TURNS)]
)


class UserTurn(ExactModel):
    """A turn of the user, with the results of earlier calls."""

    role: Literal["user"]
    """`user`."""
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[UserBlocks, Tag("list")], TEXT_OR_LIST
    ]
    """Text of the user and results of calls, as a text or in blocks."""


class AssistantTurn(ExactModel):
    """A turn of the assistant, which a client sends back unchanged."""

    role: Literal["assistant"]
    """`assistant`."""
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[AssistantBlocks, Tag("list")], TEXT_OR_LIST
    ]
    """Text, reasoning and calls of the assistant, as a text or in blocks."""


class SystemTurn(ExactModel):
    """An instruction of the system within the conversation."""

    role: Literal["system"]
    """`system`."""
    content: Text
    """Text of the system, as a text or in blocks."""


Turn = Annotated[
    Annotated[UserTurn, Tag("user")]
    | Annotated[AssistantTurn, Tag("assistant")]
    | Annotated[SystemTurn, Tag("system")]
    | Annotated[UnknownRole, Tag("unknown")],
    by_type({role: role for role in ("user", "assistant", "system")}, field="role"),
]
Turns = TypeAliasType(
    "Turns", Annotated[list[Turn], FailFast(), Field(min_length=1, max_length=MAX_TURNS)]
)


def messages_of(turns: Sequence[Turn]) -> Iterator[ChatMessage]:
    """Yields the messages that the turns become. There must be at least one turn.

    Raises:
        InvalidRequest: a result has the id of no earlier call, or the last turn is the assistant's.
    """
    call_ids: set[str] = set()
    for index, turn in enumerate(turns):
        match turn:
            case AssistantTurn():
                message = _assistant_message(turn)
                call_ids.update(call.id for call in message.tool_calls)
                yield message
            case UserTurn():
                yield from _user_messages(turn, call_ids, f"messages.{index}.content")
            case SystemTurn():
                yield ChatMessage("system", joined(turn.content))
    if isinstance(turn, AssistantTurn):
        raise errors.InvalidRequest(
            f"messages.{index}.role",
            "the last message must not be the assistant's: it would have to be continued",
        )


def _assistant_message(turn: AssistantTurn) -> ChatMessage:
    if isinstance(turn.content, str):
        return ChatMessage("assistant", turn.content)
    gathered = gathered_turn.GatheredTurn()
    for block in turn.content:
        match block:
            case ThinkingBlock():
                gathered.reasoning.append(block.thinking)
            case TextBlock():
                gathered.texts.append(block.text)
            case ToolUseBlock():
                gathered.calls.append(EarlierCall(block.id, block.name, json_text(block.input)))
    return gathered.to_message()


def _user_messages(turn: UserTurn, call_ids: set[str], field: str) -> Iterator[ChatMessage]:
    """Yields the messages that a turn of the user becomes: one for each result of a call, and one
    for the texts before, between and after results.

    Raises:
        InvalidRequest: a result has the id of no earlier call.
    """
    if isinstance(turn.content, str):
        yield ChatMessage("user", turn.content)
        return
    texts: list[str] = []
    for index, block in enumerate(turn.content):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ToolResultBlock():
                if block.tool_use_id not in call_ids:
                    raise errors.InvalidRequest(
                        f"{field}.{index}.tool_use_id", "answers no tool_use before it"
                    )
                if texts:
                    yield ChatMessage("user", "\n".join(texts))
                    texts = []
                yield ChatMessage("tool", joined(block.content), tool_call_id=block.tool_use_id)
    if texts or not turn.content:
        yield ChatMessage("user", "\n".join(texts))
