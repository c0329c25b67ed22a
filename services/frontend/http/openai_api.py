"""The OpenAI HTTP API: the same requests, limits and answers as `inference.proto`.

`/v1/responses` and Anthropic's `/v1/messages` are translations onto the same generations.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.common import errors
from services.common.version import VERSION
from services.frontend.api_keys import Account, ApiKeys
from services.frontend.generation.generation import Generation
from services.frontend.generation.generation_service import GenerationService
from services.frontend.http import cross_origin
from services.frontend.http.anthropic import errors as anthropic_errors
from services.frontend.http.anthropic.request import CountBody, MessagesBody
from services.frontend.http.app import App
from services.frontend.http.bodies import unknown_fields
from services.frontend.http.bodies.reader import Body, parse_body
from services.frontend.http.bodies.unknown_fields import Endpoint
from services.frontend.http.docs import openapi
from services.frontend.http.docs import page as docs_page
from services.frontend.http.openai import errors as openai_errors
from services.frontend.http.openai import event_id
from services.frontend.http.openai.chat_reply import ChatShape
from services.frontend.http.openai.completion_reply import CompletionShape
from services.frontend.http.openai.event_id import StreamPosition
from services.frontend.http.openai.reply import (
    DONE,
    Shape,
    ShownFields,
    model_list,
    model_object,
    to_json,
)
from services.frontend.http.openai.request import ChatBody, CompletionBody, GenerationBody
from services.frontend.http.openai.tokens import DetokenizeBody, TokenizeBody
from services.frontend.http.operations import pipeline_page
from services.frontend.http.operations.pipeline_page import PipelinePage
from services.frontend.http.protocol import credentials
from services.frontend.http.protocol.answering import ReplyStream, whole_reply
from services.frontend.http.protocol.conversation_body import GeneratingBody
from services.frontend.http.responses.request import ResponsesBody
from services.frontend.http.transport import media_types
from services.frontend.http.transport.event_outlet import EventOutlet
from services.frontend.http.transport.event_output import EventOutput
from services.frontend.http.transport.event_stream import (
    Event,
    EventStream,
    framed,
    while_connected,
)
from services.frontend.http.transport.request_body import BodyLimits, read_body
from services.frontend.http.transport.request_headers import headers_of
from services.frontend.request.logprobs import MANY_LOGPROBS


def create_app(api: "OpenAIApi", page: PipelinePage | None = None) -> App:
    """Returns the app that serves an API, and a page if there is one."""
    posted: dict[str, Endpoint] = {
        "/v1/chat/completions": api.chat,
        "/v1/completions": api.complete,
        "/v1/responses": api.respond,
        anthropic_errors.PATH: api.message,
        anthropic_errors.COUNT_PATH: api.count_tokens,
        "/tokenize": api.tokenize,
        "/detokenize": api.detokenize,
    }
    shown: dict[str, Endpoint] = {
        "/v1/models": api.list_models,
        "/v1/models/{model:path}": api.retrieve_model,
        "/version": api.version,
        openapi.PATH: api.openapi,
        docs_page.PATH: api.docs,
        "/health": api.health,
        "/ready": api.ready,
        "/serving": api.serving,
    }
    routes = [_route(path, post, "POST") for path, post in posted.items()]
    if page is not None:
        shown |= {"/": page.index, pipeline_page.FILES_PATH: page.file}
        routes.append(_route(pipeline_page.EVENTS_PATH, page.events, "GET"))
    routes += [_route(path, get, "GET", "HEAD") for path, get in shown.items()]
    return App(routes)


def _route(path: str, endpoint: Endpoint, *methods: str) -> Route:
    route = Route(path, endpoint)
    route.methods = set(methods)  # no HEAD for a stream, which Starlette adds where there is a GET
    return route


class OpenAIApi:
    """The handlers; bodies are read here since they are bounded while they arrive."""

    def __init__(
        self,
        service: GenerationService,
        *,
        bodies: BodyLimits,
        api_keys: ApiKeys,
        reason_against_serving: Callable[[], str],
        comment_s: float,
        refuse_unknown_fields: bool = False,
        origins: Collection[str] = (),
        has_page: bool = False,
    ) -> None:
        """`reason_against_serving` says why requests that come now would get no tokens, or nothing.
        Streams have a comment after `comment_s` seconds without an event."""
        self._service = service
        self._unknown = unknown_fields.UnknownFields(are_refused=refuse_unknown_fields)
        self._bodies = bodies
        self._api_keys = api_keys
        self._reason_against_serving = reason_against_serving
        self._comment_s = comment_s
        self._origins = origins
        document = openapi.document(
            needs_key=api_keys.are_needed,
            refuses_unknown=refuse_unknown_fields,
            has_page=has_page,
        )
        self._document = to_json(document)
        self._docs = docs_page.render(document)

    async def list_models(self, request: Request) -> Response:
        """Answers with the one model, by each of its names."""
        self._admit(request)
        return JSONResponse(model_list(self._service.describe(), self._service.model_names))

    async def retrieve_model(self, request: Request) -> Response:
        """Answers with the one model, if one of its names is asked for."""
        self._admit(request)
        model = request.path_params["model"]
        pipeline, names = self._service.describe(), self._service.model_names
        if model not in names:
            raise errors.UnknownModel(model, served=names[0])
        return JSONResponse(model_object(pipeline, model))

    async def version(self, _: Request) -> Response:
        """Answers with the version of the server, to anybody."""
        return JSONResponse({"version": VERSION})

    async def openapi(self, _: Request) -> Response:
        """Answers with the OpenAPI document, to anybody: it says nothing of the model."""
        return Response(self._document, media_type=media_types.JSON)

    async def docs(self, _: Request) -> Response:
        """Answers with the document as a page to read, to anybody."""
        return Response(self._docs, headers=docs_page.HEADERS, media_type=docs_page.HTML)

    async def health(self, _: Request) -> Response:
        """Answers that the process is up."""
        return JSONResponse({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """Answers whether requests would be taken."""
        is_ready = self._service.is_ready
        status = {"status": "ready" if is_ready else "not ready"}
        return JSONResponse(status, 200 if is_ready else 503)

    async def serving(self, _: Request) -> Response:
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

    async def tokenize(self, request: Request) -> Response:
        """Answers with the tokens of a text or a conversation."""
        account = self._admit(request)
        body = await self._read(request, TokenizeBody, account)
        asked = body.to_request()
        (prompt,) = asked.prompts
        token_ids = await self._service.tokenize(
            prompt, account, model=asked.model, options=asked.options
        )
        answer = {
            "count": len(token_ids),
            "max_model_len": self._service.describe().max_model_len,
            "tokens": tuple(token_ids),
            "token_strs": (
                await self._service.names_of(token_ids) if body.return_token_strs else None
            ),
        }
        return Response(to_json(answer), media_type=media_types.JSON)

    async def detokenize(self, request: Request) -> Response:
        """Answers with the text of tokens."""
        account = self._admit(request)
        body = await self._read(request, DetokenizeBody, account)
        text = await self._service.detokenize(tuple(body.tokens), account, model=body.model or "")
        answer = to_json({"prompt": text})
        return Response(answer, media_type=media_types.JSON)

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
            counting = self._service.tokenize(
                body.to_conversation(), account, model=body.model or ""
            )
            token_ids = await while_connected(request.receive, counting)
        return JSONResponse({"input_tokens": len(token_ids)})

    async def _converse(self, request: Request, kind: type[GeneratingBody]) -> Response:
        account = self._admit_generation(request)
        body = await self._read(request, kind, account)
        if body.stream:
            reply = ReplyStream(self._service, body, account)
            return EventStream(reply.write, explain=reply.explain, comment_s=self._comment_s)
        answer = await while_connected(request.receive, whole_reply(self._service, body, account))
        return Response(to_json(answer), media_type=media_types.JSON)

    def _admit(self, request: Request) -> Account:
        """Finds out who calls. Each method of the API begins with it, before the body is read."""
        return self._api_keys.admit(credentials.shown_in(headers_of(request)))

    def _admit_generation(self, request: Request) -> Account:
        """Finds out who calls, and whether there is room; a stream that goes on has its place."""
        account = self._admit(request)
        if event_id.HEADER_KEY not in headers_of(request):
            self._service.check_room(account)
        return account

    async def _read(self, request: Request, kind: type[Body], account: Account) -> Body:
        """Reads a body, which counts as an answer in flight from here on: who may have two answers
        has no more uploads. What it stands for takes a share of its own when it is opened."""
        cross_origin.check_page(headers_of(request), self._origins)
        with account.receiving(), self._bodies.budget.share() as share:
            data = await read_body(request, self._bodies, share)
            return parse_body(kind, data, partial(self._unknown.found, request))

    async def _respond(self, request: Request, body: GenerationBody, account: Account) -> Response:
        position = _position(request)
        if body.stream:
            write = partial(self._write_events, body, position, account)
            return EventStream(write, explain=_explain, comment_s=self._comment_s)
        body.check_resumption(position)
        return await while_connected(request.receive, self._whole(body, account))

    async def _whole(self, body: GenerationBody, account: Account) -> Response:
        request = body.to_request()
        async with self._service.open(request, account) as generation:
            pieces = await generation.complete()
            shape = _shape(generation, body)
            parts = shape.whole(pieces)
            if sum(piece.n_logprobs for piece in pieces) > MANY_LOGPROBS:
                data = await asyncio.to_thread(b"".join, parts)
            elif len(pieces) == 1:
                data = b"".join(parts)
            else:
                data = await _joined_in_turns(parts)
            return Response(data, media_type=media_types.JSON)

    async def _write_events(
        self,
        body: GenerationBody,
        position: StreamPosition | None,
        account: Account,
        output: EventOutput,
    ) -> None:
        request = body.to_request(position)
        async with self._service.open(request, account) as generation:
            shape = _shape(generation, body, position)
            await output.start()
            outlet = EventOutlet.of(output, shape.events, shape.text_event)
            async for piece in generation.pieces(outlet):
                events = shape.events(piece)
                if piece.n_logprobs > MANY_LOGPROBS:
                    events = await asyncio.to_thread(list, events)
                for event in events:
                    await output.write(event)
            if body.includes_usage and not (position and position.has_usage):
                await output.write(shape.usage_event())
        await output.write(DONE)


async def _joined_in_turns(parts: Iterable[bytes]) -> bytes:
    """Returns parts as one; others have the event loop between two of what may be thousands."""
    joined = bytearray()
    for part in parts:
        joined += part
        await asyncio.sleep(0)
    return bytes(joined)


def _explain(error: errors.OrcinusError) -> Event:
    return framed(to_json(openai_errors.error_object(error)))


def _position(request: Request) -> StreamPosition | None:
    """Returns where the client's stream broke, if this one is to go on there."""
    text = headers_of(request).get(event_id.HEADER_KEY)
    return None if text is None else StreamPosition.parse(text)


def _shape(
    generation: Generation, body: GenerationBody, position: StreamPosition | None = None
) -> Shape:
    shown = ShownFields(
        includes_usage=body.includes_usage,
        counts_usage=body.counts_usage,
        n_prompt_logprobs=body.prompt_logprobs,
    )
    if isinstance(body, CompletionBody):
        return CompletionShape(generation, position, shown=shown, echo=bool(body.echo))
    return ChatShape(generation, position, shown=shown)
