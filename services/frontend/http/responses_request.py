"""The body of POST /v1/responses, OpenAI's protocol for agents, and the request it stands for.

Nothing is stored: clients send the whole conversation each time, as coding agents do. Tools that
OpenAI runs itself, web search for example, are left out, since nobody runs them here.

The items of the assistant that follow each other, reasoning before text before calls, are one turn.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, FailFast, Field, Tag, WithJsonSchema
from typing_extensions import TypeAliasType

from services.common import errors
from services.common.sampling import SamplingParams
from services.frontend.generation.generation import Generation
from services.frontend.http import openai_errors
from services.frontend.http.accepted_values import only
from services.frontend.http.chat_message import MAX_TURNS
from services.frontend.http.conversation_body import (
    EXACT,
    TEXT_OR_LIST,
    GeneratingBody,
    Metadata,
    ToolName,
    UnknownKind,
    by_type,
    json_text,
)
from services.frontend.http.exchange import Event
from services.frontend.http.openai_response import Json
from services.frontend.http.reasoning_effort import template_kwargs
from services.frontend.http.reply import named_event
from services.frontend.http.responses_shape import ResponsesReply
from services.frontend.request import output_format
from services.frontend.request.conversation import (
    ChatMessage,
    Conversation,
    Tool,
    ToolCall,
    ToolChoice,
)
from services.frontend.request.generation_request import GenerationOptions

SYSTEM_ROLES = ("system", "developer")

LOGPROBS = "message.output_text.logprobs"


class ResponsesPart(BaseModel):
    """A part of a text."""

    model_config = EXACT

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


_TEXT_TYPES = ("input_text", "output_text", "text", "reasoning_text", "summary_text")

Part = Annotated[
    Annotated[ResponsesPart, Tag("text")] | Annotated[UnknownKind, Tag("unknown")],
    by_type(dict.fromkeys(_TEXT_TYPES, "text")),
]
ResponsesParts = TypeAliasType(
    "ResponsesParts", Annotated[list[Part], FailFast(), Field(max_length=MAX_TURNS)]
)
Text = Annotated[Annotated[str, Tag("text")] | Annotated[ResponsesParts, Tag("list")], TEXT_OR_LIST]
"""A text, whole or in parts."""


class MessageItem(BaseModel):
    """A turn."""

    model_config = EXACT

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text


class ReasoningItem(BaseModel):
    """The assistant's reasoning, sent back as it came."""

    model_config = EXACT

    type: Literal["reasoning"]
    summary: ResponsesParts | None = None
    content: ResponsesParts | None = None


class FunctionCallItem(BaseModel):
    """A call by the assistant."""

    model_config = EXACT

    type: Literal["function_call"]
    call_id: str
    name: ToolName
    arguments: str


class FunctionCallOutputItem(BaseModel):
    """The result of a call."""

    model_config = EXACT

    type: Literal["function_call_output"]
    call_id: str
    output: Text


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


class ResponsesFunction(BaseModel):
    """A function that the model may call."""

    model_config = EXACT

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def to_tool(self) -> Tool:
        """Returns the tool as all protocols have it."""
        return Tool(
            name=self.name,
            description=self.description or "",
            parameters=json_text(self.parameters),
            is_strict=bool(self.strict),
        )


class HostedTool(BaseModel):
    """A tool of another type, which nobody runs here; the model is not told of it."""

    model_config = EXACT

    type: Annotated[str, WithJsonSchema({"type": "string", "not": {"const": "function"}})]


ResponsesTool = Annotated[
    Annotated[ResponsesFunction, Tag("function")] | Annotated[HostedTool, Tag("other")],
    by_type({"function": "function"}, others="other"),
]
ResponsesTools = TypeAliasType(
    "ResponsesTools", Annotated[list[ResponsesTool], FailFast(), Field(max_length=MAX_TURNS)]
)


class ResponsesChoice(BaseModel):
    """The function that must be called."""

    model_config = EXACT

    type: Literal["function"]
    name: ToolName


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("text")]
    | Annotated[ResponsesChoice, Tag("function")]
    | Annotated[UnknownKind, Tag("unknown")],
    by_type({"function": "function"}, text="text"),
]


class ResponsesTextFormat(BaseModel):
    """Any text."""

    model_config = EXACT

    type: Literal["text"]


class ResponsesJsonFormat(BaseModel):
    """Any JSON object."""

    model_config = EXACT

    type: Literal["json_object"]


