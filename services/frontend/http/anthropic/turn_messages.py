"""Converts the turns of a conversation in Anthropic's protocol to messages.

A user's turn may hold results of tools, each of which becomes a separate message. If the last turn
is the assistant's, the answer continues the turn.
"""

from collections.abc import Iterator, Mapping, Sequence

from services.common import errors
from services.frontend.http.anthropic.blocks import (
    CompactionBlock,
    DocumentBlock,
    ReferencedTool,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolAdditionBlock,
    ToolDefinition,
    ToolRemovalBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from services.frontend.http.anthropic.tools import CustomTool
from services.frontend.http.anthropic.turns import AssistantTurn, SystemTurn, Turn, UserTurn
from services.frontend.http.bodies.object_kinds import LeftOutItem, UnknownRole
from services.frontend.http.protocol.conversation_tools import ClientTool, json_text
from services.frontend.http.protocol.gathered_turn import GatheredTurn
from services.frontend.http.protocol.unknown_items import is_noted, note_of
from services.frontend.request.conversation import ChatMessage, EarlierCall


def messages_of(turns: Sequence[Turn]) -> Iterator[ChatMessage]:
    """Yields the messages that the turns of a conversation become. Yields none for a system turn
    that is cleared by a later turn of the user. If the last turn is the assistant's and has no
    text, the turn is left out, because there is nothing to continue.

    Raises:
        InvalidRequest: the id of a tool result is not the id of an earlier call, or the last turn
        is the assistant's and has a call, so that the result of the call is missing.
    """
    call_ids: set[str] = set()
    last_user = max((i for i, turn in enumerate(turns) if isinstance(turn, UserTurn)), default=-1)
    for index, turn in enumerate(turns):
        match turn:
            case AssistantTurn():
                message = _assistant_message(turn)
                call_ids.update(call.id for call in message.tool_calls)
                if index < len(turns) - 1 or _is_continued(message, f"messages.{index}.content"):
                    yield message
            case UserTurn():
                yield from _user_messages(turn, call_ids, f"messages.{index}.content")
            case SystemTurn():
                if turn.clear_at != "next_user_message" or index > last_user:
                    yield from _system_messages(turn)


def tools_after(turns: Sequence[Turn], tools: Mapping[str, ClientTool]) -> dict[str, ClientTool]:
    """Returns the tools that the model may call after the turns, keyed by path in the body. These
    are the tools of the body's field `tools`, changed by the blocks of the turns that add and
    remove tools."""
    defined: dict[str, tuple[str, ClientTool]] = {}
    removed: set[str] = set()
    for index, turn in enumerate(turns):
        for place, block in enumerate(_blocks(turn)):
            match block:
                case ToolAdditionBlock(tool=ToolDefinition(definition=CustomTool() as tool)):
                    path = f"messages.{index}.content.{place}.tool.definition"
                    defined[tool.name] = path, tool
                    removed.discard(tool.name)
                case ToolAdditionBlock(tool=ReferencedTool(name=name)):
                    removed.discard(name)
                case ToolRemovalBlock(tool=ReferencedTool(name=name)):
                    removed.add(name)
    if not defined and not removed:
        return dict(tools)
    changed = removed | defined.keys()
    kept = {path: tool for path, tool in tools.items() if tool.to_tool().name not in changed}
    return kept | dict(found for name, found in defined.items() if name not in removed)


def _blocks(turn: Turn) -> Sequence[object]:
    """Returns the blocks of a turn. The result is empty if the content is a text."""
    content = None if isinstance(turn, UnknownRole) else turn.content
    return () if content is None or isinstance(content, str) else content


def _is_continued(last: ChatMessage, field: str) -> bool:
    if last.tool_calls:
        raise errors.InvalidRequest(field, "ends with a call: a turn with its result must follow")
    return bool(last.content and last.content.strip())


def _assistant_message(turn: AssistantTurn) -> ChatMessage:
    if isinstance(turn.content, str):
        return ChatMessage("assistant", turn.content)
    gathered = GatheredTurn()
    for block in turn.content:
        match block:
            case ThinkingBlock():
                gathered.reasoning.append(block.thinking)
            case TextBlock():
                gathered.texts.append(block.text)
            case CompactionBlock(content=str(summary)):
                gathered.texts.append(summary)
            case ToolUseBlock():
                gathered.calls.append(EarlierCall(block.id, block.name, json_text(block.input)))
    if not gathered.texts and not gathered.calls:
        gathered.texts.append("")  # content that is null stands only beside calls
    return gathered.to_message()


def _user_messages(turn: UserTurn, call_ids: set[str], field: str) -> Iterator[ChatMessage]:
    """Yields the messages that a turn of the user becomes: one for each result of a call, and one
    for each run of texts before, between or after the results. A turn without results becomes one
    message, even if it has no text.

    Raises:
        InvalidRequest: the id of a result is not the id of an earlier call.
    """
    if isinstance(turn.content, str):
        yield ChatMessage("user", turn.content)
        return
    texts: list[str] = []
    has_results = False
    for index, block in enumerate(turn.content):
        match block:
            case TextBlock() | DocumentBlock() | SearchResultBlock():
                texts.append(block.text)
            case LeftOutItem() if is_noted(block):
                texts.append(note_of(block))
            case ToolResultBlock():
                if block.tool_use_id not in call_ids:
                    raise errors.InvalidRequest(
                        f"{field}.{index}.tool_use_id", "answers no tool_use before it"
                    )
                if texts:
                    yield ChatMessage("user", "\n".join(texts))
                    texts = []
                has_results = True
                yield ChatMessage("tool", block.text, tool_call_id=block.tool_use_id)
    if texts or not has_results:
        yield ChatMessage("user", "\n".join(texts))


def _system_messages(turn: SystemTurn) -> Iterator[ChatMessage]:
    """Yields one message with the role `system` and the content of a system turn. If the content is
    a list, the texts of its text blocks are joined by line breaks. Yields nothing if there is no
    content, or if the list has no text blocks."""
    if isinstance(turn.content, str):
        yield ChatMessage("system", turn.content)
        return
    texts = [block.text for block in turn.content or () if isinstance(block, TextBlock)]
    if texts:
        yield ChatMessage("system", "\n".join(texts))
