"""The body of POST /v1/responses, OpenAI's protocol for agents, and the request made from the body.

Nothing is stored: clients send the whole conversation each time, as coding agents do. Tools that
OpenAI's own servers run, such as web search, are left out.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, FailFast, Field, Tag, WithJsonSchema
from typing_extensions import TypeAliasType

from services.common import errors
from services.common.sampling import SamplingParams
from services.frontend.generation.generation import Generation
from services.frontend.http.bodies.accepted_values import only
from services.frontend.http.bodies.object_kinds import ExactModel, UnknownKind, by_type
from services.frontend.http.bodies.ranges import N_TOKENS
from services.frontend.http.protocol.conversation_body import GeneratingBody, Metadata
from services.frontend.http.protocol.conversation_tools import (
    ClientTool,
    ToolName,
    check_allowed,
    json_text,
    shown_tools,
    tool_of,
)
from services.frontend.http.protocol.errors import failure
from services.frontend.http.protocol.reasoning_effort import template_kwargs
from services.frontend.http.protocol.reply import named_event
from services.frontend.http.protocol.text_parts import TEXT_OR_LIST
from services.frontend.http.responses.answer import RequestEcho
from services.frontend.http.responses.items import InputItem, InputItems, MessageItem, messages_of
from services.frontend.http.responses.reply import ResponsesReply
from services.frontend.http.transport.event_stream import Event
from services.frontend.request import output_format
from services.frontend.request.conversation import MAX_TURNS, ChatMessage, Tool, ToolChoice
from services.frontend.request.generation_request import GenerationOptions
from services.frontend.request.json_schema.client_schema import ClientSchema
from services.frontend.request.output_format import ANY_OBJECT, NO_FORMAT, OutputFormat

LOGPROBS = "message.output_text.logprobs"


class ResponsesFunction(ClientTool):
    """A function that the model may call."""

    type: Literal["function"]
    """Kind of the tool."""
    name: ToolName
    """Name of the function."""
    description: str | None = None
    """Description of the function, which the model reads."""
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments; without a schema any object is allowed."""
    strict: bool | None = None
    """Whether arguments must keep the schema even if the model is free to call the function or
    not."""

    def to_tool(self) -> Tool:
        return tool_of(self, parameters=json_text(self.parameters))


class HostedTool(ExactModel):
    """A tool that OpenAI's own servers run. The tool does not run here, so the model does not see
    the tool."""

    type: Annotated[str, WithJsonSchema({"type": "string", "not": {"const": "function"}})]
    """Kind of the tool, anything but `function`. The tool does not run here, so the model does not
    see the tool."""


ResponsesTool = Annotated[
    Annotated[ResponsesFunction, Tag("function")] | Annotated[HostedTool, Tag("other")],
    by_type({"function": "function"}, others="other"),
]
ResponsesTools = TypeAliasType(
    "ResponsesTools", Annotated[list[ResponsesTool], FailFast(), Field(max_length=MAX_TURNS)]
)


class ResponsesChoice(ExactModel):
    """The function that must be called."""

    type: Literal["function"]
    """Kind of the tool."""
    name: ToolName
    """Name of the function that must be called."""


AllowedTool = Annotated[
    Annotated[ResponsesChoice, Tag("function")] | Annotated[HostedTool, Tag("other")],
    by_type({"function": "function"}, others="other"),
]


class ResponsesAllowed(ExactModel):
    """A selection of the tools. The model may call tools of the selection, or must call one, as
    `mode` says."""

    type: Literal["allowed_tools"]
    """`allowed_tools`."""
    mode: Literal["auto", "required"]
    """`auto`: the model may call the selected tools; `required`: the model must call one."""
    tools: Annotated[list[AllowedTool], FailFast(), Field(max_length=MAX_TURNS)]
    """The selected tools, with functions given by name. The model sees no other tools."""

    @property
    def names(self) -> set[str]:
        """The names of the allowed functions."""
        return {tool.name for tool in self.tools if isinstance(tool, ResponsesChoice)}


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("text")]
    | Annotated[ResponsesChoice, Tag("function")]
    | Annotated[ResponsesAllowed, Tag("allowed_tools")]
    | Annotated[UnknownKind, Tag("unknown")],
    by_type({kind: kind for kind in ("function", "allowed_tools")}, text="text"),
]


