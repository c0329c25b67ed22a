"""The items of a conversation in POST /v1/responses, and the conversion of items to messages.

Consecutive items of the assistant become one turn, as long as reasoning comes before text and text
before calls.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import FailFast, Field, Tag
from typing_extensions import TypeAliasType

from services.common import errors
from services.frontend.http.bodies.object_kinds import ExactModel, UnknownKind, by_type
from services.frontend.http.protocol.conversation_tools import ToolName
from services.frontend.http.protocol.gathered_turn import GatheredTurn
from services.frontend.http.protocol.text_parts import TEXT_OR_LIST, joined
from services.frontend.request.conversation import MAX_TURNS, ChatMessage, EarlierCall

SYSTEM_ROLES = ("system", "developer")


class ResponsesPart(ExactModel):
    """A part of a text."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    """Kind of the part; all kinds are read alike."""
    text: str
    """Text of the part; several parts are joined by line ends."""


class RefusalPart(ExactModel):
    """A refusal by the assistant instead of a text. A client sends the refusal back unchanged."""

    type: Literal["refusal"]
    """Kind of the part."""
    refusal: str
    """Text of the refusal."""

    @property
    def text(self) -> str:
        """The part's text."""
        return self.refusal


_TEXT_TYPES = ("input_text", "output_text", "text", "reasoning_text", "summary_text")

Part = Annotated[
    Annotated[ResponsesPart, Tag("text")]
    | Annotated[RefusalPart, Tag("refusal")]
    | Annotated[UnknownKind, Tag("unknown")],
    by_type({**dict.fromkeys(_TEXT_TYPES, "text"), "refusal": "refusal"}),
]
ResponsesParts = TypeAliasType(
    "ResponsesParts", Annotated[list[Part], FailFast(), Field(max_length=MAX_TURNS)]
)
Text = Annotated[Annotated[str, Tag("text")] | Annotated[ResponsesParts, Tag("list")], TEXT_OR_LIST]
"""A text, whole or in parts."""


class MessageItem(ExactModel):
    """A turn of the conversation."""

    type: Literal["message"] = "message"
    """Kind of the item; may be left out."""
    role: Literal["user", "assistant", "system", "developer"]
    """Role of the speaker; `developer` is read as `system`."""
    content: Text
    """Content of the message, as a text or in parts."""


class ReasoningItem(ExactModel):
    """Reasoning of the assistant, which a client sends back unchanged."""

    type: Literal["reasoning"]
    """Kind of the item."""
    summary: ResponsesParts | None = None
    """Summary of the reasoning, read if there is no `content`."""
    content: ResponsesParts | None = None
    """Reasoning of the assistant before a message or a call."""


class FunctionCallItem(ExactModel):
    """A call of a function by the assistant."""

    type: Literal["function_call"]
    """Kind of the item."""
    call_id: str
    """Id of the call. The item with the call's result repeats the id."""
    name: ToolName
    """Name of the function."""
    arguments: str
    """Arguments, as the text of a JSON object."""


class FunctionCallOutputItem(ExactModel):
    """The result of a call."""

    type: Literal["function_call_output"]
    """Kind of the item."""
    call_id: str
    """Id of the call, which must be an earlier item."""
    output: Text
    """Result of the call, as a text or in parts."""


_ITEM_TYPES = ("message", "reasoning", "function_call", "function_call_output")

InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[UnknownKind, Tag("unknown")],
    by_type({kind: kind for kind in _ITEM_TYPES}, default="message"),
]
InputItems = TypeAliasType(
    "InputItems", Annotated[list[InputItem], FailFast(), Field(max_length=MAX_TURNS)]
)


def messages_of(items: Sequence[InputItem], instructions: str | None) -> Iterator[ChatMessage]:
    """Yields the messages that the items become. The instructions and the system's items at the
    beginning become one system message, since most chat templates allow only one system message, at
    the beginning.

    Raises:
        InvalidRequest: a `function_call_output` has the id of no earlier call.
    """
    system = [] if instructions is None else [instructions]
    n_system = 0
    for item in items:
        if not isinstance(item, MessageItem) or item.role not in SYSTEM_ROLES:
            break
        system.append(joined(item.content))
        n_system += 1
    if system:
        yield ChatMessage("system", "\n\n".join(system))
    yield from _turns(items, n_system)


def _turns(items: Sequence[InputItem], start: int) -> Iterator[ChatMessage]:
    """Yields the messages that the items from `start` on become.

    Raises:
        InvalidRequest: a `function_call_output` has the id of no earlier call.
    """
    call_ids: set[str] = set()
    turn = GatheredTurn()
    for index, item in enumerate(items[start:], start):
        match item:
            case ReasoningItem():
                yield from turn.begin()
                turn.reasoning.append(joined(item.content) or joined(item.summary))
            case MessageItem(role="assistant"):
                yield from turn.begin()
                turn.texts.append(joined(item.content))
            case FunctionCallItem():
                call_ids.add(item.call_id)
                turn.calls.append(EarlierCall(item.call_id, item.name, item.arguments))
            case FunctionCallOutputItem():
                yield from turn.end()
                if item.call_id not in call_ids:
                    raise errors.InvalidRequest(
                        f"input.{index}.call_id", "answers no function_call before it"
                    )
                yield ChatMessage("tool", joined(item.output), tool_call_id=item.call_id)
            case MessageItem():
                yield from turn.end()
                role = "user" if item.role == "user" else "system"
                yield ChatMessage(role, joined(item.content))
    yield from turn.end()
