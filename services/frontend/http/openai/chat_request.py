"""The body of POST /v1/chat/completions."""

from typing import Annotated, Any, Self

from pydantic import model_validator

from services.common import errors
from services.frontend.generation.generation import Generation
from services.frontend.http.bodies.accepted_values import only
from services.frontend.http.bodies.ranges import N_LOGPROBS, N_TOKENS
from services.frontend.http.openai.chat_message import Messages
from services.frontend.http.openai.chat_reply import ChatReply
from services.frontend.http.openai.chat_tools import ToolFields
from services.frontend.http.openai.request import GenerationBody
from services.frontend.http.protocol.reasoning_effort import template_kwargs
from services.frontend.request.conversation import Conversation
from services.frontend.request.generation_request import Prompt


class ChatBody(ToolFields, GenerationBody):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    """The conversation, oldest turn first."""
    max_completion_tokens: Annotated[int | None, N_TOKENS] = None
    """Newer name of `max_tokens`. If both are given, the values must be equal."""
    logprobs: bool | None = None
    """Whether to answer with the log-probability of each token of the content. Reasoning, calls
    and a stop text that is cut off have none, unless `return_token_ids` shows their tokens."""
    top_logprobs: Annotated[int | None, N_LOGPROBS] = None
    """Number of the most likely tokens to show at each position; only with `logprobs`."""
    functions: Annotated[list[Any] | None, only([])] = None
    """OpenAI's older form of `tools`. Not supported: must be empty or null."""
    function_call: Annotated[str | dict[str, Any] | None, only("none", "auto")] = None
    """OpenAI's older form of `tool_choice`. Does nothing: must be `none`, `auto` or null."""
    modalities: Annotated[list[str] | None, only(["text"])] = None
    """Kinds of output. Only `text` is supported."""
    audio: Annotated[dict[str, Any] | None, only()] = None
    """Not supported: must be null."""
    prediction: Annotated[dict[str, Any] | None, only()] = None
    """Not supported: must be null."""
    echo: Annotated[bool | None, only(False)] = None
    """Not supported for conversations: must be false or null."""
    web_search_options: Annotated[dict[str, Any] | None, only()] = None
    """Not supported: must be null."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template, such as `{"enable_thinking": false}`; 16 KiB of JSON at
    most. `messages`, `tools` and `add_generation_prompt` cannot be set here, because the body has a
    field for each."""
    reasoning_effort: str | None = None
    """How much to reason: the value of the chat template's variable `reasoning_effort`. `none` and
    `minimal` also set `enable_thinking` to false."""
    add_generation_prompt: bool | None = None
    """Whether to begin a turn of the assistant after the last message. The default is true, or
    false with `continue_final_message`."""
    continue_final_message: bool | None = None
    """Whether to continue the last message instead of beginning a turn."""

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
        return ChatReply(generation, self._reply_options)
