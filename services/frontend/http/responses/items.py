"""Models of the items of a conversation, in a body of POST /v1/responses: messages, reasoning,
calls of tools, results of calls, and further tools.

Agents also send calls of programs that are not tools of the client, such as shells. Their models
are in the module `program_items`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, FailFast, Field, Tag, WithJsonSchema
from typing_extensions import TypeAliasType

from services.common import errors
from services.frontend.http.bodies.object_kinds import ExactModel, by_type
from services.frontend.http.protocol.conversation_tools import ToolName
from services.frontend.http.protocol.unknown_items import (
    LEFT_OUT,
    REFUSED,
    LeftOut,
    Refused,
    tag_of_unknown,
)
from services.frontend.http.responses.parts import MadeText, ResponsesParts, Text
from services.frontend.http.responses.program_items import PROGRAM_TYPES, ProgramItem
from services.frontend.http.responses.tools import ResponsesTools
from services.frontend.request.conversation import MAX_TURNS

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class MessageItem(ExactModel):
    """A message of the user or of the system."""

    type: Literal["message"] = "message"
    """Always `message`; may be left out."""
    role: Literal["user", "system", "developer"]
    """Role of the speaker; `developer` is read as `system`."""
    content: Text
    """Content of the message, as a text or in parts."""


class AssistantItem(ExactModel):
    """A message of the assistant."""

    type: Literal["message"] = "message"
    """Always `message`; may be left out."""
    role: Literal["assistant"]
    """Always `assistant`."""
    content: MadeText
    """Content of the message, as a text or in parts."""


class AgentMessageItem(ExactModel):
    """A message of another agent of the client. The model reads the message as a turn of the
    user."""

    type: Literal["agent_message"]
    """Always `agent_message`."""
    author: str | None = None
    """Name of the agent, which the model reads before the message."""
    content: MadeText
    """Content of the message, as a text or in parts."""


class ReasoningItem(ExactModel):
    """Reasoning of the assistant. Clients send it back unchanged."""

    type: Literal["reasoning"]
    """Always `reasoning`."""
    summary: ResponsesParts | None = None
    """Summary of the reasoning. The summary is read only if `content` and `encrypted_content` give
    no reasoning."""
    content: ResponsesParts | None = None
    """Reasoning of the assistant before a message or a call."""
    encrypted_content: str | None = None
    """Reasoning in the form that this server writes if `include` has `reasoning.encrypted_content`.
    The value is read only if there is no `content`. Values that another server wrote do nothing,
    because only that server can read them."""


class FunctionCallItem(ExactModel):
    """A call of a function by the assistant."""

    type: Literal["function_call"]
    """Always `function_call`."""
    call_id: str
    """Id of the call. The item with the call's result repeats the id."""
    name: ToolName
    """Name of the function."""
    namespace: str | None = None
    """Namespace of the function."""
    arguments: str
    """Arguments of the call, as the text of a JSON object."""


class FunctionCallOutputItem(ExactModel):
    """The result of a call of a function."""

    type: Literal["function_call_output"]
    """Always `function_call_output`."""
    call_id: str
    """Id of the call whose result this is. The call must be an earlier item."""
    output: MadeText
    """Result of the call, as a text or in parts. Each part that is not text is replaced by a
    note."""


class CustomToolCallItem(ExactModel):
    """A call of a custom tool by the assistant."""

    type: Literal["custom_tool_call"]
    """Always `custom_tool_call`."""
    call_id: str
    """Id of the call. The item with the call's result repeats the id."""
    name: ToolName
    """Name of the tool."""
    namespace: str | None = None
    """Namespace of the tool."""
    input: str
    """Input of the tool."""


class CustomToolCallOutputItem(ExactModel):
    """The result of a call of a custom tool."""

    type: Literal["custom_tool_call_output"]
    """Always `custom_tool_call_output`."""
    call_id: str
    """Id of the call whose result this is. The call must be an earlier item."""
    output: MadeText
    """Result of the call, as a text or in parts. Each part that is not text is replaced by a
    note."""


