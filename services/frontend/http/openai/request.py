"""The bodies of the OpenAI API, and the requests that they stand for.

The fields that choose tokens are those of `SamplingParams`, each with null for its default. Types
are checked here, ranges where all requests are checked. Fields that are known and not served yet
are accepted with the value that changes nothing. Extensions are spelled as other servers of the
field spell them.
"""

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Container
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    create_model,
    model_validator,
)
from typing_extensions import TypeAliasType

from services.common import errors
from services.common.sampling import MAX_BIASES, SamplingParams
from services.frontend.http.bodies.accepted_values import only
from services.frontend.http.bodies.type_errors import MAX_NAME_LENGTH
from services.frontend.http.openai.chat_message import Message
from services.frontend.http.openai.chat_tools import ToolFields
from services.frontend.http.openai.effectless_fields import EffectlessFields
from services.frontend.http.openai.event_id import HEADER, StreamPosition
from services.frontend.http.openai.output_format_fields import OutputFormatFields
from services.frontend.http.protocol.reasoning_effort import template_kwargs
from services.frontend.request.conversation import MAX_TURNS, Conversation
from services.frontend.request.generation_request import (
    MAX_ANSWERS,
    GenerationOptions,
    GenerationRequest,
    Prompt,
)
from services.frontend.request.resumption import TOKENS_FIELD, AnswerSoFar, Resumption

OPTIONS = {field.name for field in dataclasses.fields(GenerationOptions)} - {
    "max_tokens_field",
    "default_max_tokens",
    "lowers_max_tokens",
    "format_field",
    "sampling",
    "defaulted",
    "best_of",
    "echo",
    "n_logprobs",
    "n_prompt_logprobs",
    "logprobs_field",
}
"""The options of a request that a body has a field for, but for those of `SamplingParams`."""

TOKEN_NAME = "^(0|[1-9][0-9]{0,8})$"
"""Names in `logit_bias`: numbers of tokens."""


def _prompts_of(value: object) -> tuple[Prompt, ...]:
    """Returns the prompts in a text, a list of texts, a list of tokens, or a list of such lists."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list):
        if value and _are_tokens(value):
            return (tuple(value),)
        if len(value) > MAX_ANSWERS:
            raise ValueError(f"has {len(value)} prompts; at most {MAX_ANSWERS} may be")
        if all(isinstance(item, str) for item in value):
            return tuple(value)
        if all(isinstance(item, list) and _are_tokens(item) for item in value):
            return tuple(tuple(item) for item in value)
    raise ValueError("must be a text, a list of texts, a list of tokens or a list of such lists")


def _as_list(value: object) -> object:
    if not isinstance(value, str | list | None):
        raise ValueError("must be a text or a list of texts")
    return [value] if isinstance(value, str) else value


def _are_tokens(items: list[Any]) -> bool:
    return set(map(type, items)) <= {int}  # a bool is not a token; a million take some time


StopTexts = TypeAliasType("StopTexts", Annotated[list[str], FailFast()])

TokenIds = TypeAliasType("TokenIds", Annotated[list[int], FailFast()])


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[bool | None, only(False)] = None


def _biases_of(value: object) -> tuple[tuple[int, float], ...]:
    """Returns pairs for an object whose names are tokens."""
    if not isinstance(value, dict):
        raise ValueError("must be an object of tokens and numbers")
    if len(value) > MAX_BIASES:
        raise ValueError(f"has {len(value)} tokens, {MAX_BIASES} at most")
    for name, bias in value.items():
        if re.fullmatch(TOKEN_NAME, name) is None:
            raise ValueError(f"{name[:MAX_NAME_LENGTH]!r} is not a token's number")
        if type(bias) not in (int, float):
            raise ValueError(f"the bias of {name} must be a number")
    return tuple((int(name), bias) for name, bias in value.items())


_BODY_TYPES: dict[Any, Any] = {
    float: float,
    int: int,
    tuple[int, ...]: TokenIds,
    tuple[tuple[int, float], ...]: Annotated[
        tuple[tuple[int, float], ...], PlainValidator(_biases_of)
    ],
}

SAMPLING: dict[str, Any] = {
    field.name: (_BODY_TYPES[field.type] | None, None)
    for field in dataclasses.fields(SamplingParams)
    if field.name != "grammar"
}
"""Type and default of the body's field for each option of `SamplingParams`, but for the grammar,
which clients spell in several ways."""

if TYPE_CHECKING:
    SamplingBody = BaseModel
else:
    SamplingBody = create_model("SamplingBody", **SAMPLING)


class ResumptionBody(BaseModel):
    """The field `resumption`: seed and tokens of a stream that broke, as its client has them.

    The id of its last event comes in a header. Answers without tokens may be left out at the end.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    seed: int
    token_ids: Annotated[list[TokenIds], FailFast(), Field(max_length=MAX_ANSWERS)]

    def to_resumption(self, position: StreamPosition) -> Resumption:
        """Returns the resumption at a position in the stream.

        Raises:
            InvalidRequest: the tokens are not those up to there.
        """
        if len(self.token_ids) > len(position.answers):
            raise errors.InvalidRequest(
                TOKENS_FIELD,
                f"is of {len(self.token_ids)} answers, {HEADER} of {len(position.answers)}",
            )
        answers = []
        for index, at in enumerate(position.answers):
            token_ids = self.token_ids[index] if index < len(self.token_ids) else []
            if len(token_ids) != at.n_tokens:
                raise errors.InvalidRequest(
                    TOKENS_FIELD,
                    f"has {len(token_ids)} tokens of answer {index}, {HEADER} counts {at.n_tokens}",
                )
            answers.append(AnswerSoFar(tuple(token_ids), at.is_finished))
        return Resumption(request_id=position.request_id, seed=self.seed, answers=tuple(answers))


