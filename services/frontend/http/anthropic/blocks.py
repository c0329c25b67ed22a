"""The blocks of a turn's content in Anthropic's protocol, one class for each type of block.

Blocks of all other types are left out of the prompt. If such a block may hold text of the user, the
request is refused instead (`unknown_items.py`).
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, Tag
from typing_extensions import TypeAliasType

from services.frontend.http.anthropic.tools import MessagesTool
from services.frontend.http.bodies.object_kinds import ExactModel, by_type
from services.frontend.http.protocol.conversation_tools import ToolName
from services.frontend.http.protocol.text_parts import TEXT_OR_LIST, joined, result_text
from services.frontend.http.protocol.unknown_items import (
    LEFT_OUT,
    LeftOut,
    Refused,
    tag_of_unknown,
)
from services.frontend.request.conversation import MAX_TURNS


class Block(ExactModel):
    """Fields that blocks of all types have."""

    cache_control: Any = None
    """Does nothing: prompts are cached by default."""


class TextBlock(Block):
    """A block of text."""

    type: Literal["text"]
    """Always `text`."""
    text: str
    """Text of the block; several blocks are joined by line ends."""
    citations: Any = None
    """Does nothing: the answer has no citations."""


TextOnly = Annotated[
    Annotated[TextBlock, Tag("text")] | LeftOut | Refused,
    by_type({"text": "text"}, others=tag_of_unknown),
]
TextBlocks = TypeAliasType(
    "TextBlocks", Annotated[list[TextOnly], FailFast(), Field(max_length=MAX_TURNS)]
)
Text = Annotated[Annotated[str, Tag("text")] | Annotated[TextBlocks, Tag("list")], TEXT_OR_LIST]
"""Type of a field with a text, which is one string or a list of blocks."""


class PlainTextSource(ExactModel):
    """The text of a document."""

    type: Literal["text"]
    """Always `text`."""
    media_type: str | None = None
    """Does nothing: the text is read as plain text."""
    data: str
    """Text of the document."""

    @property
    def text(self) -> str:
        """The text of the document."""
        return self.data


class ContentSource(ExactModel):
    """The text of a document, as one string or as a list of text blocks."""

    type: Literal["content"]
    """Always `content`."""
    content: Text
    """Text of the document, as a text or in blocks."""

    @property
    def text(self) -> str:
        """The text of the document."""
        return joined(self.content)


class DocumentBlock(Block):
    """A document of plain text. The server refuses a turn of the user that has a document of
    another kind. In the result of a tool, a note replaces such a document."""

    type: Literal["document"]
    """Always `document`."""
    source: Annotated[
        Annotated[PlainTextSource, Tag("text")]
        | Annotated[ContentSource, Tag("content")]
        | Refused,
        by_type({"text": "text", "content": "content"}),
    ]
    """Text of the document."""
    title: str | None = None
    """Title of the document, which the model reads before the text."""
    context: str | None = None
    """Text about the document, which the model reads before the text."""
    citations: Any = None
    """Does nothing: the answer has no citations."""

    @property
    def text(self) -> str:
        """The title, the context and the text of the document, one after the other."""
        return "\n".join(filter(None, (self.title, self.context, joined((self.source,)))))


class SearchResultBlock(Block):
    """A result of a search."""

    type: Literal["search_result"]
    """Always `search_result`."""
    source: str
    """Address of the result."""
    title: str
    """Title of the result."""
    content: TextBlocks
    """Text of the result."""
    citations: Any = None
    """Does nothing: the answer has no citations."""

    @property
    def text(self) -> str:
        """The title, the address and the text of the result, one after the other."""
        return "\n".join(filter(None, (self.title, self.source, joined(self.content))))


class ThinkingBlock(Block):
    """Reasoning of the assistant. Clients send it back unchanged."""

    type: Literal["thinking"]
    """Always `thinking`."""
    thinking: str
    """Reasoning of the assistant before a text or a call."""
    signature: str | None = None
    """Does nothing."""


class RedactedThinkingBlock(Block):
    """Encrypted reasoning, which only the server that wrote it can read. The block is left out of
    the prompt."""

    type: Literal["redacted_thinking"]
    """Always `redacted_thinking`. The block is left out of the prompt, because only the server that
    wrote the block can read it."""
    data: Any = None
    """Does nothing."""


class CompactionBlock(Block):
    """A summary of earlier turns, written by the assistant."""

    type: Literal["compaction"]
    """Always `compaction`."""
    content: str | None = None
    """Text of the summary. A block without text is left out of the prompt."""
    encrypted_content: Any = None
    """Does nothing."""
    signature: Any = None
    """Does nothing."""
    tool_changes: Any = None
    """Does nothing."""


class ToolUseBlock(Block):
    """A call of a tool by the assistant."""

    type: Literal["tool_use"]
    """Always `tool_use`."""
    id: str
    """Id of the call. The block with the call's result repeats the id."""
    name: ToolName
    """Name of the tool."""
    input: dict[str, Any]
    """Arguments of the call, as an object."""
    caller: Any = None
    """Does nothing."""
    toolset_name: str | None = None
    """Does nothing."""


