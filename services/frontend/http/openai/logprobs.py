"""Log-probabilities in the forms of OpenAI's API. The log-probabilities of a prompt have vLLM's
form.

A token is shown as the text that `TokenTexts` gives, unless the client asks for the numbers of
tokens. The alternatives of a completion are an object keyed by text. If two alternatives have equal
texts, the object has only the more likely one.
"""

from collections.abc import Sequence

from services.frontend.http.openai.answer import (
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
)
from services.frontend.http.protocol.token_logprobs import TokenNames
from services.frontend.request.logprobs import Logprobs
from services.frontend.text.token_texts import TokenTexts


class CompletionColumns:
    """Gathers the object `logprobs` of a completion: lists with one item for each token. With
    `echo` the tokens of the prompt come first."""

    def __init__(self, texts: TokenNames, n_top: int) -> None:
        self._texts = texts
        self._n_top = n_top
        self._tokens: list[str] = []
        self._values: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add_unknown(self, token_id: int) -> None:
        """Adds the first token of a prompt. It has no log-probability, because no token comes
        before it."""
        self._tokens.append(self._texts.text(token_id))
        self._values.append(None)
        self._tops.append(None)

    def add(self, token_ids: Sequence[int], logprobs: Logprobs) -> None:
        """Adds tokens with their log-probabilities and alternatives."""
        for place, token_id in enumerate(token_ids):
            text, value = self._texts.text(token_id), logprobs.values[place]
            top: dict[str, float] = {}
            for other, other_value in logprobs.alternatives(place, self._n_top):
                top.setdefault(self._texts.text(other), other_value)
            top.setdefault(text, value)
            self._tokens.append(text)
            self._values.append(value)
            self._tops.append(top)

    def add_offsets(self, offsets: Sequence[int], *, start: int) -> None:
        """Adds the positions, in characters, at which tokens begin in the text. Each of `offsets`
        is relative to the position `start` in the text."""
        self._offsets += [start + offset for offset in offsets]

    def to_answer(self) -> CompletionLogprobs:
        """Returns the object `logprobs`."""
        return {
            "text_offset": self._offsets,
            "token_logprobs": self._values,
            "tokens": self._tokens,
            "top_logprobs": self._tops,
        }


def prompt_logprobs(
    texts: TokenTexts, token_ids: Sequence[int], logprobs: Logprobs | None, *, n_top: int
) -> PromptLogprobs:
    """Returns the list `prompt_logprobs` in vLLM's form: null for the first token of the prompt,
    and for each other token an object keyed by token id. The object has the token itself and the
    `n_top` most likely tokens at its position. If `logprobs` is None, the list has only the null
    for the first token."""
    listed: PromptLogprobs = [None]
    for place, token_id in enumerate(token_ids[1:]):
        if logprobs is None:
            break
        found = {
            str(token_id): _ranked(texts, token_id, logprobs.values[place], logprobs.ranks[place])
        }
        for rank, (other, value) in enumerate(logprobs.alternatives(place, n_top), start=1):
            found.setdefault(str(other), _ranked(texts, other, value, rank))
        listed.append(found)
    return listed


def _ranked(texts: TokenTexts, token_id: int, logprob: float, rank: int) -> PromptLogprob:
    return {"logprob": logprob, "rank": rank, "decoded_token": texts.text(token_id)}
