"""Log-probabilities of the tokens of an answer, in the form that OpenAI's protocols for
conversations share.

A token is shown as the text that `TokenTexts` gives, or as its number.
"""

from collections.abc import Sequence
from typing import Protocol

from typing_extensions import TypedDict

from services.frontend.http.protocol.answer_object import answer_object
from services.frontend.request.logprobs import Logprobs
from services.frontend.text.token_texts import TokenTexts


class TokenNames(Protocol):
    """The way in which tokens are shown to a client: `TokenTexts` shows texts, `TokenNumbers` shows
    numbers."""

    def text(self, token_id: int, /) -> str:
        """Returns the text by which a client sees the token."""

    def to_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of the token's text."""


class TokenNumbers:
    """Shows tokens as their numbers, such as `token_id:17`, so that tokens with equal texts can be
    told apart."""

    def __init__(self, texts: TokenTexts) -> None:
        self.to_bytes = texts.to_bytes

    def text(self, token_id: int, /) -> str:
        """Returns the number of a token in the form `token_id:17`."""
        return f"token_id:{token_id}"


@answer_object
class TokenLogprob(TypedDict):
    """A token and the log-probability of the token."""

    token: str
    """Text of the token."""
    logprob: float
    """Log-probability of the token."""
    bytes: list[int]
    """Bytes of the token's text in UTF-8. A token may hold only some of the bytes of a
    character."""


@answer_object
class ChatTokenLogprob(TokenLogprob):
    """A token of an answer, with the most likely tokens at its position."""

    top_logprobs: list[TokenLogprob]
    """The most likely tokens at this position, most likely first."""


def token_logprobs(
    texts: TokenNames, token_ids: Sequence[int], logprobs: Logprobs, *, n_top: int
) -> list[ChatTokenLogprob]:
    """Returns the tokens with their log-probabilities. Each token also has the `n_top` most likely
    tokens at its position."""
    return [
        {
            **_token(texts, token_id, logprobs.values[place]),
            "top_logprobs": [_token(texts, *top) for top in logprobs.alternatives(place, n_top)],
        }
        for place, token_id in enumerate(token_ids)
    ]


def _token(texts: TokenNames, token_id: int, logprob: float) -> TokenLogprob:
    in_bytes = list(texts.to_bytes(token_id))
    return {"token": texts.text(token_id), "logprob": logprob, "bytes": in_bytes}
