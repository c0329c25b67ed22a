"""The body of POST /v1/chat/completions."""

from typing import Annotated, Any, Self

from pydantic import FailFast, Field, model_validator

from services.common import errors
from services.frontend.generation.generation import Generation
from services.frontend.http.bodies.accepted_values import only
from services.frontend.http.bodies.ranges import N_LOGPROBS, N_TOKENS
from services.frontend.http.openai.chat_message import Message
from services.frontend.http.openai.chat_reply import ChatReply
from services.frontend.http.openai.chat_tools import ToolFields
from services.frontend.http.openai.request import GenerationBody
from services.frontend.http.protocol.reasoning_effort import template_kwargs
from services.frontend.request.conversation import MAX_TURNS, Conversation
from services.frontend.request.generation_request import Prompt


class ChatBody(ToolFields, GenerationBody):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], FailFast(), Field(max_length=MAX_TURNS)]
    max_completion_tokens: Annotated[int | None, N_TOKENS] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, N_LOGPROBS] = None
    functions: Annotated[list[Any] | None, only([])] = None
    function_call: Annotated[str | dict[str, Any] | None, only("none", "auto")] = None
    modalities: Annotated[list[str] | None, only(["text"])] = None
    audio: Annotated[dict[str, Any] | None, only()] = None
    prediction: Annotated[dict[str, Any] | None, only()] = None
    echo: Annotated[bool | None, only(False)] = None
    web_search_options: Annotated[dict[str, Any] | None, only()] = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise errors.InvalidRequest("max_tokens", "must be equal to max_completion_tokens")
        return self

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise errors.InvalidRequest("top_logprobs", "only with logprobs = true")
        return self

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        tools, tool_choice = self.tools_and_choice()
        continues_last = bool(self.continue_final_message)
        adds_prompt = self.add_generation_prompt
        return (
            Conversation(
                tuple(message.to_message() for message in self.messages),
                tools=tools,
                tool_choice=tool_choice,
                template_kwargs=template_kwargs(self.reasoning_effort)
                | (self.chat_template_kwargs or {}),
                adds_generation_prompt=not continues_last if adds_prompt is None else adds_prompt,
                continues_last=continues_last,
            ),
        )

    def _options(self) -> dict[str, Any]:
        options = super()._options()
        if self.logprobs:
            options |= {"n_logprobs": self.top_logprobs or 0, "logprobs_field": "top_logprobs"}
        if self.max_completion_tokens is not None:
            options |= {
                "max_tokens": self.max_completion_tokens,
                "max_tokens_field": "max_completion_tokens",
            }
        return options

    def reply(self, generation: Generation) -> ChatReply:
        return ChatReply(generation, self._position, shown=self._shown_fields)
