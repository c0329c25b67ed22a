"""The OpenAI HTTP API: the same requests, limits and answers as `inference.proto`.

`/v1/responses` and Anthropic's `/v1/messages` are translations onto the same generations.
"""

from collections.abc import AsyncGenerator, Callable

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from services.common import errors
from services.frontend.api_keys import Account, ApiKeys
from services.frontend.generation.generation import Generation
from services.frontend.generation.generation_service import GenerationService
from services.frontend.http import anthropic_errors, event_id, openai_errors, openapi
from services.frontend.http.body_reader import Body, parse_body
from services.frontend.http.chat_shape import ChatShape
from services.frontend.http.completion_shape import CompletionShape
from services.frontend.http.conversation_body import GeneratingBody
from services.frontend.http.conversation_stream import ReplyStream, whole_reply
from services.frontend.http.event_id import StreamPosition
from services.frontend.http.exchange import (
    BodyLimits,
    Event,
    EventStream,
    read_body,
    while_connected,
)
from services.frontend.http.json_structure import check_structure
from services.frontend.http.messages_request import CountBody, MessagesBody
from services.frontend.http.openai_request import ChatBody, CompletionBody, GenerationBody
from services.frontend.http.openai_response import Json, Shape, model_list, model_object, to_json
from services.frontend.http.responses_request import ResponsesBody
from services.frontend.request.limits import Limits


def create_app(
    service: GenerationService,
    *,
    bodies: BodyLimits,
    api_keys: ApiKeys,
    reason_against_serving: Callable[[], str],
) -> FastAPI:
    """Returns the API in front of a generation service; `reason_against_serving` says why requests
    that come now would get no tokens, or nothing."""
    app = FastAPI(title="Orcinus", docs_url=None, redoc_url=None, openapi_url=None)
    app.router.redirect_slashes = False
    openai_errors.install(app)
    anthropic_errors.install(app)
    api = OpenAIApi(
        service,
        bodies=bodies,
        api_keys=api_keys,
        reason_against_serving=reason_against_serving,
    )
    app.add_api_route("/v1/models", api.list_models, methods=["GET", "HEAD"])
    app.add_api_route("/v1/models/{model:path}", api.retrieve_model, methods=["GET"])
    app.add_api_route("/v1/completions", api.complete, methods=["POST"], response_model=None)
    app.add_api_route("/v1/chat/completions", api.chat, methods=["POST"], response_model=None)
    app.add_api_route("/v1/responses", api.respond, methods=["POST"], response_model=None)
    app.add_api_route(anthropic_errors.PATH, api.message, methods=["POST"], response_model=None)
    app.add_api_route(
        anthropic_errors.COUNT_PATH, api.count_tokens, methods=["POST"], response_model=None
    )
    app.add_api_route(openapi.PATH, api.openapi, methods=["GET", "HEAD"], response_model=None)
    app.add_api_route("/health", api.health, methods=["GET", "HEAD"], response_model=None)
    app.add_api_route("/ready", api.ready, methods=["GET", "HEAD"], response_model=None)
    app.add_api_route("/serving", api.serving, methods=["GET", "HEAD"], response_model=None)
    return app


