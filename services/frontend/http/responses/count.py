"""Handler of POST /v1/responses/input_tokens."""

from typing import Literal

from typing_extensions import TypedDict

from services.frontend.api_keys import Account
from services.frontend.http.protocol.answer_object import answer_object
from services.frontend.http.protocol.api import Api
from services.frontend.http.responses.request import InputTokensBody


@answer_object
class InputTokens(TypedDict):
    """The number of tokens of a conversation."""

    object: Literal["response.input_tokens"]
    """Always `response.input_tokens`."""
    input_tokens: int
    """Number of tokens of the prompt that POST /v1/responses would make of the conversation."""


async def count_input_tokens(api: Api, body: InputTokensBody, account: Account) -> InputTokens:
    """Counts the tokens of the prompt that a conversation becomes. The conversation may be longer
    than the model's context."""
    with body.in_own_words():
        service = api.models.select(body.model or "", account).service
        n_tokens = await service.tokens.count(
            body.to_conversation(), account, model=body.model or ""
        )
    return {"object": "response.input_tokens", "input_tokens": n_tokens}