class ToolSearchCallItem(ExactModel):
    """A search for tools. A search with an id is a call by the assistant. A search without an id
    ran in another server, and only the result of the search is read."""

    type: Literal["tool_search_call"]
    """Always `tool_search_call`."""
    call_id: str | None = None
    """Id of the call. The item with the call's result repeats the id."""
    arguments: Any = None
    """Arguments of the search."""


class ToolSearchOutputItem(ExactModel):
    """The tools that a search has found. The model may call these tools, and reads their names as
    the result of the search."""

    type: Literal["tool_search_output"]
    """Always `tool_search_output`."""
    call_id: str | None = None
    """Id of the call whose result this is. The call must be an earlier item. The id is left out for
    a search that ran in another server."""
    tools: ResponsesTools
    """The tools that were found."""


class AdditionalToolsItem(ExactModel):
    """Further tools that the model may call."""

    type: Literal["additional_tools"]
    """Always `additional_tools`."""
    tools: ResponsesTools
    """The further tools."""


class NewReasoning(ExactModel):
    """The new effort of the model's reasoning."""

    effort: Effort | None = None
    """Effort that replaces the effort of the request."""


class ConfigurationUpdateItem(ExactModel):
    """A change of options within the conversation. If there are several such items, the last one
    applies."""

    type: Literal["configuration_update"]
    """Always `configuration_update`."""
    reasoning: NewReasoning | None = None
    """New effort of the model's reasoning."""


def _refuse_reference(item_id: str) -> str:
    shown = errors.shortened(item_id)
    raise ValueError(f"{shown!r} is not stored: send the item itself, since no items are stored")


class ItemReference(ExactModel):
    """A reference to an item that a server has stored. This server stores no items, so it refuses
    references."""

    type: Literal["item_reference"] | None = None
    """Always `item_reference`; may be left out."""
    id: Annotated[str, AfterValidator(_refuse_reference), WithJsonSchema({"not": {}})]
    """Id of the item."""


_TAGS = {
    kind: kind
    for kind in (
        "message",
        "agent_message",
        "reasoning",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "tool_search_call",
        "tool_search_output",
        "additional_tools",
        "configuration_update",
        "item_reference",
    )
}
_NOT_TOLD = ("compaction", "compaction_summary", "context_compaction", "ghost_snapshot", "program")
_OF_MCP = ("mcp_list_tools", "mcp_approval_request")
_tag_by_type = by_type(
    {
        **_TAGS,
        **dict.fromkeys(PROGRAM_TYPES, "program_item"),
        **dict.fromkeys((*_NOT_TOLD, *_OF_MCP), LEFT_OUT),
        "compaction_trigger": REFUSED,
    },
    default="message",
    others=tag_of_unknown,
).discriminator


def _tag_of(item: Any) -> str:
    """Returns the tag, in the union `InputItem`, of an item of the body. Messages and references
    may come without a type."""
    tag = _tag_by_type(item) if callable(_tag_by_type) else REFUSED
    if tag != "message" or not isinstance(item, Mapping):
        return str(tag)
    if "role" not in item and "id" in item and item.get("type") is None:
        return "item_reference"
    return "assistant" if item.get("role") == "assistant" else "message"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[AssistantItem, Tag("assistant")]
    | Annotated[AgentMessageItem, Tag("agent_message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[CustomToolCallItem, Tag("custom_tool_call")]
    | Annotated[CustomToolCallOutputItem, Tag("custom_tool_call_output")]
    | Annotated[ToolSearchCallItem, Tag("tool_search_call")]
    | Annotated[ToolSearchOutputItem, Tag("tool_search_output")]
    | Annotated[AdditionalToolsItem, Tag("additional_tools")]
    | Annotated[ConfigurationUpdateItem, Tag("configuration_update")]
    | Annotated[ProgramItem, Tag("program_item")]
    | Annotated[ItemReference, Tag("item_reference")]
    | LeftOut
    | Refused,
    Discriminator(_tag_of),
]
InputItems = TypeAliasType(
    "InputItems", Annotated[list[InputItem], FailFast(), Field(max_length=MAX_TURNS)]
)
