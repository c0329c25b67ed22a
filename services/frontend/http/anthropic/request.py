"""The bodies of Anthropic's POST /v1/messages and POST /v1/messages/count_tokens, and the requests
made from the bodies.

Tools that Anthropic's own servers run are left out.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import FailFast, Field, Tag, WithJsonSchema
from typing_extensions import TypeAliasType

from services.common import errors
from services.common.sampling import SamplingParams
from services.frontend.generation.generation import Generation
from services.frontend.http.anthropic.errors import error_event
from services.frontend.http.anthropic.reply import MessagesReply
from services.frontend.http.anthropic.turns import Text, Turns, messages_of
from services.frontend.http.bodies.object_kinds import ExactModel, UnknownKind, by_type
from services.frontend.http.bodies.ranges import N_TOKENS
from services.frontend.http.bodies.stop_texts import StopTexts
from services.frontend.http.protocol.conversation_body import ConversationBody, GeneratingBody
from services.frontend.http.protocol.conversation_tools import (
    ClientTool,
    ToolName,
    json_text,
    shown_tools,
    tool_of,
)
from services.frontend.http.protocol.reasoning_effort import template_kwargs
from services.frontend.http.protocol.text_parts import joined
from services.frontend.http.transport.event_stream import Event
from services.frontend.request import output_format
from services.frontend.request.conversation import MAX_TURNS, ChatMessage, Tool, ToolChoice
from services.frontend.request.generation_request import GenerationOptions


class CustomTool(ClientTool):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    """Kind of the tool; may be left out."""
    name: ToolName
    """Name of the tool."""
    description: str | None = None
    """Description of the tool, which the model reads."""
    input_schema: dict[str, Any]
    """JSON schema of the arguments."""
    strict: bool | None = None
    """Whether arguments must keep the schema even if the model is free to call the tool or not."""

    def to_tool(self) -> Tool:
        return tool_of(self, parameters=json_text(self.input_schema))


class ServerTool(ExactModel):
    """A tool that Anthropic's own servers run. The tool does not run here, so the model does not
    see the tool."""

    type: Annotated[str, WithJsonSchema({"type": "string", "not": {"const": "custom"}})]
    """Kind of the tool, anything but `custom`. The tool does not run here, so the model does not
    see the tool."""


MessagesTool = Annotated[
    Annotated[CustomTool, Tag("custom")] | Annotated[ServerTool, Tag("other")],
    by_type({"custom": "custom"}, default="custom", others="other"),
]
MessagesTools = TypeAliasType(
    "MessagesTools", Annotated[list[MessagesTool], FailFast(), Field(max_length=MAX_TURNS)]
)


class AnyChoice(ExactModel):
    """Whether the model may, must or must not call tools."""

    type: Literal["auto", "any", "none"]
    """`auto`: the model decides whether to call tools; `any`: the model must call a tool; `none`:
    the model must not call tools."""
    disable_parallel_tool_use: bool | None = None
    """Whether an answer may have only one call."""


class ToolUseChoice(ExactModel):
    """The tool that must be called."""

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

_MODES: dict[str, Literal["auto", "required", "none"]] = {
    "auto": "auto",
    "any": "required",
    "none": "none",
}


class ThinkingOptions(ExactModel):
    """Whether the model is to reason before the answer. A budget of tokens is ignored."""

    type: Literal["enabled", "adaptive", "disabled"]
    """Sets the chat template's variable `enable_thinking`: false for `disabled`, else true. A
    budget of tokens does nothing."""


class JsonSchemaOutput(ExactModel):
    """The format of JSON that keeps a schema."""

    type: Literal["json_schema"]
    """`json_schema`: the output is JSON that keeps a schema."""
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    """The JSON schema."""


class OutputConfig(ExactModel):
    """The effort and the format of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Value of the chat template's variable `reasoning_effort`."""
    format: JsonSchemaOutput | None = None
    """Format of the text; without a format any text is allowed."""


class MessagesMetadata(ExactModel):
    """Labels that the client gives to the request. Labels do nothing."""

    user_id: str | None = None
    """Does nothing."""


class CountBody(ConversationBody):
    """The body of POST /v1/messages/count_tokens."""

    spelling: ClassVar = {"stop": "stop_sequences", "parameters": "input_schema"}

    messages: Turns
    """The conversation, oldest turn first. The last turn must not be a turn of the assistant."""
    system: Text | None = None
    """Text of the system at the beginning of the conversation."""
    tools: MessagesTools | None = None
    """Tools that the model may call, 128 tools of the client at most. The model does not see tools
    that Anthropic's servers run."""
    tool_choice: Choice | None = None
    """Whether the model may, must or must not call tools, and which tools. By default the model
    decides."""
    thinking: ThinkingOptions | None = None
    """Whether the model reasons before the answer."""
    output_config: OutputConfig | None = None
    """Effort and format of the answer."""

    @property
    def _shown_tools(self) -> dict[str, ClientTool]:
        return shown_tools(self.tools)

    @property
    def _choice(self) -> ToolChoice:
        match self.tool_choice:
            case AnyChoice(type=kind, disable_parallel_tool_use=is_single):
                return ToolChoice(mode=_MODES[kind], allows_parallel=not is_single)
            case ToolUseChoice(name=name, disable_parallel_tool_use=is_single):
                return ToolChoice(mode="named", name=name, allows_parallel=not is_single)
        return ToolChoice()

    @property
    def _template_kwargs(self) -> dict[str, Any]:
        kwargs = template_kwargs(self.output_config.effort if self.output_config else None)
        if self.thinking is not None:
            kwargs["enable_thinking"] = self.thinking.type != "disabled"
        return kwargs

    def _messages(self) -> Iterator[ChatMessage]:
        if self.system is not None:
            yield ChatMessage("system", joined(self.system))
        yield from messages_of(self.messages)


class MessagesBody(CountBody, GeneratingBody):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, N_TOKENS]
    """Largest number of tokens to generate. The number is lowered to the room that the prompt
    leaves in the model's length."""
    stop_sequences: StopTexts | None = None
    """Texts that end the output. The output does not include the stop text."""
    metadata: MessagesMetadata | None = None
    """Does nothing."""

    def options(self, sampling: SamplingParams) -> GenerationOptions:
        return GenerationOptions(
            max_tokens=self.max_tokens,
            lowers_max_tokens=True,
            sampling=sampling,
            format_field="output_config.format",
            stop=tuple(self.stop_sequences or ()),
        )

    @property
    def grammar(self) -> str:
        if self.output_config is None or self.output_config.format is None:
            return ""
        schema = self.output_config.format.schema_
        return output_format.json_schema(schema, field="output_config.format")

    def reply(self, generation: Generation) -> MessagesReply:
        return MessagesReply(generation)

    @staticmethod
    def explain(error: errors.OrcinusError) -> Event:
        return error_event(error)
