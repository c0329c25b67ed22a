"""The values of `tool_choice` in a body of POST /v1/responses."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, Tag

from services.frontend.http.bodies.object_kinds import ExactModel, UnknownKind, by_type
from services.frontend.http.protocol.conversation_tools import ToolName
from services.frontend.http.responses.tool_table import ToolTable
from services.frontend.http.responses.tools import SEARCH, HostedTool
from services.frontend.request.conversation import MAX_TURNS


class ResponsesChoice(ExactModel):
    """A reference to a tool by name. If it is the value of `tool_choice`, the model must call the
    tool."""

    type: Literal["function", "custom"]
    """Kind of the tool."""
    name: ToolName
    """Name of the tool."""
    namespace: str | None = None
    """Namespace of the tool. It may be left out if only one namespace has a tool of this name."""

    def shown_names(self, tools: ToolTable) -> set[str]:
        """Returns the name under which the model sees the tool, in a set of one."""
        return {tools.name_of(self.namespace, self.name)}

    def echo(self) -> dict[str, Any]:
        """Returns this `tool_choice` as the answer repeats it."""
        return self.model_dump(exclude_none=True)


class NamespaceChoice(ExactModel):
    """A reference to all tools of a namespace, in a selection of tools."""

    type: Literal["namespace"]
    """Always `namespace`."""
    name: ToolName
    """Name of the namespace."""

    def shown_names(self, tools: ToolTable) -> set[str]:
        """Returns the names under which the model sees the tools of the namespace."""
        return tools.names_in(self.name)


class SearchChoice(ExactModel):
    """A reference to the tool that searches for tools, in a selection of tools."""

    type: Literal["tool_search"]
    """Always `tool_search`."""

    def shown_names(self, tools: ToolTable) -> set[str]:
        """Returns the name under which the model sees the search tool, in a set of one. The set is
        empty if the request has no search tool that the client runs."""
        return {SEARCH} & tools.names


AllowedTool = Annotated[
    Annotated[ResponsesChoice, Tag("function")]
    | Annotated[NamespaceChoice, Tag("namespace")]
    | Annotated[SearchChoice, Tag("tool_search")]
    | Annotated[HostedTool, Tag("other")],
    by_type(
        {
            "function": "function",
            "custom": "function",
            "namespace": "namespace",
            "tool_search": "tool_search",
        },
        others="other",
    ),
]


class ResponsesAllowed(ExactModel):
    """A selection of the tools. The model may call tools of the selection, or must call one, as
    `mode` says."""

    type: Literal["allowed_tools"]
    """Always `allowed_tools`."""
    mode: Literal["auto", "required"]
    """`auto`: the model may call the selected tools; `required`: the model must call one."""
    tools: Annotated[list[AllowedTool], FailFast(), Field(max_length=MAX_TURNS)]
    """The selected tools, given by name. The model sees no other tools."""

    def shown_names(self, tools: ToolTable) -> set[str]:
        """Returns the names under which the model sees the selected tools."""
        return set(self._shown_names(tools))

    def echo(self) -> dict[str, Any]:
        """Returns this `tool_choice` as the answer repeats it."""
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools]
        return {"type": self.type, "mode": self.mode, "tools": tools}

    def _shown_names(self, tools: ToolTable) -> Iterator[str]:
        for tool in self.tools:
            if not isinstance(tool, HostedTool):
                yield from tool.shown_names(tools)


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("text")]
    | Annotated[ResponsesChoice, Tag("function")]
    | Annotated[ResponsesAllowed, Tag("allowed_tools")]
    | Annotated[UnknownKind, Tag("unknown")],
    by_type(
        {"function": "function", "custom": "function", "allowed_tools": "allowed_tools"},
        text="text",
    ),
]
