"""Fields of a body that list the tools and say whether the model must call one."""

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
    """Description of the function, which the model reads."""
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments; without a schema any object is allowed."""
    strict: bool | None = None
    """Whether arguments must match the schema even if the model may choose whether to call the
    function."""


class ToolBody(ExactModel):
    """A tool that the client runs."""

    type: ToolType
    """Kind of the tool; only `function`."""
    function: Function
    """The function."""

    def to_tool(self) -> Tool:
        """Returns the tool in the form that all protocols share."""
        return tool_of(self.function, parameters=json_text(self.function.parameters))


class NamedFunction(ExactModel):
    """A reference to a function by name."""

    name: str
    """Name of one of the functions in `tools`."""


class NamedTool(ExactModel):
    """A reference to a tool by name. If it is the value of `tool_choice`, the model must call the
    tool."""

    type: ToolType
    """Kind of the tool; only `function`."""
    function: NamedFunction
    """The function."""


class AllowedTools(ExactModel):
    """A selection of the tools. The model may call tools of the selection, or must call one, as
    `mode` says."""

    mode: Literal["auto", "required"]
    """`auto`: the model may call the selected tools; `required`: the model must call one."""
    tools: Annotated[list[NamedTool], FailFast(), Field(max_length=MAX_TOOLS)]
    """The selected tools, by name. The model sees no other tools."""


class AllowedChoice(ExactModel):
    """A value of `tool_choice` that limits the model to some of the tools."""

    type: Literal["allowed_tools"]
    """Always `allowed_tools`."""
    allowed_tools: AllowedTools
    """The selected tools, and whether the model must call one."""


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
    """Fields of a body that list the tools and say whether the model must call one."""

    tools: Tools | None = None
    """Tools that the model may call."""
    tool_choice: Choice | None = None
    """Whether the model may, must or must not call tools, and which tools."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls of tools. With false an answer has one at
    most."""

    def tools_and_choice(self) -> tuple[tuple[Tool, ...], ToolChoice]:
        """Returns the tools that may be called, and whether the model must call a tool.

        Raises:
            InvalidRequest: `allowed_tools` names a tool that is not in `tools`.
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
