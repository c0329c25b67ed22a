"""The body of POST /v1/completions."""

from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import PlainValidator, model_validator

from services.common import errors
from services.frontend.generation.generation import Generation
from services.frontend.http.bodies.accepted_values import only
from services.frontend.http.bodies.ranges import (
    N_ANSWERS,
    N_LOGPROBS,
    NOT_EMPTY,
    Within,
    between,
)
from services.frontend.http.openai.completion_reply import CompletionReply
from services.frontend.http.openai.request import GenerationBody, TokenIds
from services.frontend.request.generation_request import MAX_ANSWERS, MAX_TOKENS_OF_TEXT, Prompt

_SEVERAL = Within({"minItems": 1, "maxItems": MAX_ANSWERS})
_Tokens = Annotated[TokenIds, NOT_EMPTY]
PromptOrPrompts = (
    str | Annotated[list[str], _SEVERAL] | _Tokens | Annotated[list[_Tokens], _SEVERAL]
)


def prompts_of(value: object) -> tuple[Prompt, ...]:
    """Returns the prompts in a value, which is a text, a list of texts, a list of tokens or a list
    of lists of tokens. Raises ValueError if the value is none of these, or if there are too many
    prompts."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list):
        if value and _are_tokens(value):
            return (_tokens_of(value),)
        if len(value) > MAX_ANSWERS:
            raise ValueError(f"has {len(value)} prompts; at most {MAX_ANSWERS} may be")
        if all(isinstance(item, str) for item in value):
            return tuple(value)
        if all(isinstance(item, list) and _are_tokens(item) for item in value):
            return tuple(_tokens_of(item) for item in value)
        _refuse_odd_one(value)
    raise ValueError("must be a text, a list of texts, a list of tokens or a list of such lists")


class OddPrompt(ValueError):
    """Error: one of several prompts is of another kind (text or tokens) than the first prompt."""

    def __init__(self, index: int, rule: str) -> None:
        super().__init__(f"item {index} {rule}")
        self.index = index
        self.rule = rule


def _refuse_odd_one(items: list[Any]) -> None:
    """Raises OddPrompt if the first item is a text or a list of tokens, but a later item is of
    another kind. The message gives the index of this later item."""
    if not items:
        return
    is_text = isinstance(items[0], str)
    if not is_text and not (isinstance(items[0], list) and _are_tokens(items[0])):
        return
    for index, item in enumerate(items):
        is_tokens = isinstance(item, list) and _are_tokens(item)
        if not (isinstance(item, str) if is_text else is_tokens):
            kind = "a text" if is_text else "a list of tokens"
            raise OddPrompt(index, f"must be {kind}, as the first one")


def _are_tokens(items: list[Any]) -> bool:
    """Returns whether all items are whole numbers. A float with a fraction of zero, such as 3.0, is
    a whole number; true and false are not."""
    kinds = set(map(type, items))  # fast for a million items
    if kinds <= {int}:  # excludes bool
        return True
    return kinds <= {int, float} and all(float(item).is_integer() for item in items)


def _tokens_of(items: list[Any]) -> tuple[int, ...]:
    return tuple(map(int, items)) if float in map(type, items) else tuple(items)


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions."""

    prompt: Annotated[
        tuple[Prompt, ...], PlainValidator(prompts_of, json_schema_input_type=PromptOrPrompts)
    ]
    """The prompt or prompts to continue. Each prompt gets `n` answers."""
    max_tokens: Annotated[int | None, between(MAX_TOKENS_OF_TEXT)] = None
    """Largest number of tokens to generate, 16 by default. If the prompt leaves less room in the
    model's context, the number is lowered to that room."""
    echo: bool | None = None
    """Whether to begin each answer with the prompt."""
    logprobs: Annotated[int | None, N_LOGPROBS] = None
    """Number of the most likely tokens to show at each position. The answer then also has the
    log-probability of each token. With `echo`, the tokens of the prompt are included. The tokens of
    a stop text that is cut off have no log-probabilities, unless `return_token_ids` is true."""
    best_of: Annotated[int | None, N_ANSWERS] = None
    """Number of answers to generate for each prompt, at least `n`. The reply has only the best `n`
    of the answers, best first. With `stream`, a number larger than `n` is refused."""
    suffix: Annotated[str | None, only("")] = None
    """Not supported: must be empty or null."""

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return self.prompt

    @model_validator(mode="after")
    def _whole_answers_are_compared(self) -> Self:
        if self.stream and self.best_of is not None and self.best_of > (self.n or 1):
            raise errors.InvalidRequest("best_of", "not with stream = true")
        return self

    def _options(self) -> dict[str, Any]:
        n_prompt_logprobs = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            n_prompt_logprobs = max(self.logprobs, self.prompt_logprobs or 0)
        return super()._options() | {
            "best_of": self.best_of,
            "echo": bool(self.echo),
            "n_logprobs": self.logprobs,
            "n_prompt_logprobs": n_prompt_logprobs,
        }

    def reply(self, generation: Generation) -> CompletionReply:
        options = replace(self._reply_options, echo=bool(self.echo))
        return CompletionReply(generation, options)
