"""The gRPC API: `InferenceService`, its health and its reflection.

Errors leave as exceptions of the error tree; `rpc_handlers.py` makes statuses of them. Fields are
named as in the HTTP API (`top_p`, not `options.sampling.top_p`), so that a client sees the same
error in both.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any

import grpc.aio
from google.protobuf.unknown_fields import UnknownFieldSet
from orcinus.v1 import inference_pb2

from services.common import errors, health_servicer, rpc_handlers
from services.common.health import Health
from services.common.sampling import OPTIONS
from services.common.sampling_proto import from_proto
from services.frontend.api_keys import ApiKeys
from services.frontend.generation.answer import Piece
from services.frontend.generation.generation import Generation, Usage
from services.frontend.generation.generation_service import GenerationService
from services.frontend.grpc import reflection
from services.frontend.grpc.logprobs import token_logprobs
from services.frontend.grpc.transfers import Transfers
from services.frontend.request import output_format
from services.frontend.request.conversation import ChatMessage, Conversation
from services.frontend.request.finish_reason import FinishReason
from services.frontend.request.generation_request import (
    GenerationOptions,
    GenerationRequest,
    Prompt,
)
from services.frontend.request.refusals import Refusal, Refusals
from services.frontend.request.resumption import AnswerSoFar, Resumption

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]

Context = grpc.aio.ServicerContext[Any, Any]

_FINISH_REASONS = {
    None: inference_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


class InferenceServicer:
    """The methods of `InferenceService`."""

    def __init__(
        self,
        service: GenerationService,
        *,
        max_body_bytes: int,
        api_keys: ApiKeys,
        refusals: Refusals,
    ) -> None:
        self._service = service
        self._max_body_bytes = max_body_bytes
        self._api_keys = api_keys
        self._refusals = refusals

    async def Generate(
        self, message: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        """Answers when everything is there."""
        account = self._api_keys.account_of(_authorization(context))
        self._service.check_room()
        request = self._to_request(message)
        async with self._service.open(request, account) as generation:
            pieces = await generation.complete()
            return inference_pb2.GenerateResponse(
                request_id=generation.request_id,
                model=generation.model,
                choices=[_to_choice(piece, generation) for piece in pieces],
                usage=_to_usage(generation.usage),
                prompt_token_ids=_prompt_token_ids(generation),
            )

    async def GenerateStream(
        self, message: inference_pb2.GenerateStreamRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateStreamResponse]:
        """Answers piece by piece."""
        account = self._api_keys.account_of(_authorization(context))
        if not message.HasField("resumption"):
            self._service.check_room()
        request = self._to_request(message)
        _refuse_in_stream(request.options)
        if message.HasField("resumption"):
            request = _resumed(request, message)
        async with self._service.open(request, account) as generation:
            first = {} if generation.is_resumed else _first_fields(generation)
            async for piece in generation.pieces():
                yield inference_pb2.GenerateStreamResponse(
                    request_id=generation.request_id,
                    model=generation.model,
                    choice=_to_choice(piece, generation),
                    **first,
                )
                first = {}
            yield inference_pb2.GenerateStreamResponse(
                request_id=generation.request_id,
                model=generation.model,
                usage=_to_usage(generation.usage),
            )

    async def Tokenize(
        self, message: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """Answers with the tokens that a generation would start with."""
        self._check_size(message)
        self._check_n_tokens(message.prompt)
        account = self._api_keys.account_of(_authorization(context))
        token_ids = await self._service.tokenize(_to_prompt(message.prompt), account)
        return inference_pb2.TokenizeResponse(token_ids=token_ids)

    async def DescribeModel(
        self, _: inference_pb2.DescribeModelRequest, context: Context
    ) -> inference_pb2.DescribeModelResponse:
        """Answers with the model and how it is served."""
        pipeline = self._service.describe()
        return inference_pb2.DescribeModelResponse(
            model=self._service.model_names[0],
            max_model_len=pipeline.max_model_len,
            vocab_size=pipeline.vocab_size,
            eos_token_ids=pipeline.eos_token_ids,
            n_stages=pipeline.n_stages,
            tp_size=pipeline.tp_size,
            has_chat_template=self._service.has_chat_template,
        )

    def admit(self, context: Context) -> None:
        """Counts a call against the caller's key, before the call's message is received."""
        self._api_keys.admit(_authorization(context))

    def uploading(self, context: Context) -> AbstractContextManager[object]:
        """Returns a context in which a call that is being received counts as an answer of its
        caller; raises PoolFull if he has too many."""
        return self._api_keys.account_of(_authorization(context)).receiving()

    def _to_request(
        self, message: inference_pb2.GenerateRequest | inference_pb2.GenerateStreamRequest
    ) -> GenerationRequest:
        self._check_size(message)
        self._check_n_tokens(message.prompt)
        return GenerationRequest(
            prompts=(_to_prompt(message.prompt),),
            options=_to_options(message.options),
            model=message.model,
        )

    def _check_n_tokens(self, prompt: inference_pb2.Prompt) -> None:
        """Raises TooLarge if a prompt has more tokens than any may, before they become objects."""
        n_tokens = len(prompt.token_ids.ids)
        with suppress(errors.Unavailable):  # nothing is known of the model yet
            max_tokens = self._service.describe().max_model_len
            if n_tokens > max_tokens:
                self._refusals[Refusal.PROMPT_TOO_LONG] += 1
                raise errors.TooLarge(
                    "prompt",
                    f"has {n_tokens} tokens; prompt and answer may have {max_tokens} together",
                )

    def _check_size(self, message: Any) -> None:
        if message.ByteSize() > self._max_body_bytes:
            self._refusals[Refusal.BODY_TOO_LARGE] += 1
            raise errors.TooLarge(
                "request", f"must not be larger than {self._max_body_bytes} bytes"
            )


def add_services(
    server: grpc.aio.Server,
    servicer: InferenceServicer,
    health: Health,
    transfers: Transfers,
    *,
    observe: rpc_handlers.Observe | None = None,
) -> None:
    """Puts the API on a server; the messages of all its calls go through `transfers`."""
    services = (SERVICE, health_servicer.SERVICE, reflection.SERVICE)
    reflecting = reflection.ReflectionServicer(
        tuple(service.full_name for service in services), transfers.exchange
    )
    handlers = (
        rpc_handlers.service_handler(
            SERVICE,
            servicer,
            admit=servicer.admit,
            observe=observe,
            exchange=lambda context: transfers.exchange(
                context, uploading=lambda: servicer.uploading(context)
            ),
        ),
        rpc_handlers.service_handler(reflection.SERVICE, reflecting, raw=reflection.RAW_METHODS),
    )
    server.add_generic_rpc_handlers(handlers)
    health.add_to(server, exchange=transfers.exchange)


def _authorization(context: Context) -> str | None:
    authorization = dict(context.invocation_metadata() or ()).get("authorization")
    return None if authorization is None else str(authorization)


def _to_prompt(prompt: inference_pb2.Prompt) -> Prompt:
    match prompt.WhichOneof("prompt"):
        case "text":
            return prompt.text
        case "token_ids":
            return tuple(prompt.token_ids.ids)
        case "conversation":
            turns = prompt.conversation.messages
            return Conversation(tuple(ChatMessage(turn.role, turn.content) for turn in turns))
    raise errors.InvalidRequest("prompt", "must be given")


def _to_options(options: inference_pb2.GenerationOptions) -> GenerationOptions:
    # An option that this server does not know must not be ignored: it would choose other tokens.
    for field, message in (
        ("options", options),
        ("options.sampling", options.sampling),
        ("options.format", options.format),
    ):
        unknown = UnknownFieldSet(message)
        numbers = sorted({unknown[i].field_number for i in range(len(unknown))})
        if numbers:
            raise errors.InvalidRequest(
                field,
                f"has fields that are not known here, with the numbers {numbers}; "
                "see inference.proto",
            )
    given = {field.name: value for field, value in options.ListFields() if field.name != "format"}
    for name in ("logprobs", "prompt_logprobs"):
        if name in given:
            given[f"n_{name}"] = given.pop(name)
    sampling = from_proto(options.sampling)
    if options.HasField("format"):
        if sampling.grammar:
            raise errors.InvalidRequest("format", "not together with grammar")
        sampling = replace(sampling, grammar=_grammar_of(options.format))
    else:
        given["format_field"] = "grammar"
    given |= {"sampling": sampling, "stop": tuple(options.stop)}
    given["defaulted"] = OPTIONS.keys() - {field.name for field, _ in options.sampling.ListFields()}
    return GenerationOptions(**given)


def _refuse_in_stream(options: GenerationOptions) -> None:
    if options.n_prompt_logprobs is not None:
        raise errors.InvalidRequest("prompt_logprobs", "not in a stream")
    if options.n_generated > options.n:
        raise errors.InvalidRequest("best_of", "not in a stream")


def _grammar_of(message: inference_pb2.OutputFormat) -> str:
    match message.WhichOneof("format"):
        case "json_object" if message.json_object:
            return output_format.json_object()
        case "json_schema":
            return output_format.json_schema(message.json_schema, field="format")
        case "regex":
            return output_format.regex(message.regex)
        case "choice":
            return output_format.choice(message.choice.texts, field="format")
        case "grammar":
            return output_format.grammar(message.grammar, field="format")
    raise errors.InvalidRequest("format", "must be one that is known")


def _resumed(
    request: GenerationRequest, message: inference_pb2.GenerateStreamRequest
) -> GenerationRequest:
    so_far, sampling = message.resumption, message.options.sampling
    resumption = Resumption(
        request_id=so_far.request_id,
        seed=so_far.seed,
        answers=tuple(
            AnswerSoFar(tuple(answer.token_ids), answer.is_finished) for answer in so_far.answers
        ),
    )
    return request.resumed(
        resumption, own_seed=sampling.seed if sampling.HasField("seed") else None
    )


def _first_fields(generation: Generation) -> dict[str, Any]:
    """Returns the fields that only the first message of a stream has."""
    return {
        "prompt_token_ids": _prompt_token_ids(generation),
        "seed": generation.options.sampling.seed,
    }


def _to_choice(piece: Piece, generation: Generation) -> inference_pb2.Choice:
    choice = inference_pb2.Choice(
        index=piece.index,
        text=piece.text,
        token_ids=piece.token_ids if generation.options.return_token_ids else (),
        finish_reason=_FINISH_REASONS[piece.finish_reason],
    )
    options, texts = generation.options, generation.token_texts
    if options.n_logprobs is not None:
        choice.logprobs.extend(
            token_logprobs(texts, piece.token_ids, piece.logprobs, n_top=options.n_logprobs)
        )
    if options.n_prompt_logprobs is not None:
        prompt = generation.prompt_of(piece.index).token_ids[1:]
        choice.prompt_logprobs.extend(
            token_logprobs(texts, prompt, piece.prompt_logprobs, n_top=options.n_prompt_logprobs)
        )
    return choice


def _to_usage(usage: Usage) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def _prompt_token_ids(generation: Generation) -> Sequence[int]:
    return generation.prompts[0].token_ids if generation.options.return_token_ids else ()
