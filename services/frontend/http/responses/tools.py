"""The tools in a body of POST /v1/responses.

Clients run functions and custom tools, and may also run the search for tools. A namespace groups
functions and custom tools. All other tools run in OpenAI's own servers or in ways that are not
supported. The reader of bodies reports such tools like unknown fields.
"""

import json
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import FailFast, Field, GetJsonSchemaHandler, Tag, WithJsonSchema
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import core_schema
from typing_extensions import TypeAliasType

from services.frontend.http.bodies.object_kinds import ExactModel, LeftOutItem, by_type
from services.frontend.http.protocol.conversation_tools import (
    MAX_TOOL_NAME,
    ClientTool,
    ToolName,
    json_text,
    tool_of,
)
from services.frontend.http.responses.custom_input import INPUT
from services.frontend.request.conversation import MAX_TURNS, Tool

SEARCH = "tool_search"
"""Name under which the model sees the tool that searches for tools."""

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


class NamedClientTool(ClientTool):
    """A tool that the client runs, with a name and a description."""

    name: ToolName
    """Name of the tool."""
    description: str | None = None
    """Description of the tool, which the model reads."""
    defer_loading: bool | None = None
    """Whether the model sees the tool only after a search for tools has found it. If the client
    runs no tool `tool_search`, the model sees the tool from the beginning."""

    def shown_as(self, name: str, *, note: str) -> "NamedClientTool":
        """Returns the tool as the model sees it, with the name `name`. If `note` is not empty, this
        paragraph is added to the description."""
        if name == self.name and not note:
            return self
        paragraphs = [text for text in (self.description, note) if text]
        return self.model_copy(
            update={"name": name, "description": "\n\n".join(paragraphs) or None}
        )

    @abstractmethod
    def echo(self) -> dict[str, Any]:
        """Returns the tool as the field `tools` of the answer repeats it."""


class ResponsesFunction(NamedClientTool):
    """A function that the model may call."""

    type: Literal["function"]
    """Always `function`."""
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments; without a schema any object is allowed."""
    strict: bool | None = None
    """Whether arguments must match the schema even if the model may choose whether to call the
    function."""

    def to_tool(self) -> Tool:
        return tool_of(self, parameters=json_text(self.parameters))

    def echo(self) -> dict[str, Any]:
        return self.model_dump(exclude={"defer_loading"})


class FreeformText(ExactModel):
    """An input format: any text."""

    type: Literal["text"]
    """`text`: the input may be any text."""


class FreeformGrammar(ExactModel):
    """An input format: texts that a grammar or a regular expression describes."""

    type: Literal["grammar"]
    """`grammar`: the input follows `definition`."""
    syntax: Literal["lark", "regex"]
    """`lark`: the model reads the grammar, but the server does not enforce it. `regex`: the whole
    input matches the regular expression, in Rust's syntax."""
    definition: str
    """The grammar, or the regular expression."""

    def schema_of_input(self) -> dict[str, Any]:
        """Returns the JSON schema of the parameter `input`."""
        if self.syntax == "regex":
            return {"type": "string", "pattern": f"^(?:{self.definition})$"}
        return {
            "type": "string",
            "description": f"A text of this grammar (Lark):\n{self.definition}",
        }


InputFormat = Annotated[
    Annotated[FreeformText, Tag("text")] | Annotated[FreeformGrammar, Tag("grammar")],
    by_type({"text": "text", "grammar": "grammar"}, others="grammar"),
]


class FreeformTool(NamedClientTool):
    """A tool whose input is a text. The model sees a function with one parameter `input`, a
    string."""

    type: Literal["custom"]
    """Always `custom`."""
    format: InputFormat | None = None
    """Format of the input. Without a format, any text is allowed."""

    def to_tool(self) -> Tool:
        value: Mapping[str, Any] = {"type": "string"}
        if isinstance(self.format, FreeformGrammar):
            value = self.format.schema_of_input()
        schema = {
            "type": "object",
            "properties": {INPUT: value},
            "required": [INPUT],
            "additionalProperties": False,
        }
        return Tool(
            name=self.name,
            description=self.description or "",
            parameters=json.dumps(schema, ensure_ascii=False),
            is_held="pattern" in value,
        )

    @property
    def has_free_grammar(self) -> bool:
        """Whether the tool has a grammar that the model reads but that the server does not
        enforce."""
        return isinstance(self.format, FreeformGrammar) and self.format.syntax == "lark"

    def echo(self) -> dict[str, Any]:
        shown = self.model_dump(exclude={"defer_loading", "format"}, exclude_none=True)
        return shown if self.format is None else {**shown, "format": self.format.model_dump()}