class OpenAIApi:
    """The handlers; bodies are read here since they are bounded while they arrive."""

    def __init__(
        self,
        service: GenerationService,
        *,
        bodies: BodyLimits,
        api_keys: ApiKeys,
        reason_against_serving: Callable[[], str],
    ) -> None:
        self._service = service
        self._bodies = bodies
        self._api_keys = api_keys
        self._reason_against_serving = reason_against_serving
        self._document = to_json(openapi.document(needs_key=api_keys.are_needed))

    async def list_models(self, request: Request) -> Json:
        """Answers with the one model."""
        self._admit(request)
        return model_list(self._service.describe())

    async def retrieve_model(self, request: Request, model: str) -> Response:
        """Answers with the one model, if its name is asked for."""
        self._admit(request)
        pipeline = self._service.describe()
        if model != pipeline.model:
            return openai_errors.model_not_found(model)
        return JSONResponse(model_object(pipeline))

    async def openapi(self) -> Response:
        """Answers with the OpenAPI document, to anybody: it says nothing of the model."""
        return Response(self._document, media_type=openapi.JSON)

    async def health(self) -> Response:
        """Answers that the process is up."""
        return JSONResponse({"status": "ok"})

    async def ready(self) -> Response:
        """Answers whether requests would be taken."""
        is_ready = self._service.is_ready
        status = {"status": "ready" if is_ready else "not ready"}
        return JSONResponse(status, 200 if is_ready else 503)

    async def serving(self) -> Response:
        """Answers whether requests that come now get tokens, and why not."""
        if reason := self._reason_against_serving():
            return JSONResponse({"status": "not serving", "reason": reason}, 503)
        return JSONResponse({"status": "serving"})

    async def complete(self, request: Request) -> Response:
        """Continues texts or tokens."""
        account = self._admit_generation(request)
        body = await self._read(request, CompletionBody, account)
        return await self._respond(request, body, account)

    async def chat(self, request: Request) -> Response:
        """Continues a conversation."""
        account = self._admit_generation(request)
        body = await self._read(request, ChatBody, account)
        return await self._respond(request, body, account)

    async def respond(self, request: Request) -> Response:
        """Continues a conversation, in the protocol of agents."""
        return await self._converse(request, ResponsesBody)

    async def message(self, request: Request) -> Response:
        """Continues a conversation, in Anthropic's protocol."""
        return await self._converse(request, MessagesBody)

    async def count_tokens(self, request: Request) -> Response:
        """Answers with the number of tokens that a conversation would start with."""
        account = self._admit_generation(request)
        body = await self._read(request, CountBody, account)
        with body.in_own_words():
            Limits(self._service.describe()).check_model(body.model or "")
            counting = self._service.tokenize(body.to_conversation(), account)
            token_ids = await while_connected(request.receive, counting)
        return JSONResponse({"input_tokens": len(token_ids)})

    async def _converse(self, request: Request, kind: type[GeneratingBody]) -> Response:
        account = self._admit_generation(request)
        body = await self._read(request, kind, account)
        if body.stream:
            stream = ReplyStream(self._service, body, account)
            return EventStream(stream.events(), explain=stream.explain, end=b"")
        reply = whole_reply(self._service, body, account)
        return JSONResponse(await while_connected(request.receive, reply))

    def _admit(self, request: Request) -> Account:
        """Finds out who calls. Each method of the API begins with it, before the body is read. As a
        dependency of FastAPI it would cost twenty times as much."""
        headers = request.headers
        key = headers.get("x-api-key")
        of_key = None if key is None else f"Bearer {key}"
        return self._api_keys.admit(headers.get("authorization", of_key))

    def _admit_generation(self, request: Request) -> Account:
        """Finds out who calls, and whether there is room; a stream that goes on has its place."""
        account = self._admit(request)
        if event_id.HEADER not in request.headers:
            self._service.check_room()
        return account

    async def _read(self, request: Request, kind: type[Body], account: Account) -> Body:
        """Reads a body, which counts as an answer in flight from here on: who may have two answers
        has no more uploads. What it stands for takes a share of its own when it is opened."""
        with account.receiving(), self._bodies.budget.share() as share:
            data = await read_body(request, self._bodies, share)
            check_structure(data, self._bodies.refusals)
            return parse_body(kind, data)

    async def _respond(self, request: Request, body: GenerationBody, account: Account) -> Response:
        position = _position(request)
        if body.stream:
            return EventStream(self._events(body, position, account), explain=_explain)
        body.check_resumption(position)
        return JSONResponse(await while_connected(request.receive, self._whole(body, account)))

    async def _whole(self, body: GenerationBody, account: Account) -> Json:
        request = body.to_request()
        async with self._service.open(request, account) as generation:
            pieces = await generation.complete()
            return _shape(generation, body).answer(pieces)

    async def _events(
        self, body: GenerationBody, position: StreamPosition | None, account: Account
    ) -> AsyncGenerator[Event]:
        request = body.to_request(position)
        async with self._service.open(request, account) as generation:
            shape = _shape(generation, body, position)
            async for piece in generation.pieces():
                for event in shape.events(piece):
                    yield event
            if body.includes_usage and not (position and position.has_usage):
                yield shape.usage_event()


def _explain(error: errors.OrcinusError) -> Event:
    return Event(to_json(openai_errors.error_object(error)))


def _position(request: Request) -> StreamPosition | None:
    """Returns where the client's stream broke, if this one is to go on there."""
    text = request.headers.get(event_id.HEADER)
    return None if text is None else StreamPosition.parse(text)


def _shape(
    generation: Generation, body: GenerationBody, position: StreamPosition | None = None
) -> Shape:
    if isinstance(body, CompletionBody):
        return CompletionShape(
            generation, position, includes_usage=body.includes_usage, echo=bool(body.echo)
        )
    return ChatShape(generation, position, includes_usage=body.includes_usage)
