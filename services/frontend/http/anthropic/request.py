"""The bodies of Anthropic's POST /v1/messages and POST /v1/messages/count_tokens, and the requests
made from the bodies."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from services.common import errors
from services.common.sampling import SamplingParams
from services.frontend.generation.generation import Generation
from services.frontend.http.anthropic.blocks import Text
from services.frontend.http.anthropic.errors import error_event
from services.frontend.http.anthropic.reply import MessagesReply, ThinkingDisplay
from services.frontend.http.anthropic.tools import Choice, MessagesTools, tool_choice_of
from services.frontend.http.anthropic.turn_messages import messages_of, tools_after
from services.frontend.http.anthropic.turns import Turns
from services.frontend.http.anthropic.unused_fields import UnusedFields
from services.frontend.http.bodies.object_kinds import ExactModel
from services.frontend.http.bodies.ranges import N_TOKENS
from services.frontend.http.bodies.stop_texts import StopTexts
from services.frontend.http.protocol.conversation_body import ConversationBody, GeneratingBody
from services.frontend.http.protocol.conversation_tools import ClientTool, shown_tools
from services.frontend.http.protocol.reasoning_effort import template_kwargs
from services.frontend.http.protocol.text_parts import joined
from services.frontend.http.transport.event_stream import Event
from services.frontend.request.conversation import ChatMessage, ToolChoice
from services.frontend.request.generation_request import GenerationOptions
from services.frontend.request.json_schema.client_schema import ClientSchema
from services.frontend.request.output_format import NO_FORMAT, OutputFormat


class ThinkingOptions(ExactModel):
    """Whether the model is to reason before the answer."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    """Sets the chat template's variable `enable_thinking`: false for `disabled`, else true. The
    answer has the reasoning unless the type is `disabled`."""
    budget_tokens: int | None = None
    """Does nothing."""
    display: str | None = None
    """`omitted`: the answer has blocks of reasoning without the text of the reasoning. Other values
    do nothing."""
    block_binding: Any = None
    """Does nothing."""


class JsonSchemaOutput(ExactModel):
    """An output format: JSON that matches a schema."""

    type: Literal["json_schema"]
    """`json_schema`: the output is JSON that matches a schema."""
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    """The JSON schema."""


class OutputConfig(ExactModel):
    """The effort of the reasoning and the format of the answer."""

    effort: str | None = None
    """Value of the chat template's variable `reasoning_effort`, such as `low` or `high`."""
    format: JsonSchemaOutput | None = None
    """Format of the text. Without a format, any text is allowed."""
    task_budget: Any = None
    """Does nothing."""


class MessagesMetadata(ExactModel):
    """Labels that the client gives to the request. They have no effect."""

    user_id: str | None = None
    """Does nothing."""


class CountBody(UnusedFields, ConversationBody):
    """The body of POST /v1/messages/count_tokens."""

    spelling: ClassVar = {
        "stop": "stop_sequences",
        "parameters": "input_schema",
        "continue_final_message": "messages",
    }

    messages: Turns
    """The conversation, oldest turn first. If the last turn is the assistant's, the answer
    continues its text."""
    system: Text | None = None
    """Text of the system at the beginning of the conversation."""
    tools: MessagesTools | None = None
    """Tools that the model may call. At most 512 of them may be tools that the client runs. The
    model does not see tools that Anthropic's servers run."""
    tool_choice: Choice | None = None
    """Whether the model may, must or must not call tools, and which tools. By default the model
    decides."""
    thinking: ThinkingOptions | None = None
    """Whether the model reasons before the answer."""
    output_config: OutputConfig | None = None
    """Effort of the reasoning and format of the answer."""
    older_format: Annotated[JsonSchemaOutput | None, Field(alias="output_format")] = None
    """Older name of `output_config.format`."""

    @property
    def _shown_tools(self) -> dict[str, ClientTool]:
        return tools_after(self.messages, shown_tools(self.tools))

    @property
    def _choice(self) -> ToolChoice:
        return tool_choice_of(self.tool_choice)

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

    def _continues_last(self, messages: Sequence[ChatMessage]) -> bool:
        return bool(messages) and messages[-1].role == "assistant"


class MessagesBody(CountBody, GeneratingBody):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, N_TOKENS]
    """Largest number of tokens to generate. If the prompt leaves less room in the model's context,
    the number is lowered to that room."""
    stop_sequences: StopTexts | None = None
    """Texts that end the output. The output does not include the stop text."""
    metadata: MessagesMetadata | None = None
    """Does nothing."""

    def options(self, sampling: SamplingParams) -> GenerationOptions:
        return GenerationOptions(
            max_tokens=self.max_tokens,
            sampling=sampling,
            stop=tuple(self.stop_sequences or ()),
        )

    @property
    def output_format(self) -> OutputFormat:
        field, form = self._format
        if form is None:
            return NO_FORMAT
        return OutputFormat.of_schema(field, ClientSchema(form.schema_, f"{field}.schema"))

    @property
    def _format(self) -> tuple[str, JsonSchemaOutput | None]:
        """The name of the body's field that sets the format of the answer, and the format. The
        format is None if the body sets none."""
        if self.output_config is not None and self.output_config.format is not None:
            return "output_config.format", self.output_config.format
        return "output_format", self.older_format

    def reply(self, generation: Generation) -> MessagesReply:
        return MessagesReply(generation, thinking=self._thinking_display)

    @property
    def _thinking_display(self) -> ThinkingDisplay:
        if self.thinking is None or self.thinking.type == "disabled":
            return ThinkingDisplay.HIDDEN
        is_omitted = self.thinking.display == "omitted"
        return ThinkingDisplay.OMITTED if is_omitted else ThinkingDisplay.SHOWN

    @staticmethod
    def explain(error: errors.OrcinusError) -> Event:
        return error_event(error)
