"""The tools of a body in Anthropic's protocol, and the `tool_choice`, which says whether the model
must call a tool.

Tools that Anthropic's own servers run are left out of the prompt.
"""

from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, GetJsonSchemaHandler, Tag, WithJsonSchema
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import core_schema
from typing_extensions import TypeAliasType

from services.frontend.http.bodies.object_kinds import (
    ExactModel,
    LeftOutItem,
    UnknownKind,
    by_type,
)
from services.frontend.http.protocol.conversation_tools import (
    ClientTool,
    ToolName,
    json_text,
    tool_of,
)
from services.frontend.request.conversation import MAX_TURNS, Tool, ToolChoice


class CustomTool(ClientTool):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    """Always `custom`; may be left out."""
    name: ToolName
    """Name of the tool."""
    description: str | None = None
    """Description of the tool, which the model reads."""
    input_schema: dict[str, Any]
    """JSON schema of the arguments."""
    strict: bool | None = None
    """Whether arguments must match the schema even if the model may choose whether to call the
    tool."""
    cache_control: Any = None
    """Does nothing: prompts are cached by default."""
    defer_loading: bool | None = None
    """Does nothing: the model sees the tool from the beginning."""
    eager_input_streaming: bool | None = None
    """Does nothing: arguments are always streamed as the model writes them."""
    input_examples: Any = None
    """Does nothing."""
    allowed_callers: Any = None
    """Does nothing."""

    def to_tool(self) -> Tool:
        return tool_of(self, parameters=json_text(self.input_schema))


class ServerTool(LeftOutItem):
    """A tool that Anthropic's own servers run. The tool does not run here, so the model does not
    see the tool."""

    type: Annotated[str, WithJsonSchema({"type": "string", "not": {"const": "custom"}})]
    """Kind of the tool, any text but `custom`. A tool of such a kind does not run here, so the
    model does not see the tool."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return handler(schema)


MessagesTool = Annotated[
    Annotated[CustomTool, Tag("custom")] | Annotated[ServerTool, Tag("other")],
    by_type({"custom": "custom"}, default="custom", others="other"),
]
MessagesTools = TypeAliasType(
    "MessagesTools", Annotated[list[MessagesTool], FailFast(), Field(max_length=MAX_TURNS)]
)


class AnyChoice(ExactModel):
    """A value of `tool_choice`: whether the model may, must or must not call tools."""

    type: Literal["auto", "any", "none"]
    """`auto`: the model decides whether to call tools; `any`: the model must call a tool; `none`:
    the model must not call tools."""
    disable_parallel_tool_use: bool | None = None
    """Whether an answer may have only one call."""


class ToolUseChoice(ExactModel):
    """A value of `tool_choice`: the one tool that the model must call."""

    type: Literal["tool"]
    """`tool`: the tool `name` must be called."""
    name: ToolName
    """Name of the tool."""
    disable_parallel_tool_use: bool | None = None
    """Does nothing: an answer with a named tool has only one call."""


Choice = Annotated[
    Annotated[AnyChoice, Tag("any")]
    | Annotated[ToolUseChoice, Tag("tool")]
    | Annotated[UnknownKind, Tag("unknown")],
    by_type({"auto": "any", "any": "any", "none": "any", "tool": "tool"}),
]

MODES: dict[str, Literal["auto", "required", "none"]] = {
    "auto": "auto",
    "any": "required",
    "none": "none",
}
"""Maps each `type` of `AnyChoice` to the mode of `ToolChoice` that has the same meaning."""


def tool_choice_of(choice: "Choice | None") -> ToolChoice:
    """Converts a `tool_choice` to the form that all protocols share. If `choice` is None, the model
    decides whether to call tools."""
    match choice:
        case AnyChoice(type=kind, disable_parallel_tool_use=is_single):
            return ToolChoice(mode=MODES[kind], allows_parallel=not is_single)
        case ToolUseChoice(name=name, disable_parallel_tool_use=is_single):
            return ToolChoice(mode="named", name=name, allows_parallel=not is_single)
    return ToolChoice()
