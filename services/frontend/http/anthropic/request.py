"""The bodies of Anthropic's POST /v1/messages and of its count of tokens, and the requests that
they stand for.

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
    """A tool of the client."""

    type: Literal["custom"] | None = None
    """Kind of the tool; may be left out."""
    name: ToolName
    """Name of the tool."""
    description: str | None = None
    """What it does, for the model to read."""
    input_schema: dict[str, Any]
    """JSON schema of its arguments."""
    strict: bool | None = None
    """Whether arguments must keep the schema even where the model chooses to call."""

    def to_tool(self) -> Tool:
        return tool_of(self, parameters=json_text(self.input_schema))


class ServerTool(ExactModel):
    """A tool that Anthropic's own servers run. It does not run here, so the model does not see
    it."""

    type: Annotated[str, WithJsonSchema({"type": "string", "not": {"const": "custom"}})]
    """Any other kind; the tool does not run here, so the model does not see it."""


MessagesTool = Annotated[
    Annotated[CustomTool, Tag("custom")] | Annotated[ServerTool, Tag("other")],
    by_type({"custom": "custom"}, default="custom", others="other"),
]
MessagesTools = TypeAliasType(
    "MessagesTools", Annotated[list[MessagesTool], FailFast(), Field(max_length=MAX_TURNS)]
)


class AnyChoice(ExactModel):
    """Whether the model calls tools."""

    type: Literal["auto", "any", "none"]
    """The model decides, must call some tool, or calls none."""
    disable_parallel_tool_use: bool | None = None
    """Whether an answer has one call at most."""


class ToolUseChoice(ExactModel):
    """The tool that must be called."""

    type: Literal["tool"]
    """One tool must be called."""
    name: ToolName
    """Name of the tool."""
    disable_parallel_tool_use: bool | None = None
    """Does nothing: there is one call."""


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
    """Whether the model is to reason before it answers; a budget is ignored."""

    type: Literal["enabled", "adaptive", "disabled"]
    """The chat template's variable `enable_thinking`: false with `disabled`, else true. A budget
    does nothing."""


class JsonSchemaOutput(ExactModel):
    """JSON that keeps a schema."""

    type: Literal["json_schema"]
    """JSON that keeps a schema."""
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    """The JSON schema."""


class OutputConfig(ExactModel):
    """The effort and the format of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """The chat template's variable `reasoning_effort`."""
    format: JsonSchemaOutput | None = None
    """Format of the text; any text when there is none."""


class MessagesMetadata(ExactModel):
    """Labels that the client gives its request; they do nothing."""

    user_id: str | None = None
    """Does nothing."""


class CountBody(ConversationBody):
    """The body of POST /v1/messages/count_tokens."""

    spelling: ClassVar = {"stop": "stop_sequences", "parameters": "input_schema"}

    messages: Turns
    """The conversation, oldest turn first; the last turn is not the assistant's."""
    system: Text | None = None
    """What the system says before all else."""
    tools: MessagesTools | None = None
    """Tools that the model may call, 128 of the client's own at most; the model is told of no
    others."""
    tool_choice: Choice | None = None
    """Whether tools are called, and which; by default the model decides."""
    thinking: ThinkingOptions | None = None
    """Whether the model thinks before it speaks."""
    output_config: OutputConfig | None = None
    """Effort and format of the answer."""

    @property
    def _shown_tools(self) -> dict[int, ClientTool]:
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
    """Tokens to generate at most; lowered to what the model's length leaves."""
    stop_sequences: StopTexts | None = None
    """Texts that end the output and are not part of it."""
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
