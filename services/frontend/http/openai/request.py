"""The common part of the bodies of completions and of chats, and the requests made from the bodies.

The body has a field for each option of `SamplingParams`, and null means the default. Types are
checked here. Ranges are checked by `GenerationRequest`, for all protocols. A field that the server
knows but does not support is accepted only with a value that has no effect. Extensions of OpenAI's
API are spelled as in other servers.
"""

import dataclasses
import re
from abc import abstractmethod
from collections.abc import Container
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import (
    BaseModel,
    FailFast,
    Field,
    PlainValidator,
    PrivateAttr,
    create_model,
    model_validator,
)
from typing_extensions import TypeAliasType

from services.common import errors
from services.common.sampling import MAX_BIASES, SamplingParams
from services.frontend.http.bodies.accepted_values import only
from services.frontend.http.bodies.object_kinds import ExactModel
from services.frontend.http.bodies.ranges import (
    N_ANSWERS,
    N_LOGPROBS,
    N_TOKENS,
    TOKEN_NAME,
    Within,
    option,
)
from services.frontend.http.bodies.stop_texts import BadWords, StopTextOrTexts
from services.frontend.http.bodies.type_errors import MAX_NAME_LENGTH
from services.frontend.http.openai.effectless_fields import EffectlessFields
from services.frontend.http.openai.errors import error_event
from services.frontend.http.openai.event_id import StreamPosition
from services.frontend.http.openai.output_format_fields import OutputFormatFields
from services.frontend.http.openai.reply import ReplyOptions
from services.frontend.http.protocol.body import RequestBody
from services.frontend.http.transport.event_stream import LAST_EVENT_ID, Event
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
    "format_field",
    "format_schema",
    "sampling",
    "defaulted",
    "best_of",
    "echo",
    "n_logprobs",
    "n_prompt_logprobs",
    "logprobs_field",
    "wants_score",
    "wants_vector",
}
"""Names of the options of `GenerationOptions` for which the body has a field of an equal name.
Sampling options are not among them."""


TokenIds = TypeAliasType(
    "TokenIds", Annotated[list[Annotated[int, Within({"minimum": 0})]], FailFast()]
)


class StreamOptions(ExactModel):
    """Options of a stream."""

    include_usage: bool | None = None
    """Whether to end the stream with a chunk that has the usage."""
    continuous_usage_stats: bool | None = None
    """Whether to add the usage so far to every chunk; only with `include_usage`."""
    include_obfuscation: Annotated[bool | None, only(False)] = None
    """Not supported: must be false or null."""


def _biases_of(value: object) -> tuple[tuple[int, float], ...]:
    """Returns pairs of a token id and its bias. Raises ValueError if `value` is not an object whose
    keys are token ids and whose values are numbers, or if the object has too many items."""
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
    field.name: (Annotated[_BODY_TYPES[field.type] | None, option(field.name)], None)
    for field in dataclasses.fields(SamplingParams)
    if field.name not in ("grammar", "bad_words")
}
"""Type and default of the body's field for each option of `SamplingParams`. The grammar is left
out, because clients spell it in several ways. `bad_words` is left out, because clients write texts
instead of tokens."""

if TYPE_CHECKING:
    SamplingBody = BaseModel
else:
    SamplingBody = create_model("SamplingBody", **SAMPLING)


class ResumptionBody(ExactModel):
    """The field `resumption`: the seed of a broken stream and the tokens that the client has
    received.

    The id of the last event comes in the header `Last-Event-ID`.
    """

    seed: Annotated[int, option("seed")]
    """Seed of the request, from the first chunk of the stream."""
    token_ids: Annotated[list[TokenIds], FailFast(), Field(max_length=MAX_ANSWERS)]
    """For each answer, the ids of the tokens that the client has received. Answers at the end of
    the list may be left out if the client has received no tokens of them."""

    def to_resumption(self, position: StreamPosition) -> Resumption:
        """Returns the description of what the client has received of the stream, for continuing the
        stream at `position`.

        Raises:
            InvalidRequest: there are tokens of more answers than `position` has, or the number of
            an answer's tokens differs from the number in `position`.
        """
        if len(self.token_ids) > len(position.answers):
            raise errors.InvalidRequest(
                TOKENS_FIELD,
                f"is of {len(self.token_ids)} answers, {LAST_EVENT_ID} of {len(position.answers)}",
            )
        answers = []
        for index, at in enumerate(position.answers):
            token_ids = self.token_ids[index] if index < len(self.token_ids) else []
            if len(token_ids) != at.n_tokens:
                raise errors.InvalidRequest(
                    TOKENS_FIELD,
                    f"has {len(token_ids)} tokens of answer {index}, "
                    f"{LAST_EVENT_ID} counts {at.n_tokens}",
                )
            answers.append(AnswerSoFar(tuple(token_ids), at.is_finished))
        return Resumption(request_id=position.request_id, seed=self.seed, answers=tuple(answers))