class ResponsesTextFormat(ExactModel):
    """The format of any text."""

    type: Literal["text"]
    """`text`: the output may be any text."""


class ResponsesJsonFormat(ExactModel):
    """The format of a JSON object."""

    type: Literal["json_object"]
    """`json_object`: the output is a JSON object."""
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    """A JSON schema that the object keeps; without a schema any object is allowed."""


class ResponsesSchemaFormat(ExactModel):
    """The format of JSON that keeps a schema."""

    type: Literal["json_schema"]
    """`json_schema`: the output is JSON that keeps a schema."""
    name: str
    """Name of the schema; does nothing."""
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    """The JSON schema."""
    strict: bool | None = None
    """Whether the request is refused if a keyword of the schema cannot be enforced. Otherwise the
    answer names the keyword in the header `x-orcinus-unenforced`."""


Format = Annotated[
    Annotated[ResponsesTextFormat, Tag("text")]
    | Annotated[ResponsesJsonFormat, Tag("json_object")]
    | Annotated[ResponsesSchemaFormat, Tag("json_schema")]
    | Annotated[UnknownKind, Tag("unknown")],
    by_type({kind: kind for kind in ("text", "json_object", "json_schema")}),
]


class TextOptions(ExactModel):
    """The format of the text."""

    format: Format | None = None
    """Format of the text; without a format any text is allowed."""


class ReasoningOptions(ExactModel):
    """How much the model is to reason before the answer."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Value of the chat template's variable `reasoning_effort`. `none` and `minimal` also set
    `enable_thinking` to false."""


Included = TypeAliasType("Included", Annotated[list[str], FailFast()])


def _check_include(names: list[str] | None) -> list[str] | None:
    if names is not None and LOGPROBS in names:
        raise ValueError(f"{LOGPROBS!r} is not supported")
    return names