class GenerationBody(OutputFormatFields, EffectlessFields, SamplingBody, ABC):
    """The fields that both kinds of generation have."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    max_tokens: int | None = None
    stop: Annotated[StopTexts | None, BeforeValidator(_as_list)] = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    resumption: ResumptionBody | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    cache_prompt: bool | None = None

    truncate_prompt_tokens: Annotated[int | None, only()] = None
    bad_words: Annotated[list[Any] | None, only([])] = None
    use_beam_search: Annotated[bool | None, only(False)] = None
    length_penalty: Annotated[float | None, only(1)] = None

    @property
    @abstractmethod
    def prompts(self) -> tuple[Prompt, ...]:
        """The texts, tokens or conversations to continue."""

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def counts_usage(self) -> bool:
        """Whether each chunk of a stream has the usage so far, which goes with that at the end."""
        options = self.stream_options
        return self.includes_usage and bool(options and options.continuous_usage_stats)

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise errors.InvalidRequest("stream_options", "only with stream = true")
        return self

    @model_validator(mode="after")
    def _whole_answers_have_prompt_logprobs(self) -> Self:
        if self.prompt_logprobs is not None and self.stream:
            raise errors.InvalidRequest("prompt_logprobs", "not with stream = true")
        return self

    def check_resumption(self, position: StreamPosition | None) -> None:
        """Raises InvalidRequest unless a stream is resumed, with all that it takes, or none is."""
        if position is None and self.resumption is None:
            return
        if not self.stream:
            raise errors.InvalidRequest("resumption", "only with stream = true")
        if position is None:
            raise errors.InvalidRequest(HEADER, "must be given with resumption")
        if self.resumption is None:
            raise errors.InvalidRequest("resumption", f"must be given with {HEADER}")

    def to_request(self, position: StreamPosition | None = None) -> GenerationRequest:
        """Returns the request in the words that both protocols share.

        Raises:
            InvalidRequest: the resumption contradicts the position or the request.
        """
        self.check_resumption(position)
        options = GenerationOptions(**self._options())
        request = GenerationRequest(prompts=self.prompts, options=options, model=self.model or "")
        if position is None or self.resumption is None:
            return request
        return request.resumed(
            self.resumption.to_resumption(position),
            own_seed=_given(self, SAMPLING).get("seed"),
        )

    def _options(self) -> dict[str, Any]:
        """Returns the arguments of `GenerationOptions`."""
        field, grammar = self.output_format() or ("response_format", "")
        given = _given(self, SAMPLING)
        return {
            **_given(self, OPTIONS),
            "sampling": SamplingParams(**given, grammar=grammar),
            "defaulted": SAMPLING.keys() - given.keys(),
            "format_field": field,
            "n_prompt_logprobs": self.prompt_logprobs,
        }


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions."""

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(_prompts_of)]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: Annotated[str | None, only("")] = None

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


class ChatBody(ToolFields, GenerationBody):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], FailFast(), Field(max_length=MAX_TURNS)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    functions: Annotated[list[Any] | None, only([])] = None
    function_call: Annotated[str | dict[str, Any] | None, only("none", "auto")] = None
    modalities: Annotated[list[str] | None, only(["text"])] = None
    audio: Annotated[dict[str, Any] | None, only()] = None
    prediction: Annotated[dict[str, Any] | None, only()] = None
    echo: Annotated[bool | None, only(False)] = None
    web_search_options: Annotated[dict[str, Any] | None, only()] = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise errors.InvalidRequest("max_tokens", "must be equal to max_completion_tokens")
        return self

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise errors.InvalidRequest("top_logprobs", "only with logprobs = true")
        return self

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        tools, tool_choice = self.tools_and_choice()
        continues_last = bool(self.continue_final_message)
        adds_prompt = self.add_generation_prompt
        return (
            Conversation(
                tuple(message.to_message() for message in self.messages),
                tools=tools,
                tool_choice=tool_choice,
                template_kwargs=template_kwargs(self.reasoning_effort)
                | (self.chat_template_kwargs or {}),
                adds_generation_prompt=not continues_last if adds_prompt is None else adds_prompt,
                continues_last=continues_last,
            ),
        )

    def _options(self) -> dict[str, Any]:
        options = super()._options()
        if self.logprobs:
            options |= {"n_logprobs": self.top_logprobs or 0, "logprobs_field": "top_logprobs"}
        if self.max_completion_tokens is not None:
            options |= {
                "max_tokens": self.max_completion_tokens,
                "max_tokens_field": "max_completion_tokens",
            }
        return options


def _given(body: GenerationBody, names: Container[str]) -> dict[str, Any]:
    """Returns the fields among `names` that the client gave, lists as tuples."""
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name in body.model_fields_set
        if name in names and (value := getattr(body, name)) is not None
    }