class ResponsesSchemaFormat(BaseModel):
    """JSON that keeps a schema, whether `strict` or not."""

    model_config = EXACT

    type: Literal["json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


Format = Annotated[
    Annotated[ResponsesTextFormat, Tag("text")]
    | Annotated[ResponsesJsonFormat, Tag("json_object")]
    | Annotated[ResponsesSchemaFormat, Tag("json_schema")]
    | Annotated[UnknownKind, Tag("unknown")],
    by_type({kind: kind for kind in ("text", "json_object", "json_schema")}),
]


class TextOptions(BaseModel):
    """How the text is to be."""

    model_config = EXACT

    format: Format | None = None


class ReasoningOptions(BaseModel):
    """How much the model is to think before it speaks."""

    model_config = EXACT

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


Included = TypeAliasType("Included", Annotated[list[str], FailFast()])


def _check_include(names: list[str] | None) -> list[str] | None:
    if names is not None and LOGPROBS in names:
        raise ValueError(f"{LOGPROBS!r} is not supported")
    return names


class ResponsesBody(GeneratingBody):
    """The body of POST /v1/responses."""

    spelling: ClassVar = {"messages": "input"}

    input: Annotated[Annotated[str, Tag("text")] | Annotated[InputItems, Tag("list")], TEXT_OR_LIST]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: ResponsesTools | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: Metadata = None

    store: bool | None = None
    include: Annotated[Included | None, AfterValidator(_check_include)] = None
    background: Annotated[bool | None, only(False)] = None
    previous_response_id: Annotated[str | None, only()] = None
    conversation: Annotated[Any, only()] = None
    prompt: Annotated[Any, only()] = None
    truncation: Annotated[str | None, only("disabled")] = None
    top_logprobs: Annotated[int | None, only(0)] = None
    max_tool_calls: int | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    def to_conversation(self) -> Conversation:
        return Conversation(
            tuple(self._messages()),
            tools=tuple(tool.to_tool() for tool in self._functions),
            tool_choice=self._choice,
            template_kwargs=template_kwargs(self.reasoning.effort if self.reasoning else None),
        )

    def options(self, sampling: SamplingParams) -> GenerationOptions:
        return GenerationOptions(
            max_tokens=self.max_output_tokens,
            max_tokens_field="max_output_tokens",
            sampling=sampling,
            format_field="text.format",
        )

    @property
    def grammar(self) -> str:
        match self.text.format if self.text else None:
            case ResponsesJsonFormat():
                return output_format.json_object()
            case ResponsesSchemaFormat(schema_=schema):
                return output_format.json_schema(schema, field="text.format")
        return ""

    def reply(self, generation: Generation) -> ResponsesReply:
        return ResponsesReply(generation, self._echo(generation.options.sampling))

    @staticmethod
    def explain(error: errors.OrcinusError) -> Event:
        described = openai_errors.error_object(error)["error"]
        fields = {name: described[name] for name in ("code", "message", "param")}
        return named_event("error", {**fields, "sequence_number": 0})

    @property
    def _tool_places(self) -> list[int]:
        places = enumerate(self.tools or ())
        return [place for place, tool in places if isinstance(tool, ResponsesFunction)]

    @property
    def _functions(self) -> list[ResponsesFunction]:
        return [tool for tool in self.tools or () if isinstance(tool, ResponsesFunction)]

    @property
    def _choice(self) -> ToolChoice:
        allows_parallel = self.parallel_tool_calls is not False
        match self.tool_choice:
            case ResponsesChoice(name=name):
                return ToolChoice(mode="named", name=name, allows_parallel=allows_parallel)
            case "none" | "required" as mode:
                return ToolChoice(mode=mode, allows_parallel=allows_parallel)
        return ToolChoice(allows_parallel=allows_parallel)

    def _messages(self) -> Iterator[ChatMessage]:
        """Yields the turns. Instructions and the system's words after them are one turn, since most
        chat templates know one at the beginning and no other."""
        system = [] if self.instructions is None else [self.instructions]
        items: Sequence[Any] = (
            [MessageItem(role="user", content=self.input)]
            if isinstance(self.input, str)
            else self.input
        )
        n_system = 0
        for item in items:
            if not isinstance(item, MessageItem) or item.role not in SYSTEM_ROLES:
                break
            system.append(_joined(item.content))
            n_system += 1
        if system:
            yield ChatMessage("system", "\n\n".join(system))
        yield from _turns(items, n_system)

    def _echo(self, sampling: SamplingParams) -> Json:
        """Returns the part of an answer that repeats what was asked for."""
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
            "text": {"format": form.model_dump(by_alias=True) if form else {"type": "text"}},
            "tool_choice": (
                choice.model_dump() if isinstance(choice, BaseModel) else choice or "auto"
            ),
            "tools": [tool.model_dump() for tool in self._functions],
            "top_p": sampling.top_p,
        }


def _joined(text: str | Sequence[ResponsesPart | UnknownKind] | None) -> str:
    if isinstance(text, str):
        return text
    return "\n".join(part.text for part in text or () if isinstance(part, ResponsesPart))


def _turns(items: Sequence[Any], start: int) -> Iterator[ChatMessage]:
    """Yields the turns of the items from `start` on.

    Raises:
        InvalidRequest: an output answers no call before it.
    """
    call_ids: set[str] = set()
    turn = _AssistantTurn()
    for index, item in enumerate(items[start:], start):
        match item:
            case ReasoningItem():
                yield from turn.begin()
                turn.reasoning.append(_joined(item.content) or _joined(item.summary))
            case MessageItem(role="assistant"):
                yield from turn.begin()
                turn.text = _joined(item.content)
            case FunctionCallItem():
                call_ids.add(item.call_id)
                turn.calls.append(ToolCall(item.call_id, item.name, item.arguments))
            case FunctionCallOutputItem():
                yield from turn.end()
                if item.call_id not in call_ids:
                    raise errors.InvalidRequest(
                        f"input.{index}.call_id", "answers no function_call before it"
                    )
                yield ChatMessage("tool", _joined(item.output), tool_call_id=item.call_id)
            case MessageItem():
                yield from turn.end()
                role = "user" if item.role == "user" else "system"
                yield ChatMessage(role, _joined(item.content))
    yield from turn.end()


class _AssistantTurn:
    """The assistant's turn, while its items come."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.text: str | None = None
        self.calls: list[ToolCall] = []

    def begin(self) -> Iterator[ChatMessage]:
        """Yields the turn, if it has text or calls, after which only calls may come."""
        if self.text is not None or self.calls:
            yield from self.end()

    def end(self) -> Iterator[ChatMessage]:
        """Yields the turn, if there is any, and begins the next."""
        if self.reasoning or self.text is not None or self.calls:
            yield ChatMessage(
                "assistant",
                self.text,
                tool_calls=tuple(self.calls),
                reasoning_content="\n".join(self.reasoning) or None,
            )
        self.reasoning, self.text, self.calls = [], None, []
