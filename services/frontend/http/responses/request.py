"""The bodies of POST /v1/responses, OpenAI's protocol for agents, and of POST
/v1/responses/input_tokens, and the requests made from the bodies.

The server stores no conversations: clients send the whole conversation each time, as coding agents
do. Tools that the client does not run, such as web search, are left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import FailFast, Tag
from typing_extensions import TypeAliasType

from services.common import errors
from services.common.sampling import SamplingParams
from services.frontend.generation.generation import Generation
from services.frontend.http.bodies.accepted_values import only
from services.frontend.http.bodies.object_kinds import ExactModel
from services.frontend.http.bodies.ranges import N_LOGPROBS, N_TOKENS
from services.frontend.http.protocol.conversation_body import (
    ConversationBody,
    GeneratingBody,
    Metadata,
)
from services.frontend.http.protocol.conversation_tools import ClientTool, check_allowed
from services.frontend.http.protocol.errors import failure
from services.frontend.http.protocol.reasoning_effort import template_kwargs
from services.frontend.http.protocol.reply import named_event
from services.frontend.http.protocol.text_parts import TEXT_OR_LIST
from services.frontend.http.responses.answer import RequestEcho
from services.frontend.http.responses.choices import Choice, ResponsesAllowed, ResponsesChoice
from services.frontend.http.responses.formats import (
    ResponsesJsonFormat,
    ResponsesSchemaFormat,
    TextOptions,
)
from services.frontend.http.responses.items import (
    AdditionalToolsItem,
    ConfigurationUpdateItem,
    Effort,
    InputItem,
    InputItems,
    MessageItem,
    ToolSearchOutputItem,
)
from services.frontend.http.responses.reply import ReplyRules, ResponsesReply
from services.frontend.http.responses.tool_table import ListedTool, ToolTable, listed
from services.frontend.http.responses.tools import FreeformTool, HostedTool, ResponsesTools
from services.frontend.http.responses.turns import Turns
from services.frontend.http.transport.event_stream import Event
from services.frontend.request import output_format
from services.frontend.request.conversation import ChatMessage, ToolChoice
from services.frontend.request.generation_request import GenerationOptions
from services.frontend.request.json_schema.client_schema import ClientSchema
from services.frontend.request.output_format import ANY_OBJECT, NO_FORMAT, OutputFormat

LOGPROBS = "message.output_text.logprobs"
SEALED_REASONING = "reasoning.encrypted_content"


class ReasoningOptions(ExactModel):
    """Options for the reasoning of the model before the answer."""

    effort: Effort | None = None
    """Value of the chat template's variable `reasoning_effort`. `none` and `minimal` also set
    `enable_thinking` to false."""


Included = TypeAliasType("Included", Annotated[list[str], FailFast()])

Input = Annotated[Annotated[str, Tag("text")] | Annotated[InputItems, Tag("list")], TEXT_OR_LIST]


class InputTokensBody(ConversationBody):
    """The body of POST /v1/responses/input_tokens."""

    spelling: ClassVar = {"messages": "input"}

    input: Input | None = None
    """The conversation: a text of the user, or a list of items, oldest first."""
    instructions: str | None = None
    """Text of the system at the beginning of the conversation."""
    tools: ResponsesTools | None = None
    """Tools that the model may call, 512 at most. The model sees functions, custom tools,
    namespaces and searches that the client runs, and no tools of other kinds."""
    tool_choice: Choice | None = None
    """Whether the model may, must or must not call tools, and which tools."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls of functions. With false an answer has one at
    most."""
    text: TextOptions | None = None
    """Options of the text, such as its format."""
    reasoning: ReasoningOptions | None = None
    """Options for the reasoning of the model."""

    previous_response_id: Annotated[str | None, only()] = None
    """Not supported: must be null. The server stores nothing, so clients must send the whole
    conversation."""
    conversation: Annotated[Any, only()] = None
    """Not supported: must be null. The server stores nothing, so clients must send the whole
    conversation."""
    truncation: Annotated[str | None, only("disabled", "auto")] = None
    """Does nothing: a conversation that is too long is refused."""

    @cached_property
    def table(self) -> ToolTable:
        """The tools of the conversation, with the names under which the model sees them."""
        return ToolTable(self._listed())

    @property
    def _shown_tools(self) -> Mapping[str, ClientTool]:
        return self.table.shown(self._allowed)

    @property
    def _allowed(self) -> set[str]:
        """The names, as the model sees them, of the tools that the model may call."""
        if isinstance(self.tool_choice, ResponsesAllowed):
            return self.tool_choice.shown_names(self.table)
        return self.table.names

    def spelled(self, field: str) -> str:
        spelled = super().spelled(field)
        for path, tool in self._shown_tools.items():
            if isinstance(tool, FreeformTool) and spelled.startswith(f"{path}.parameters"):
                return f"{path}.format"
        return spelled

    @property
    def _template_kwargs(self) -> dict[str, Any]:
        effort = self.reasoning.effort if self.reasoning else None
        for item in self._items:
            if isinstance(item, ConfigurationUpdateItem) and item.reasoning is not None:
                effort = item.reasoning.effort or effort
        return template_kwargs(effort)

    @property
    def _choice(self) -> ToolChoice:
        allows_parallel = self.parallel_tool_calls is not False
        match self.tool_choice:
            case ResponsesChoice() as choice:
                (name,) = choice.shown_names(self.table)
                return ToolChoice(mode="named", name=name, allows_parallel=allows_parallel)
            case ResponsesAllowed(mode=mode) as allowed:
                check_allowed(allowed.shown_names(self.table), self.table.names)
                return ToolChoice(mode=mode, allows_parallel=allows_parallel)
            case "none" | "required" as mode:
                return ToolChoice(mode=mode, allows_parallel=allows_parallel)
        return ToolChoice(allows_parallel=allows_parallel)

    @property
    def _items(self) -> Sequence[InputItem]:
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=self.input)]
        return self.input or ()

    def _listed(self) -> Iterator[ListedTool]:
        """Yields the tools that the client runs, from the body's field `tools` and from the items
        of the conversation."""
        yield from listed(self.tools, "tools")
        for place, item in enumerate(self._items):
            path = f"input.{place}.tools"
            if isinstance(item, AdditionalToolsItem):
                yield from listed(item.tools, path)
            elif isinstance(item, ToolSearchOutputItem):
                yield from listed(item.tools, path, is_found=True)

    def _messages(self) -> Iterator[ChatMessage]:
        return Turns(self._items, self.table).messages(self.instructions)


class ResponsesBody(InputTokensBody, GeneratingBody):
    """The body of POST /v1/responses."""

    input: Input
    """The conversation: a text of the user, or a list of items, oldest first."""
    max_output_tokens: Annotated[int | None, N_TOKENS] = None
    """Largest number of tokens to generate. If the prompt leaves less room in the model's context,
    the number is lowered to that room, which is also the default."""
    metadata: Metadata = None
    """Labels that the answer repeats; 16 at most."""
    include: Included | None = None
    """Names of additional fields of the answer. `message.output_text.logprobs` adds the
    log-probabilities of the tokens of texts, and `reasoning.encrypted_content` adds a form of the
    reasoning that clients send back. Other names do nothing."""
    top_logprobs: Annotated[int | None, N_LOGPROBS] = None
    """Number of the most likely tokens to show at each position of a text. A number above 0 also
    adds the log-probabilities of the tokens."""

    store: bool | None = None
    """Does nothing: no answer is stored."""
    background: Annotated[bool | None, only(False)] = None
    """Not supported: must be false or null."""
    prompt: Annotated[Any, only()] = None
    """A stored prompt. Not supported: must be null."""
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

    @property
    def unenforced(self) -> Sequence[str]:
        return tuple(
            f"{path}.format"
            for path, tool in self._shown_tools.items()
            if isinstance(tool, FreeformTool) and tool.has_free_grammar
        )

    def options(self, sampling: SamplingParams) -> GenerationOptions:
        return GenerationOptions(
            max_tokens=self.max_output_tokens,
            max_tokens_field="max_output_tokens",
            sampling=sampling,
            logprobs_field="top_logprobs",
            n_logprobs=(self.top_logprobs or 0) if self._has_logprobs else None,
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
        rules = ReplyRules(
            echo=self._echo(generation.options.sampling),
            tools=self.table,
            has_logprobs=self._has_logprobs,
            seals_reasoning=SEALED_REASONING in (self.include or ()),
        )
        return ResponsesReply(generation, rules)

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
    def _has_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def _echoed_tools(self) -> Iterator[dict[str, Any]]:
        """Yields the tools of the field `tools` that the model sees, as the answer repeats them."""
        for place, tool in enumerate(self.tools or ()):
            is_shown = self.table.is_shown(f"tools.{place}", self._allowed)
            if is_shown and not isinstance(tool, HostedTool):
                yield tool.echo()

    def _echo(self, sampling: SamplingParams) -> RequestEcho:
        """Returns the fields of an answer that repeat the request."""
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
            "tool_choice": _echoed_choice(self.tool_choice),
            "tools": list(self._echoed_tools()),
            "top_p": sampling.top_p,
        }


def _echoed_choice(choice: Choice | None) -> str | dict[str, Any]:
    """Returns the request's `tool_choice` as the answer repeats it."""
    match choice:
        case ResponsesChoice() | ResponsesAllowed():
            return choice.echo()
        case str():
            return choice
    return "auto"
