"""The parts that answers of completions and of chats have in common."""

from typing import Any

from typing_extensions import TypedDict

from services.frontend.http.protocol.answer_object import answer_object


@answer_object
class PromptTokensDetails(TypedDict):
    """Tokens of the prompts by where they came from."""

    cached_tokens: int
    """Tokens of the prompts that were not computed, since a cache had them."""


@answer_object
class Usage(TypedDict):
    """Tokens read and written."""

    prompt_tokens: int
    """Tokens of all prompts."""
    prompt_tokens_details: PromptTokensDetails
    """Some of them by where they came from."""
    completion_tokens: int
    """Tokens generated, over all answers."""
    total_tokens: int
    """Both together."""


@answer_object
class PromptLogprob(TypedDict):
    """The log-probability of a token in a prompt, and the rank of the token in the vocabulary."""

    logprob: float
    """Log-probability of the token."""
    rank: int
    """Rank of the token in the vocabulary by log-probability, from 1."""
    decoded_token: str
    """Text of the token."""


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""The tokens of a prompt as vLLM shows them, by their numbers; null for the first."""


class Envelope(TypedDict):
    """The fields with which each answer and each chunk begins."""

    id: str
    object: Any
    created: int
    model: str
