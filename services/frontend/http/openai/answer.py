"""The answers of the OpenAI API that are not of one kind of generation, for the OpenAPI document.

They are the parts that both kinds share, models, errors, and the answers of the server's own paths.
"""

from typing import Literal, NotRequired

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


@answer_object
class Model(TypedDict):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


@answer_object
class ModelList(TypedDict):
    """The model that is served, by each of its names."""

    object: Literal["list"]
    data: list[Model]


@answer_object
class Tokens(TypedDict):
    """The tokens of a prompt; `token_strs` are they as the vocabulary has them, if wanted."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


@answer_object
class Text(TypedDict):
    """The text of tokens, with special ones."""

    prompt: str


@answer_object
class Version(TypedDict):
    """The version of the server."""

    version: str


@answer_object
class ErrorObject(TypedDict):
    """An error: `param` is the field that is wrong, if it is one."""

    message: str
    type: str
    param: str | None
    code: str | None


@answer_object
class Error(TypedDict):
    """The body of every answer that refuses a request, and the last event of a stream that
    fails."""

    error: ErrorObject


@answer_object
class Status(TypedDict):
    """The answer to a probe."""

    status: str
    reason: NotRequired[str]
