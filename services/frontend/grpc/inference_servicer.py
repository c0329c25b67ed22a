"""The gRPC API: `InferenceService`, its health service and its reflection service.

`requests.py` reads the messages of clients, and `answers.py` writes the messages for them. Methods
raise the exceptions of `services.common.errors`, which `rpc_handlers.py` turns into gRPC statuses.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import grpc.aio
from orcinus.v1 import inference_pb2

from services.common import errors, health_servicer, rpc_handlers
from services.common.health import Health
from services.frontend.api_keys import Account, ApiKeys
from services.frontend.generation.generation_service import GenerationService
from services.frontend.generation.scores import scores_of
from services.frontend.generation.token_service import DETOKENIZED_FIELD
from services.frontend.generation.vector_requests import check_number
from services.frontend.generation.vectors import embeddings_of
from services.frontend.grpc import reflection
from services.frontend.grpc.answers import AnswerMessages, usage_message
from services.frontend.grpc.requests import check_stream, to_prompt, to_request, to_resumed
from services.frontend.grpc.transfers import Transfers
from services.frontend.grpc.vector_messages import (
    to_embedding_request,
    to_score_request,
    vector_message_bytes,
)
from services.frontend.models.served_models import ServedModels
from services.frontend.request.generation_request import GenerationRequest
from services.frontend.request.logprobs import MANY_LOGPROBS
from services.frontend.request.refusals import Refusal, Refusals

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer:
    """Implements the methods of the gRPC service `InferenceService`."""

    def __init__(
        self,
        models: ServedModels,
        *,
        max_body_bytes: int,
        api_keys: ApiKeys,
        refusals: Refusals,
    ) -> None:
        self._models = models
        self._max_body_bytes = max_body_bytes
        self._api_keys = api_keys
        self._refusals = refusals

    async def Generate(
        self, message: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        """Returns one message with all answers, when all of them are complete."""
        account = self._api_keys.account_of(_authorization(context))
        self._models.check_room(account)
        request = self._to_request(message, account)
        async with self._models.open(request, account) as generation:
            pieces = await generation.complete()
            answers = AnswerMessages(generation, message)
            if sum(piece.n_logprobs for piece in pieces) > MANY_LOGPROBS:
                return await asyncio.to_thread(answers.whole, pieces)
            return answers.whole(pieces)

    async def GenerateStream(
        self, message: inference_pb2.GenerateStreamRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateStreamResponse]:
        """Yields a message for each piece of an answer, and then a message with the token usage."""
        account = self._api_keys.account_of(_authorization(context))
        if not message.HasField("resumption"):
            self._models.check_room(account)
        request = self._to_request(message, account)
        check_stream(request.options)
        if message.HasField("resumption"):
            request = to_resumed(request, message)
        async with self._models.open(request, account) as generation:
            answers = AnswerMessages(generation, message)
            async for piece in generation.pieces():
                if (response := answers.streamed(piece)) is not None:
                    yield response
            yield answers.end()

    async def Tokenize(
        self, message: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """Returns the tokens that `Generate` would make of a prompt."""
        self._check_size(message)
        account = self._api_keys.account_of(_authorization(context))
        service = self._models.select(message.model, account).service
        self._check_n_tokens(service, "prompt", message.prompt.token_ids.ids)
        prompt = to_prompt(message.prompt)
        token_ids = await service.tokens.tokenize(prompt, account, model=message.model)
        return inference_pb2.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(
        self, message: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        """Returns the text of the given tokens."""
        self._check_size(message)
        account = self._api_keys.account_of(_authorization(context))
        service = self._models.select(message.model, account).service
        self._check_n_tokens(service, DETOKENIZED_FIELD, message.tokens)
        tokens = tuple(message.tokens)
        text = await service.tokens.detokenize(tokens, account, model=message.model)
        return inference_pb2.DetokenizeResponse(text=text)

    async def Embed(
        self, message: inference_pb2.EmbedRequest, context: Context
    ) -> inference_pb2.EmbedResponse:
        """Returns the vector (embedding) of each prompt."""
        self._check_size(message)
        account = self._api_keys.account_of(_authorization(context))
        self._models.check_room(account)
        service = self._models.select(message.model, account).service
        check_number("inputs", len(message.inputs))
        for index, prompt in enumerate(message.inputs):
            self._check_n_tokens(service, f"inputs[{index}]", prompt.token_ids.ids)
        request = to_embedding_request(message, service.vectors)
        n_values = message.dimensions if message.HasField("dimensions") else None
        async with self._models.prepare(request, account) as generation:
            if generation.pooling is not None:
                whole = generation.pooling.n_values
                n_each = whole if n_values is None else min(n_values, whole)
                n_bytes = self._check_vectors(len(request.prompts), n_each)
                generation.keep(2 * n_bytes)  # in the message, and as it is sent
            response = inference_pb2.EmbedResponse(
                request_id=generation.request_id, model=generation.model
            )
            async for vector in embeddings_of(generation, service.vectors, n_values=n_values):
                response.embeddings.add(values=vector)
            response.usage.CopyFrom(usage_message(generation.usage))
            return response

    async def Score(
        self, message: inference_pb2.ScoreRequest, context: Context
    ) -> inference_pb2.ScoreResponse:
        """Returns the score of each pair of texts."""
        self._check_size(message)
        account = self._api_keys.account_of(_authorization(context))
        self._models.check_room(account)
        service = self._models.select(message.model, account).service
        request = to_score_request(message, service.pairs)
        async with self._models.prepare(request, account) as generation:
            return inference_pb2.ScoreResponse(
                scores=await scores_of(generation),
                request_id=generation.request_id,
                model=generation.model,
                usage=usage_message(generation.usage),
            )

    async def DescribeModel(
        self, message: inference_pb2.DescribeModelRequest, context: Context
    ) -> inference_pb2.DescribeModelResponse:
        """Returns the name, the limits and the settings of a model."""
        account = self._api_keys.account_of(_authorization(context))
        service = self._models.select(message.model, account).service
        pipeline = service.describe(message.model)
        return inference_pb2.DescribeModelResponse(
            model=service.model_names[0],
            max_model_len=pipeline.max_model_len,
            vocab_size=pipeline.vocab_size,
            eos_token_ids=pipeline.eos_token_ids,
            n_stages=pipeline.n_stages,
            tp_size=pipeline.tp_size,
            has_chat_template=service.has_chat_template,
        )

    def admit(self, context: Context) -> None:
        """Counts a call against the limit of its API key, before the call's message is received.
        Raises Unauthenticated if the key is missing or unknown, and PoolFull if the key allows no
        further call at the moment."""
        self._api_keys.admit(_authorization(context))

    def uploading(self, context: Context) -> AbstractContextManager[object]:
        """Counts a call as one answer in flight of its API key, until the returned context ends.
        The message of the call is received within this context. Raises PoolFull if the key already
        has as many answers in flight as it may have, and Unauthenticated if the key is no longer
        known."""
        return self._api_keys.account_of(_authorization(context)).receiving()

    def _to_request(
        self,
        message: inference_pb2.GenerateRequest | inference_pb2.GenerateStreamRequest,
        account: Account,
    ) -> GenerationRequest:
        self._check_size(message)
        service = self._models.select(message.model, account).service
        for prompt in (message.prompt, *message.prompts):
            self._check_n_tokens(service, "prompt", prompt.token_ids.ids)
        return to_request(message)

    def _check_n_tokens(
        self, service: GenerationService, field: str, token_ids: Sequence[int]
    ) -> None:
        """Raises TooLarge if `token_ids` has more tokens than the model can read. Accepts any
        number while the limit of the model is not known. Must be called before the tokens become
        Python objects."""
        n_tokens = len(token_ids)
        with suppress(errors.Unavailable):  # nothing is known of the model yet
            max_tokens = service.describe().max_model_len
            if n_tokens > max_tokens:
                self._refusals[Refusal.PROMPT_TOO_LONG] += 1
                raise errors.TooLarge(
                    field,
                    f"has {n_tokens} tokens; the model can read {max_tokens}",
                )

    def _check_vectors(self, n_vectors: int, n_values: int) -> int:
        """Returns the size, in bytes, of `n_vectors` vectors in a message. Each vector has
        `n_values` elements. Raises InvalidRequest if the size exceeds `max_body_bytes`."""
        n_bytes = n_vectors * vector_message_bytes(n_values)
        if n_bytes > self._max_body_bytes:
            raise errors.InvalidRequest(
                "inputs",
                f"their vectors take {n_bytes} bytes, and a message may have "
                f"{self._max_body_bytes}; send fewer at once",
            )
        return n_bytes

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
    """Adds the gRPC services to a server. `transfers` receives and sends the messages of all calls.
    `observe` observes only the calls of the inference service."""
    services = (SERVICE, health_servicer.SERVICE, *reflection.SERVICES)
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
        *(
            rpc_handlers.service_handler(version, reflecting, raw=reflection.RAW_METHODS)
            for version in reflection.SERVICES
        ),
    )
    server.add_generic_rpc_handlers(handlers)
    health.add_to(server, exchange=transfers.exchange)


def _authorization(context: Context) -> str | None:
    authorization = dict(context.invocation_metadata() or ()).get("authorization")
    return None if authorization is None else str(authorization)