class GenerationBody(RequestBody, OutputFormatFields, EffectlessFields, SamplingBody):
    """Fields that completions and chats share."""

    model: str | None = None
    """Name of the model; may be left out if the caller may use only one."""
    max_tokens: Annotated[int | None, N_TOKENS] = None
    """Largest number of tokens to generate. If the prompt leaves less room in the model's context,
    the number is lowered to that room. The room, limited by the checkpoint's `max_new_tokens`, is
    also the default."""
    stop: StopTextOrTexts = None
    """Texts that end the output. The output does not include the stop text, unless
    `include_stop_str_in_output` is true."""
    ignore_eos: bool | None = None
    """Whether to continue the output after the model's end-of-sequence tokens."""
    return_token_ids: bool | None = None
    """Whether to add the ids of tokens to the answer, and the ids of events to a stream."""
    n: Annotated[int | None, N_ANSWERS] = None
    """Number of answers to each prompt; 1024 at most over all prompts."""
    stream_options: StreamOptions | None = None
    """Options of a stream; only with `stream`."""
    resumption: ResumptionBody | None = None
    """Seed and tokens of a broken stream that is to be resumed; only with the header
    `Last-Event-ID`. All other fields must have the values of the first request."""
    bad_words: BadWords | None = None
    """Texts that are never generated, with or without a space in front, as in vLLM. Only the last
    token of a text is banned, at the positions where this token would complete the text. Tokens of
    the prompt do not count. All texts together may have at most 16384 characters."""
    return_tokens_as_token_ids: bool | None = None
    """Whether `logprobs` names a token by its number, such as `token_id:17`, so that tokens with
    equal texts are told apart. `bytes` still has the bytes of the text."""
    add_special_tokens: bool | None = None
    """Whether to add the special tokens that the checkpoint puts around texts. The default is true
    for texts. The default is false for conversations, because the chat template writes the special
    tokens."""
    skip_special_tokens: bool | None = None
    """Whether to leave special tokens out of the output's text."""
    include_stop_str_in_output: bool | None = None
    """Whether to include the stop text or the stop token in the output."""
    prompt_logprobs: Annotated[int | None, N_LOGPROBS] = None
    """Number of the most likely tokens to show at each position of the prompt. The answer then also
    has the log-probability of each token of the prompt but the first. Not supported with
    `stream`."""

    truncate_prompt_tokens: Annotated[int | None, only()] = None
    """Not supported: must be null."""
    use_beam_search: Annotated[bool | None, only(False)] = None
    """Not supported: must be false or null."""
    length_penalty: Annotated[float | None, only(1)] = None
    """An option of beam search. Not supported: must be 1 or null."""

    _position: StreamPosition | None = PrivateAttr(None)

    @property
    @abstractmethod
    def prompts(self) -> tuple[Prompt, ...]:
        """The texts, tokens or conversations to continue."""

    @property
    def _reply_options(self) -> ReplyOptions:
        options = self.stream_options or StreamOptions()
        includes_usage = bool(options.include_usage)
        return ReplyOptions(
            position=self._position,
            includes_usage=includes_usage,
            counts_usage=includes_usage and bool(options.continuous_usage_stats),
            n_prompt_logprobs=self.prompt_logprobs,
            shows_token_ids=bool(self.return_tokens_as_token_ids),
        )

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

    def resume_at(self, last_event_id: str | None) -> None:
        position = None if last_event_id is None else StreamPosition.parse(last_event_id)
        self._check_resumption(position)
        self._position = position

    def _check_resumption(self, position: StreamPosition | None) -> None:
        """Raises InvalidRequest if the request has only one of `resumption` and the header
        `Last-Event-ID`, or has them without `stream`. `position` is the parsed header, or None if
        the request does not have the header."""
        if position is None and self.resumption is None:
            return
        if not self.stream:
            raise errors.InvalidRequest("resumption", "only with stream = true")
        if position is None:
            raise errors.InvalidRequest(LAST_EVENT_ID, "must be given with resumption")
        if self.resumption is None:
            raise errors.InvalidRequest("resumption", f"must be given with {LAST_EVENT_ID}")

    def to_request(self) -> GenerationRequest:
        options = GenerationOptions(**self._options())
        request = GenerationRequest(prompts=self.prompts, options=options, model=self.model or "")
        if self._position is None or self.resumption is None:
            return request
        return request.resumed(
            self.resumption.to_resumption(self._position),
            own_seed=_given(self, SAMPLING).get("seed"),
        )

    @staticmethod
    def explain(error: errors.OrcinusError) -> Event:
        return error_event(error)

    def _options(self) -> dict[str, Any]:
        """Returns the keyword arguments for `GenerationOptions`."""
        asked = self.output_format()
        given = _given(self, SAMPLING)
        return {
            **_given(self, OPTIONS),
            "sampling": SamplingParams(**given, grammar=asked.grammar),
            "defaulted": SAMPLING.keys() - given.keys(),
            "format_field": asked.field,
            "format_schema": asked.schema,
            "n_prompt_logprobs": self.prompt_logprobs,
        }


def _given(body: GenerationBody, names: Container[str]) -> dict[str, Any]:
    """Returns the values of the fields among `names` that the client has set, keyed by name. Fields
    with null are left out, and lists become tuples."""
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name in body.model_fields_set
        if name in names and (value := getattr(body, name)) is not None
    }
