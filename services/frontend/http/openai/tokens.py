"""POST /tokenize and POST /detokenize, in the forms of vLLM: the bodies, the answers and the
handlers."""

from collections.abc import Sequence
from typing import Self

from pydantic import Field, model_validator
from typing_extensions import TypedDict

from services.common import errors
from services.frontend.api_keys import Account
from services.frontend.http.bodies.object_kinds import ExactModel
from services.frontend.http.openai.chat_message import Messages
from services.frontend.http.openai.chat_request import ChatBody
from services.frontend.http.openai.request import TokenIds
from services.frontend.http.protocol.answer_object import answer_object
from services.frontend.http.protocol.api import Api
from services.frontend.request.generation_request import Prompt


class TokenizeBody(ChatBody):
    """The body of POST /tokenize: a text or a conversation. A conversation has the fields of POST
    /v1/chat/completions, so a client can send the body of a chat unchanged. Fields that do not
    change the prompt do nothing."""

    prompt: str | None = None
    """A text, instead of `messages`."""
    messages: Messages = Field(default_factory=list)
    """A conversation, instead of `prompt`."""
    return_token_strs: bool | None = None
    """Whether to answer also with the spelling of each token in the vocabulary."""

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


@answer_object
class Tokens(TypedDict):
    """The tokens of a prompt."""

    count: int
    """Number of tokens."""
    max_model_len: int
    """Largest number of tokens of a prompt and its output together."""
    tokens: Sequence[int]
    """Ids of the tokens."""
    token_strs: list[str] | None
    """Spelling of each token in the vocabulary if the request has `return_token_strs`, else
    null."""


async def tokenize(api: Api, body: TokenizeBody, account: Account) -> Tokens:
    """Returns the token ids of a text or a conversation."""
    asked = body.to_request()
    (prompt,) = asked.prompts
    service = api.models.select(asked.model, account).service
    token_ids = await service.tokens.tokenize(
        prompt, account, model=asked.model, options=asked.options
    )
    names = await service.tokens.names_of(token_ids) if body.return_token_strs else None
    return {
        "count": len(token_ids),
        "max_model_len": service.describe().max_model_len,
        "tokens": tuple(token_ids),
        "token_strs": names,
    }


class DetokenizeBody(ExactModel):
    """The body of POST /detokenize."""

    model: str | None = None
    """Name of the model; may be left out if the caller may use only one."""
    tokens: TokenIds
    """Ids of the tokens, at most as many as the model can read."""


@answer_object
class Text(TypedDict):
    """The text of tokens."""

    prompt: str
    """The text, which includes the text of special tokens."""


async def detokenize(api: Api, body: DetokenizeBody, account: Account) -> Text:
    """Returns the text that the tokens in the body stand for."""
    service = api.models.select(body.model or "", account).service
    text = await service.tokens.detokenize(tuple(body.tokens), account, model=body.model or "")
    return {"prompt": text}
