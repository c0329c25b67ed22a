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
    alternatives has the token itself, too; the first token of a prompt has null for both."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


@answer_object
class CompletionChoice(TypedDict):
    """An answer to a text or to tokens, or a piece of one; the tokens come with
    `return_token_ids`, those of the prompt in the first piece only."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[Sequence[int]]
    prompt_token_ids: NotRequired[Sequence[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


@answer_object
class Completion(TypedDict):
    """The answers to POST /v1/completions; or a chunk of a stream: its first one has the seed,
    and with `include_usage` the last one has the usage and no choice."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
    seed: NotRequired[int]
