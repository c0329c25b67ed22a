"""Numbers of tokens in replies to requests that have prompts and no answers."""

from typing_extensions import TypedDict

from services.frontend.generation.generation import Generation
from services.frontend.http.protocol.answer_object import answer_object


@answer_object
class PromptUsage(TypedDict):
    """Numbers of tokens of a request without answers."""

    prompt_tokens: int
    """Number of tokens of all prompts."""
    total_tokens: int
    """Equal to `prompt_tokens`, because there are no answers."""


def usage_of(generation: Generation) -> PromptUsage:
    """Returns the numbers of tokens of a generation without answers."""
    n_tokens = generation.usage.prompt_tokens
    return {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
