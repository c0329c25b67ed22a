"""The answers of POST /v1/completions."""

from collections.abc import Sequence
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from services.frontend.http.openai.answer import PromptLogprobs, Usage
from services.frontend.http.protocol.answer_object import answer_object
from services.frontend.request.finish_reason import FinishReason


@answer_object
class CompletionLogprobs(TypedDict):
    """Log-probabilities of tokens: the prompt's with `echo`, then the answer's. Each object of
    alternatives has the token itself, too. The first token of a prompt has null as its
    log-probability and as its alternatives."""

    text_offset: list[int]
    """Where in the text each token begins, in characters."""
    token_logprobs: list[float | None]
    """Log-probability of each token; null for the first token of a prompt."""
    tokens: list[str]
    """Text of each token."""
    top_logprobs: list[dict[str, float] | None]
    """Log-probabilities of the most likely tokens and of the token itself, by their texts; null for
    the first token of a prompt."""


@answer_object
class CompletionChoice(TypedDict):
    """An answer to a text or to tokens, or a piece of one. The tokens of the answer come with
    `return_token_ids`; the tokens of the prompt come in the first piece only."""

    index: int
    """Which of the answers: `n` to the first prompt come first."""
    text: str
    """Text, without what ended it; with `echo` it begins with the prompt."""
    logprobs: CompletionLogprobs | None
    """Log-probabilities, with `logprobs`; else null."""
    finish_reason: FinishReason | None
    """`stop` or `length`; null while it goes on."""
    token_ids: NotRequired[Sequence[int]]
    """Tokens; with `return_token_ids`."""
    prompt_token_ids: NotRequired[Sequence[int]]
    """Tokens of the prompt; with `return_token_ids`, in an answer's first chunk."""
    prompt_logprobs: NotRequired[PromptLogprobs]
    """Log-probabilities of the prompt's tokens, with `prompt_logprobs`: for each token an object
    with a `PromptLogprob` by the number of each token shown, and null for the first."""


@answer_object
class Completion(TypedDict):
    """The answers to POST /v1/completions, or a chunk of a stream. The first chunk has the seed.
    With `include_usage` the last chunk has the usage and no choice."""

    id: str
    """`cmpl-` and the request's name."""
    object: Literal["text_completion"]
    """`text_completion`."""
    created: int
    """When the request came, in seconds since 1970."""
    model: str
    """Name of the model."""
    choices: list[CompletionChoice]
    """The answers, or pieces of them."""
    usage: NotRequired[Usage | None]
    """Tokens read and written."""
    seed: NotRequired[int]
    """Seed, given or drawn; in a stream's first chunk."""
