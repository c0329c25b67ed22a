"""The bodies of Anthropic's POST /v1/messages and its count of tokens, and what they stand for.

The results of tools, which users' messages hold there, are turns of their own here. Signatures of
reasoning and wishes for a cache are ignored; tools that Anthropic runs itself are left out.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, FailFast, Field, Tag, WithJsonSchema
from typing_extensions import TypeAliasType

from services.common import errors
from services.common.sampling import SamplingParams
from services.frontend.generation.generation import Generation
from services.frontend.http import anthropic_errors
from services.frontend.http.chat_message import MAX_TURNS
from services.frontend.http.conversation_body import (
    EXACT,
    TEXT_OR_LIST,
    ConversationBody,
    GeneratingBody,
    ToolName,
    UnknownKind,
    UnknownRole,
    by_type,
    json_text,
)
from services.frontend.http.exchange import Event
from services.frontend.http.messages_shape import MessagesReply
from services.frontend.http.openai_request import StopTexts
from services.frontend.http.reasoning_effort import template_kwargs
from services.frontend.request import output_format
from services.frontend.request.conversation import (
    ChatMessage,
    Conversation,
    Tool,
    ToolCall,
    ToolChoice,
)
from services.frontend.request.generation_request import GenerationOptions


class TextBlock(BaseModel):
    """A text."""

    model_config = EXACT

    type: Literal["text"]
    text: str


TextOnly = Annotated[
    Annotated[TextBlock, Tag("text")] | Annotated[UnknownKind, Tag("unknown")],
    by_type({"text": "text"}),
]
TextBlocks = TypeAliasType(
    "TextBlocks", Annotated[list[TextOnly], FailFast(), Field(max_length=MAX_TURNS)]
)
Text = Annotated[Annotated[str, Tag("text")] | Annotated[TextBlocks, Tag("list")], TEXT_OR_LIST]
"""A text, whole or in blocks."""


class ThinkingBlock(BaseModel):
    """The assistant's reasoning, sent back as it came."""

    model_config = EXACT

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(BaseModel):
    """Reasoning of another server that nobody here can read; it is left out."""

    model_config = EXACT

    type: Literal["redacted_thinking"]


class ToolUseBlock(BaseModel):
    """A call by the assistant."""

    model_config = EXACT

    type: Literal["tool_use"]
    id: str
    name: ToolName
    input: dict[str, Any]


class ToolResultBlock(BaseModel):
    """The result of a call."""

    model_config = EXACT

    type: Literal["tool_result"]
    tool_use_id: str
    content: Text | None = None


_USER_TYPES = ("text", "tool_result")
_ASSISTANT_TYPES = ("text", "thinking", "redacted_thinking", "tool_use")

UserBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[UnknownKind, Tag("unknown")],
    by_type({kind: kind for kind in _USER_TYPES}),
]
AssistantBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[UnknownKind, Tag("unknown")],
    by_type({kind: kind for kind in _ASSISTANT_TYPES}),
]
UserBlocks = TypeAliasType(
    "UserBlocks", Annotated[list[UserBlock], FailFast(), Field(max_length=MAX_TURNS)]
)
AssistantBlocks = TypeAliasType(
    "AssistantBlocks", Annotated[list[AssistantBlock], FailFast(), Field(max_length=MAX_TURNS)]
)


class UserTurn(BaseModel):
    """A turn of the user, with the results of the calls before it."""

    model_config = EXACT

    role: Literal["user"]
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[UserBlocks, Tag("list")], TEXT_OR_LIST
    ]


class AssistantTurn(BaseModel):
    """A turn of the assistant, sent back as it came."""

    model_config = EXACT

    role: Literal["assistant"]
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[AssistantBlocks, Tag("list")], TEXT_OR_LIST
    ]


class SystemTurn(BaseModel):
    """Words of the system within the conversation."""

    model_config = EXACT

    role: Literal["system"]
    content: Text


Turn = Annotated[
    Annotated[UserTurn, Tag("user")]
    | Annotated[AssistantTurn, Tag("assistant")]
    | Annotated[SystemTurn, Tag("system")]
    | Annotated[UnknownRole, Tag("unknown")],
    by_type({role: role for role in ("user", "assistant", "system")}, field="role"),
]
Turns = TypeAliasType(
    "Turns", Annotated[list[Turn], FailFast(), Field(min_length=1, max_length=MAX_TURNS)]
)


class CustomTool(BaseModel):
    """A tool of the client."""

    model_config = EXACT

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def to_tool(self) -> Tool:
        """Returns the tool as all protocols have it."""
        return Tool(
            name=self.name,
            description=self.description or "",
            parameters=json_text(self.input_schema),
            is_strict=bool(self.strict),
        )