class ResponsesBody(GeneratingBody):
    """The body of POST /v1/responses."""

    spelling: ClassVar = {"messages": "input"}

    input: Annotated[Annotated[str, Tag("text")] | Annotated[InputItems, Tag("list")], TEXT_OR_LIST]
    """The conversation: a text of the user, or items, oldest first."""
    instructions: str | None = None
    """Text of the system at the beginning of the conversation."""
    max_output_tokens: Annotated[int | None, N_TOKENS] = None
    """Largest number of tokens to generate. The number is lowered to the room that the prompt
    leaves in the model's length, which is also the default."""
    tools: ResponsesTools | None = None
    """Tools that the model may call, 512 functions at most. The model does not see tools of other
    kinds."""
    tool_choice: Choice | None = None
    """Whether the model may, must or must not call tools, and which tools."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls of functions."""
    text: TextOptions | None = None
    """Format of the text."""
    reasoning: ReasoningOptions | None = None
    """How much the model reasons."""
    metadata: Metadata = None
    """Labels, which the answer repeats; 16 items at most."""

    store: bool | None = None
    """Does nothing: no answer is stored."""
    include: Annotated[Included | None, AfterValidator(_check_include)] = None
    """Names of additional fields of the answer. `message.output_text.logprobs` is refused; other
    names do nothing."""
    background: Annotated[bool | None, only(False)] = None
    """Not served."""
    previous_response_id: Annotated[str | None, only()] = None
    """Not served, since nothing is stored: clients must send the whole conversation."""
    conversation: Annotated[Any, only()] = None
    """Not served, since nothing is stored: clients must send the whole conversation."""
    prompt: Annotated[Any, only()] = None
    """A stored prompt; not served."""
    truncation: Annotated[str | None, only("disabled", "auto")] = None
    """Does nothing: a conversation that is too long is refused."""
    top_logprobs: Annotated[int | None, only(0)] = None
    """Not served."""
    max_tool_calls: int | None = None
    """Does nothing: the field limits tools that run in the server, and no tools run here."""
    user: str | None = None
    """Does nothing."""
    safety_identifier: str | None = None
    """Does nothing."""
    service_tier: str | None = None
    """Does nothing."""
    prompt_cache_key: str | None = None
    """Does nothing."""
    prompt_cache_retention: str | None = None
    """Does nothing."""

    def options(self, sampling: SamplingParams) -> GenerationOptions:
        return GenerationOptions(
            max_tokens=self.max_output_tokens,
            max_tokens_field="max_output_tokens",
            sampling=sampling,
        )

    @property
    def output_format(self) -> OutputFormat:
        field = "text.format"
        match self.text.format if self.text else None:
            case ResponsesJsonFormat(schema_=None):
                return OutputFormat(field, output_format.json_object())
            case ResponsesJsonFormat(schema_=dict() as schema):
                schema = ANY_OBJECT | schema
                return OutputFormat.of_schema(field, ClientSchema(schema, f"{field}.schema"))
            case ResponsesSchemaFormat(schema_=schema, strict=strict):
                asked = ClientSchema(schema, f"{field}.schema", is_strict=bool(strict))
                return OutputFormat.of_schema(field, asked)
        return NO_FORMAT

    def reply(self, generation: Generation) -> ResponsesReply:
        return ResponsesReply(generation, self._echo(generation.options.sampling))

    @staticmethod
    def explain(error: errors.OrcinusError) -> Event:
        failed = failure(error)
        return named_event(
            "error",
            {
                "code": failed.code,
                "message": failed.message,
                "param": failed.param,
                "sequence_number": 0,
            },
        )

    @property
    def _functions(self) -> list[ResponsesFunction]:
        return [tool for tool in self.tools or () if isinstance(tool, ResponsesFunction)]

    @property
    def _shown_tools(self) -> dict[str, ClientTool]:
        told = shown_tools(self.tools)
        if not isinstance(self.tool_choice, ResponsesAllowed):
            return told
        names = self.tool_choice.names
        return {place: tool for place, tool in told.items() if tool.to_tool().name in names}

    @property
    def _template_kwargs(self) -> dict[str, Any]:
        return template_kwargs(self.reasoning.effort if self.reasoning else None)

    @property
    def _choice(self) -> ToolChoice:
        allows_parallel = self.parallel_tool_calls is not False
        match self.tool_choice:
            case ResponsesChoice(name=name):
                return ToolChoice(mode="named", name=name, allows_parallel=allows_parallel)
            case ResponsesAllowed(mode=mode, names=names):
                check_allowed(names, (function.name for function in self._functions))
                return ToolChoice(mode=mode, allows_parallel=allows_parallel)
            case "none" | "required" as mode:
                return ToolChoice(mode=mode, allows_parallel=allows_parallel)
        return ToolChoice(allows_parallel=allows_parallel)

    def _messages(self) -> Iterator[ChatMessage]:
        items: Sequence[InputItem] = (
            [MessageItem(role="user", content=self.input)]
            if isinstance(self.input, str)
            else self.input
        )
        return messages_of(items, self.instructions)

    def _echo(self, sampling: SamplingParams) -> RequestEcho:
        """Returns the fields of an answer that repeat the request."""
        choice = self.tool_choice
        form = self.text.format if self.text else None
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": {
                "effort": self.reasoning.effort if self.reasoning else None,
                "summary": None,
            },
            "temperature": sampling.temperature,
            "text": {
                "format": form.model_dump(by_alias=True, exclude_unset=True)
                if form
                else {"type": "text"}
            },
            "tool_choice": (
                choice.model_dump() if isinstance(choice, BaseModel) else choice or "auto"
            ),
            "tools": [tool.model_dump() for tool in self._shown_tools.values()],
            "top_p": sampling.top_p,
        }
