"""POST /v1/messages/count_tokens."""

from typing_extensions import TypedDict

from services.frontend.api_keys import Account
from services.frontend.http.anthropic.request import CountBody
from services.frontend.http.protocol.answer_object import answer_object
from services.frontend.http.protocol.api import Api


@answer_object
class TokenCount(TypedDict):
    """The number of tokens that a conversation would start with."""

    input_tokens: int
    """Tokens of the conversation, as POST /v1/messages would read them."""


async def count_tokens(api: Api, body: CountBody, account: Account) -> TokenCount:
    """Returns the number of tokens that a conversation would start with."""
    with body.in_own_words():
        token_ids = await api.service.tokenize(
            body.to_conversation(), account, model=body.model or ""
        )
    return {"input_tokens": len(token_ids)}
