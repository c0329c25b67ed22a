"""The conversion of the items of POST /v1/responses to messages.

Consecutive items of the assistant become one turn. A new turn begins when reasoning or text follows
a text or a call.
"""

from collections.abc import Iterator, Sequence

import pydantic_core

from services.common import errors
from services.frontend.http.bodies.object_kinds import LeftOutItem
from services.frontend.http.protocol.gathered_turn import GatheredTurn
from services.frontend.http.protocol.text_parts import joined, result_text
from services.frontend.http.protocol.unknown_items import is_noted, note_of
from services.frontend.http.responses import custom_input, reasoning_text
from services.frontend.http.responses.items import (
    AdditionalToolsItem,
    AgentMessageItem,
    AssistantItem,
    ConfigurationUpdateItem,
    CustomToolCallItem,
    CustomToolCallOutputItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputItem,
    MessageItem,
    ReasoningItem,
    ToolSearchCallItem,
    ToolSearchOutputItem,
)
from services.frontend.http.responses.program_items import (
    ApplyPatchCallItem,
    ApplyPatchOutputItem,
    CodeInterpreterItem,
    FileSearchItem,
    LocalShellCallItem,
    LocalShellOutputItem,
    McpApprovalItem,
    McpCallItem,
    ProgramCall,
    ShellCallItem,
    ShellOutputItem,
    call_of,
    result_of,
)
from services.frontend.http.responses.tool_table import ToolTable, listed
from services.frontend.http.responses.tools import SEARCH
from services.frontend.request.conversation import ChatMessage, EarlierCall

SYSTEM_ROLES = ("system", "developer")

_SILENT = (AdditionalToolsItem, ConfigurationUpdateItem, LeftOutItem)
"""Types of items that are not turns of the conversation."""


class Turns:
    """Converts the items of a conversation to messages. `tools` has the names under which the model
    sees the tools."""

    def __init__(self, items: Sequence[InputItem], tools: ToolTable) -> None:
        self._items = items
        self._tools = tools
        self._turn = GatheredTurn()
        self._call_ids: dict[str, str] = {}
        """Ids of the calls so far, keyed by each id by which the result of a call may refer to the
        call."""

    def messages(self, instructions: str | None) -> Iterator[ChatMessage]:
        """Yields the messages of the conversation. The instructions and the system's items at the
        beginning become one system message, because most chat templates allow only one system
        message, at the beginning.

        Raises:
            InvalidRequest: the id of a call's result is not the id of an earlier call.
        """
        system = [] if instructions is None else [instructions]
        n_system = 0
        for item in self._items:
            if isinstance(item, MessageItem) and item.role in SYSTEM_ROLES:
                system.append(joined(item.content))
            elif is_noted(item) or not isinstance(item, _SILENT):
                break
            n_system += 1
        if system:
            yield ChatMessage("system", "\n\n".join(system))
        for place, item in enumerate(self._items[n_system:], n_system):
            yield from self._add(item, f"input.{place}")
        yield from self._turn.end()

    def _add(self, item: InputItem, path: str) -> Iterator[ChatMessage]:
        match item:
            case ReasoningItem():
                if text := _reasoning_of(item):
                    yield from self._turn.begin()
                    self._turn.reasoning.append(text)
            case AssistantItem():
                yield from self._turn.begin()
                self._turn.texts.append(joined(item.content))
            case MessageItem():
                yield from self._turn.end()
                role = "user" if item.role == "user" else "system"
                yield ChatMessage(role, joined(item.content))
            case AgentMessageItem() | McpApprovalItem() | LeftOutItem():
                if said := _said_by(item):
                    yield from self._turn.end()
                    yield ChatMessage("user", said)
            case LocalShellCallItem() | ShellCallItem() | ApplyPatchCallItem():
                self._program_call(item)
            case McpCallItem() | CodeInterpreterItem() | FileSearchItem():
                call_id = self._call(*call_of(item))
                yield from self._turn.end()
                yield ChatMessage("tool", result_of(item), tool_call_id=call_id)
            case _:
                yield from self._add_tool_item(item, path)

    def _add_tool_item(self, item: InputItem, path: str) -> Iterator[ChatMessage]:
        """Adds an item that is a call of a client's tool, or the result of a call. Yields the
        messages that are complete now."""
        match item:
            case FunctionCallItem():
                name = self._tools.name_of(item.namespace, item.name)
                self._call(item.call_id, name, item.arguments)
            case CustomToolCallItem():
                name = self._tools.name_of(item.namespace, item.name)
                self._call(item.call_id, name, custom_input.escaped(item.input))
            case ToolSearchCallItem():
                if item.call_id is not None:
                    self._call(item.call_id, SEARCH, _json_of(item.arguments))
            case FunctionCallOutputItem() | CustomToolCallOutputItem():
                yield from self._result(item.call_id, result_text(item.output), f"{path}.call_id")
            case ToolSearchOutputItem():
                if item.call_id is not None:
                    yield from self._result(item.call_id, self._found(item), f"{path}.call_id")
            case LocalShellOutputItem():
                yield from self._result(item.id, result_of(item), f"{path}.id")
            case ShellOutputItem() | ApplyPatchOutputItem():
                yield from self._result(item.call_id, result_of(item), f"{path}.call_id")

    def _call(self, call_id: str, name: str, arguments: str) -> str:
        self._call_ids[call_id] = call_id
        self._turn.calls.append(EarlierCall(call_id, name, arguments))
        return call_id

    def _program_call(self, item: ProgramCall) -> None:
        call_id = self._call(*call_of(item))
        if isinstance(item, LocalShellCallItem) and item.id is not None:
            self._call_ids[item.id] = call_id

    def _result(self, call_id: str, text: str, field: str) -> Iterator[ChatMessage]:
        yield from self._turn.end()
        if call_id not in self._call_ids:
            raise errors.InvalidRequest(field, "answers no call before it")
        yield ChatMessage("tool", text, tool_call_id=self._call_ids[call_id])

    def _found(self, item: ToolSearchOutputItem) -> str:
        """Returns the result of a search for tools, in JSON: the names under which the model sees
        the found tools."""
        names = [self._tools.name_of(*tool.key) for tool in listed(item.tools, "")]
        return pydantic_core.to_json({"tools": names}).decode()


def _said_by(item: AgentMessageItem | McpApprovalItem | LeftOutItem) -> str | None:
    """Returns the text of an item that the model reads as a turn of the user. Returns None if the
    item has no such text."""
    match item:
        case AgentMessageItem():
            said = joined(item.content)
            return f"{item.author}: {said}" if item.author else said
        case McpApprovalItem():
            return item.reason
    return note_of(item) if is_noted(item) else None


def _reasoning_of(item: ReasoningItem) -> str:
    return (
        joined(item.content)
        or reasoning_text.opened(item.encrypted_content)
        or joined(item.summary)
    )


def _json_of(arguments: object) -> str:
    """Returns arguments as JSON text. A text is returned unchanged, and None becomes an empty
    object."""
    if isinstance(arguments, str):
        return arguments
    return pydantic_core.to_json({} if arguments is None else arguments).decode()