class ServerTool(BaseModel):
    """A tool of another type, which nobody runs here; the model is not told of it."""

    model_config = EXACT

    type: Annotated[str, WithJsonSchema({"type": "string", "not": {"const": "custom"}})]


MessagesTool = Annotated[
    Annotated[CustomTool, Tag("custom")] | Annotated[ServerTool, Tag("other")],
    by_type({"custom": "custom"}, default="custom", others="other"),
]
MessagesTools = TypeAliasType(
    "MessagesTools", Annotated[list[MessagesTool], FailFast(), Field(max_length=MAX_TURNS)]
)


class AnyChoice(BaseModel):
    """Whether tools are called."""

    model_config = EXACT

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class ToolUseChoice(BaseModel):
    """The tool that must be called."""

    model_config = EXACT

    type: Literal["tool"]
    name: ToolName
    disable_parallel_tool_use: bool | None = None


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


class ThinkingOptions(BaseModel):
    """Whether the model is to think before it speaks; a budget is ignored."""

    model_config = EXACT

    type: Literal["enabled", "adaptive", "disabled"]


class JsonSchemaOutput(BaseModel):
    """JSON that keeps a schema."""

    model_config = EXACT

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(BaseModel):
    """How the answer is to be."""

    model_config = EXACT

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonSchemaOutput | None = None


class CountBody(ConversationBody):
    """The body of POST /v1/messages/count_tokens."""

    spelling: ClassVar = {"stop": "stop_sequences", "parameters": "input_schema"}

    messages: Turns
    system: Text | None = None
    tools: MessagesTools | None = None
    tool_choice: Choice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None

    def to_conversation(self) -> Conversation:
        customs = [tool for tool in self.tools or () if isinstance(tool, CustomTool)]
        return Conversation(
            tuple(self._messages()),
            tools=tuple(tool.to_tool() for tool in customs),
            tool_choice=self._choice,
            template_kwargs=self._template_kwargs,
        )

    @property
    def _tool_places(self) -> list[int]:
        places = enumerate(self.tools or ())
        return [place for place, tool in places if isinstance(tool, CustomTool)]

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
            yield ChatMessage("system", _joined(self.system))
        call_ids: set[str] = set()
        for index, message in enumerate(self.messages):
            match message:
                case AssistantTurn():
                    turn = _assistant_turn(message)
                    call_ids.update(call.id for call in turn.tool_calls)
                    yield turn
                case UserTurn():
                    yield from _user_turns(message, call_ids, f"messages.{index}.content")
                case SystemTurn():
                    yield ChatMessage("system", _joined(message.content))
        if isinstance(message, AssistantTurn):
            raise errors.InvalidRequest(
                f"messages.{index}.role",
                "the last message must not be the assistant's: it would have to be continued",
            )


class MessagesBody(CountBody, GeneratingBody):
    """The body of POST /v1/messages."""

    max_tokens: int
    stop_sequences: StopTexts | None = None

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
        return anthropic_errors.error_event(error)


def _joined(text: str | Sequence[TextBlock | UnknownKind] | None) -> str:
    if isinstance(text, str):
        return text
    return "\n".join(block.text for block in text or () if isinstance(block, TextBlock))


def _assistant_turn(message: AssistantTurn) -> ChatMessage:
    if isinstance(message.content, str):
        return ChatMessage("assistant", message.content)
    reasoning, texts, calls = [], [], []
    for block in message.content:
        match block:
            case ThinkingBlock():
                reasoning.append(block.thinking)
            case TextBlock():
                texts.append(block.text)
            case ToolUseBlock():
                calls.append(ToolCall(block.id, block.name, json_text(block.input)))
    return ChatMessage(
        "assistant",
        "\n".join(texts) if texts else None,
        tool_calls=tuple(calls),
        reasoning_content="\n".join(reasoning) or None,
    )


def _user_turns(message: UserTurn, call_ids: set[str], field: str) -> Iterator[ChatMessage]:
    """Yields the results of calls, each as a turn, and the texts between them.

    Raises:
        InvalidRequest: a result is of no call before it.
    """
    if isinstance(message.content, str):
        yield ChatMessage("user", message.content)
        return
    texts: list[str] = []
    for index, block in enumerate(message.content):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ToolResultBlock():
                if block.tool_use_id not in call_ids:
                    raise errors.InvalidRequest(
                        f"{field}.{index}.tool_use_id", "answers no tool_use before it"
                    )
                if texts:
                    yield ChatMessage("user", "\n".join(texts))
                    texts = []
                yield ChatMessage("tool", _joined(block.content), tool_call_id=block.tool_use_id)
    if texts or not message.content:
        yield ChatMessage("user", "\n".join(texts))
