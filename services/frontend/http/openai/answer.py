"""The parts that answers of completions and of chats have in common."""

from typing import Any

from typing_extensions import TypedDict

from services.frontend.http.protocol.answer_object import answer_object


@answer_object
class PromptTokensDetails(TypedDict):
    """Tokens of the prompts by where they came from."""

    cached_tokens: int


@answer_object
class Usage(TypedDict):
    """Tokens read and written."""

    prompt_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens: int
    total_tokens: int


@answer_object
class PromptLogprob(TypedDict):
    """The log-probability of a token in a prompt, and its place in the vocabulary by it."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""The tokens of a prompt as vLLM shows them, by their numbers; null for the first."""


class Envelope(TypedDict):
    """The fields with which each answer and each chunk begins."""

    id: str
    object: Any
    created: int
    model: str
