"""The bodies of POST /tokenize and POST /detokenize, in vLLM's shapes."""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator

from services.common import errors
from services.frontend.http.openai.chat_message import Message
from services.frontend.http.openai.request import ChatBody, TokenIds
from services.frontend.request.conversation import MAX_TURNS
from services.frontend.request.generation_request import Prompt


class TokenizeBody(ChatBody):
    """The body of POST /tokenize: a text, or a conversation. A conversation has the fields of
    POST /v1/chat/completions, so that its body can be sent here as it is; those that do not change
    the prompt do nothing."""

    prompt: str | None = None
    messages: Annotated[list[Message], FailFast(), Field(max_length=MAX_TURNS)] = Field(
        default_factory=list
    )
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if self.prompt is None and not self.messages:
            raise errors.InvalidRequest("prompt", "must be given, or messages")
        if self.prompt is not None and self.messages:
            raise errors.InvalidRequest("prompt", "not together with messages")
        return self

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return super().prompts if self.prompt is None else (self.prompt,)


class DetokenizeBody(BaseModel):
    """The body of POST /detokenize."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    tokens: TokenIds