class SearchTool(ClientTool):
    """A search for tools that the client runs. The model sees a function `tool_search`; the tools
    that the client finds come in an item `tool_search_output`."""

    name: ClassVar[str] = SEARCH

    type: Literal["tool_search"]
    """Always `tool_search`."""
    execution: Literal["client"]
    """Always `client`: the client searches. The server itself cannot search, so a tool with the
    value `server` is left out."""
    description: str | None = None
    """Description of the search, which the model reads."""
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments of the search; without a schema any object is allowed."""

    def to_tool(self) -> Tool:
        return Tool(
            name=self.name,
            description=self.description or "Searches for further tools.",
            parameters=json_text(self.parameters or _ANY_OBJECT),
        )

    def echo(self) -> dict[str, Any]:
        """Returns the tool as the field `tools` of the answer repeats it."""
        return self.model_dump()


class HostedTool(LeftOutItem):
    """A tool that the client does not run. The server does not run the tool either, so the model
    does not see it."""

    type: Annotated[
        str, WithJsonSchema({"type": "string", "not": {"enum": ["function", "custom"]}})
    ]
    """Kind of the tool, such as `web_search`. The tool does not run here, so the model does not see
    the tool."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return handler(schema)


GroupedTool = Annotated[
    Annotated[ResponsesFunction, Tag("function")]
    | Annotated[FreeformTool, Tag("custom")]
    | Annotated[HostedTool, Tag("other")],
    by_type({"function": "function", "custom": "custom"}, others="other"),
]


class Namespace(ExactModel):
    """A group of functions and custom tools. The model sees a tool of the group under the tool's
    own name if no other tool has this name. Otherwise it sees the name of the group, `__`, and the
    name of the tool. Calls of the tool come back with the field `namespace`."""

    type: Literal["namespace"]
    """Always `namespace`."""
    name: Annotated[str, Field(min_length=1, max_length=MAX_TOOL_NAME - 2)]
    """Name of the group."""
    description: str | None = None
    """Description of the group, which the model reads with the first tool of the group."""
    tools: Annotated[list[GroupedTool], FailFast(), Field(max_length=MAX_TURNS)]
    """Tools of the group."""

    def note(self) -> str:
        """Returns the paragraph that describes the group to the model. The paragraph is empty if
        the group has no description."""
        if not self.description:
            return ""
        names = ", ".join(tool.name for tool in self.tools if isinstance(tool, NamedClientTool))
        return f"Group {self.name} ({names}): {self.description}"

    def echo(self) -> dict[str, Any]:
        """Returns the group as the field `tools` of the answer repeats it."""
        tools = [tool.echo() for tool in self.tools if isinstance(tool, NamedClientTool)]
        return {**self.model_dump(exclude={"tools"}), "tools": tools}


def _tag_of(value: Mapping[str, Any]) -> str:
    return "search" if value.get("execution") == "client" else "other"


ResponsesTool = Annotated[
    Annotated[ResponsesFunction, Tag("function")]
    | Annotated[FreeformTool, Tag("custom")]
    | Annotated[Namespace, Tag("namespace")]
    | Annotated[SearchTool, Tag("search")]
    | Annotated[HostedTool, Tag("other")],
    by_type(
        {kind: kind for kind in ("function", "custom", "namespace")},
        others=lambda value: _tag_of(value) if value.get("type") == SEARCH else "other",
    ),
]
ResponsesTools = TypeAliasType(
    "ResponsesTools", Annotated[list[ResponsesTool], FailFast(), Field(max_length=MAX_TURNS)]
)
