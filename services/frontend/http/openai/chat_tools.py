"""The fields of a body that say which tools there are, and whether the model must call a tool."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, FailFast, Field, Tag
from typing_extensions import TypeAliasType

from services.common import errors
from services.frontend.http.bodies.object_kinds import ExactModel
from services.frontend.http.protocol.conversation_tools import check_allowed, json_text, tool_of
from services.frontend.request.conversation import MAX_TOOLS, Tool, ToolChoice


def _check_type(value: str) -> str:
    if value != "function":
        raise ValueError(f"{errors.shortened(value)!r} is not supported; only 'function' is")
    return value


ToolType = Annotated[str, AfterValidator(_check_type)]


class Function(ExactModel):
    """A function that the model may call."""

    name: str
    """Name of the function; 1 to 256 characters."""
    description: str | None = None
    """What it does, for the model to read."""
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments; any object when there is none."""
    strict: bool | None = None
    """Whether arguments must keep the schema even where the model chooses to call."""


class ToolBody(ExactModel):
    """A tool that the client runs."""

    type: ToolType
    """Kind of the tool; only `function`."""
    function: Function
    """The function."""

    def to_tool(self) -> Tool:
        """Returns the tool in the words that all protocols share."""
        return tool_of(self.function, parameters=json_text(self.function.parameters))


class NamedFunction(ExactModel):
    """A function by its name."""

    name: str
    """Name of one of `tools`."""


class NamedTool(ExactModel):
    """The tool that must be called."""

    type: ToolType
    """Kind of the tool; only `function`."""
    function: NamedFunction
    """The function."""


class AllowedTools(ExactModel):
    """Some of the tools, of which the model may call any, or must."""

    mode: Literal["auto", "required"]
    """Whether the model may call them, or must."""
    tools: Annotated[list[NamedTool], FailFast(), Field(max_length=MAX_TOOLS)]
    """The tools, by name; the model sees no other."""


class AllowedChoice(ExactModel):
    """The choice of a few tools."""

    type: Literal["allowed_tools"]
    """Some of the tools."""
    allowed_tools: AllowedTools
    """Which, and whether one must be called."""


def _kind_of(value: Any) -> str:
    if isinstance(value, dict):
        return "allowed" if value.get("type") == "allowed_tools" else "named"
    return "mode"


Choice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("mode")]
    | Annotated[NamedTool, Tag("named")]
    | Annotated[AllowedChoice, Tag("allowed")],
    Discriminator(_kind_of),
]

Tools = TypeAliasType("Tools", Annotated[list[ToolBody], FailFast(), Field(max_length=MAX_TOOLS)])


class ToolFields(ExactModel):
    """The fields of a body that concern tools."""

    tools: Tools | None = None
    """Tools that the model may call."""
    tool_choice: Choice | None = None
    """Whether tools are called, and which."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls."""

    def tools_and_choice(self) -> tuple[tuple[Tool, ...], ToolChoice]:
        """Returns the tools that may be called, and whether the model must call a tool.

        Raises:
            InvalidRequest: tools are allowed that there are not.
        """
        tools = tuple(tool.to_tool() for tool in self.tools or ())
        allows_parallel = self.parallel_tool_calls is not False
        match self.tool_choice:
            case NamedTool(function=function):
                choice = ToolChoice(
                    mode="named", name=function.name, allows_parallel=allows_parallel
                )
            case AllowedChoice(allowed_tools=allowed):
                names = {tool.function.name for tool in allowed.tools}
                check_allowed(names, (tool.name for tool in tools))
                tools = tuple(tool for tool in tools if tool.name in names)
                choice = ToolChoice(mode=allowed.mode, allows_parallel=allows_parallel)
            case mode:
                choice = ToolChoice(mode=mode or "auto", allows_parallel=allows_parallel)
        return tools, choice