class ToolReferenceBlock(Block):
    """A reference to a tool that a search for tools has found."""

    type: Literal["tool_reference"]
    """Always `tool_reference`."""
    tool_name: str
    """Name of the found tool, which the model reads. The model sees all tools of `tools` from the
    beginning, even if no search has found them."""

    @property
    def text(self) -> str:
        """A line that names the tool."""
        return f"Found tool: {self.tool_name}"


def _tag_of_result_part(part: Mapping[str, Any]) -> str:
    """Returns the tag, in the union `ResultPart`, of a part of a tool's result: `document` for a
    document of plain text, else `LEFT_OUT`. Called for parts that are neither texts, search results
    nor references to tools."""
    source = part.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    is_read = part.get("type") == "document" and kind in ("text", "content")
    return "document" if is_read else LEFT_OUT


ResultPart = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[SearchResultBlock, Tag("search_result")]
    | Annotated[ToolReferenceBlock, Tag("tool_reference")]
    | LeftOut,
    by_type(
        {kind: kind for kind in ("text", "search_result", "tool_reference")},
        others=_tag_of_result_part,
    ),
]
ResultParts = TypeAliasType(
    "ResultParts", Annotated[list[ResultPart], FailFast(), Field(max_length=MAX_TURNS)]
)


class ToolResultBlock(Block):
    """The result of a call of a tool."""

    type: Literal["tool_result"]
    """Always `tool_result`."""
    tool_use_id: str
    """Id of the call whose result this is. The call must be an earlier block."""
    content: (
        Annotated[Annotated[str, Tag("text")] | Annotated[ResultParts, Tag("list")], TEXT_OR_LIST]
        | None
    ) = None
    """Result of the call, as a text or in blocks; empty by default. An image, or a block of another
    unsupported type, is replaced by a note with the type of the block."""
    is_error: bool | None = None
    """Does nothing: the text of the result says what has failed."""
    toolset_name: str | None = None
    """Does nothing."""

    @property
    def text(self) -> str:
        """The text of the result."""
        return result_text(self.content)


class ToolDefinition(ExactModel):
    """A definition of a tool that is given in a turn, and not in the body's field `tools`."""

    type: Literal["tool_definition"]
    """Always `tool_definition`."""
    definition: MessagesTool
    """Definition of the tool."""


class ReferencedTool(ExactModel):
    """A reference to a tool by its name."""

    type: Literal["tool_reference"]
    """Always `tool_reference`."""
    name: str
    """Name of the tool."""


class ToolAdditionBlock(Block):
    """A change of the tools: adds a tool that the model may call."""

    type: Literal["tool_addition"]
    """Always `tool_addition`."""
    tool: Annotated[
        Annotated[ToolDefinition, Tag("definition")]
        | Annotated[ReferencedTool, Tag("reference")]
        | LeftOut,
        by_type({"tool_definition": "definition", "tool_reference": "reference"}, others=LEFT_OUT),
    ]
    """Definition of the added tool, or a reference to a tool that was removed."""


class ToolRemovalBlock(Block):
    """A change of the tools: removes a tool, which the model may no longer call."""

    type: Literal["tool_removal"]
    """Always `tool_removal`."""
    tool: Annotated[
        Annotated[ReferencedTool, Tag("reference")] | LeftOut,
        by_type({"tool_reference": "reference"}, others=LEFT_OUT),
    ]
    """Reference to the removed tool."""
