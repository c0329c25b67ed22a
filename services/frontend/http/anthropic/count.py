"""Handler of POST /v1/messages/count_tokens."""

from typing_extensions import TypedDict

from services.frontend.api_keys import Account
from services.frontend.http.anthropic.request import CountBody
from services.frontend.http.protocol.answer_object import answer_object
from services.frontend.http.protocol.api import Api


@answer_object
class TokenCount(TypedDict):
    """The number of tokens of a conversation."""

    input_tokens: int
    """Number of tokens of the prompt that POST /v1/messages would make of the conversation."""


async def count_tokens(api: Api, body: CountBody, account: Account) -> TokenCount:
    """Counts the tokens of the prompt that a conversation becomes. The conversation may be longer
    than the model's context."""
    with body.in_own_words():
        service = api.models.select(body.model or "", account).service
        n_tokens = await service.tokens.count(
            body.to_conversation(), account, model=body.model or ""
        )
    return {"input_tokens": n_tokens}
