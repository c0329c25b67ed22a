"""The turns of a conversation in Anthropic's protocol."""

from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, Tag
from typing_extensions import TypeAliasType

from services.frontend.http.anthropic.blocks import (
    CompactionBlock,
    DocumentBlock,
    RedactedThinkingBlock,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolAdditionBlock,
    ToolRemovalBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from services.frontend.http.bodies.object_kinds import ExactModel, UnknownRole, by_type
from services.frontend.http.protocol.text_parts import TEXT_OR_LIST
from services.frontend.http.protocol.unknown_items import (
    LEFT_OUT,
    LeftOut,
    Refused,
    tag_of_unknown,
)
from services.frontend.request.conversation import MAX_TURNS

_CHANGES = ("tool_addition", "tool_removal")
_USER_TYPES = ("text", "document", "search_result", "tool_result", *_CHANGES)
_ASSISTANT_TYPES = ("text", "thinking", "redacted_thinking", "compaction", "tool_use", *_CHANGES)
_SYSTEM_TYPES = ("text", *_CHANGES)

ToolChange = (
    Annotated[ToolAdditionBlock, Tag("tool_addition")]
    | Annotated[ToolRemovalBlock, Tag("tool_removal")]
)
UserBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[SearchResultBlock, Tag("search_result")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | ToolChange
    | LeftOut
    | Refused,
    by_type({kind: kind for kind in _USER_TYPES}, others=tag_of_unknown),
]
AssistantBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[CompactionBlock, Tag("compaction")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | ToolChange
    | LeftOut,
    by_type({kind: kind for kind in _ASSISTANT_TYPES}, others=LEFT_OUT),
]
SystemBlock = Annotated[
    Annotated[TextBlock, Tag("text")] | ToolChange | LeftOut | Refused,
    by_type({kind: kind for kind in _SYSTEM_TYPES}, others=tag_of_unknown),
]
UserBlocks = TypeAliasType(
    "UserBlocks", Annotated[list[UserBlock], FailFast(), Field(max_length=MAX_TURNS)]
)
AssistantBlocks = TypeAliasType(
    "AssistantBlocks", Annotated[list[AssistantBlock], FailFast(), Field(max_length=MAX_TURNS)]
)
SystemBlocks = TypeAliasType(
    "SystemBlocks", Annotated[list[SystemBlock], FailFast(), Field(max_length=MAX_TURNS)]
)


class UserTurn(ExactModel):
    """A turn of the user, which may hold results of earlier calls of tools."""

    role: Literal["user"]
    """Always `user`."""
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[UserBlocks, Tag("list")], TEXT_OR_LIST
    ]
    """Text of the user and results of calls, as a text or in blocks."""


class AssistantTurn(ExactModel):
    """A turn of the assistant. Clients send it back unchanged. If it is the last turn, the answer
    continues its text."""

    role: Literal["assistant"]
    """Always `assistant`."""
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[AssistantBlocks, Tag("list")], TEXT_OR_LIST
    ]
    """Text, reasoning and calls of the assistant, as a text or in blocks."""


class SystemTurn(ExactModel):
    """An instruction of the system within the conversation."""

    role: Literal["system"]
    """Always `system`."""
    content: (
        Annotated[Annotated[str, Tag("text")] | Annotated[SystemBlocks, Tag("list")], TEXT_OR_LIST]
        | None
    ) = None
    """Text of the system, as a text or in blocks."""
    clear_at: Literal["next_user_message", "never"] | None = None
    """With `next_user_message` the turn is left out once a turn of the user follows."""
    output_config: Any = None
    """Does nothing."""


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
