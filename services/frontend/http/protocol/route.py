"""A row of the table of routes: the path, the handler, and a description for clients.

The functions `get`, `get_openly`, `probe`, `post`, `post_in_parts` and `generate` make rows. The
types of the body and of the answer come from the signature of the handler, which mypy checks. The
app, the OpenAPI document and the reference in `docs/api.md` are made from the rows.
"""

from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Required, TypedDict, TypeVar, Unpack, get_args, get_type_hints

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from services.frontend.api_keys import Account
from services.frontend.http.bodies.reader import Body
from services.frontend.http.protocol.api import Api
from services.frontend.http.protocol.body import RequestBody
from services.frontend.http.protocol.errors import Dialect, json_response
from services.frontend.http.protocol.generating import stream_reply, whole_reply
from services.frontend.http.protocol.json_text import to_json
from services.frontend.http.transport.event_stream import LAST_EVENT_ID, while_connected
from services.frontend.http.transport.json_parts import JsonParts
from services.frontend.http.transport.media_types import JSON
from services.frontend.http.transport.request_headers import headers_of

Handler = Callable[[Api, Request], Coroutine[Any, Any, Response]]

Answer = TypeVar("Answer", bound=Mapping[str, Any])


class Access(Enum):
    """Which callers may use a route if the server requires API keys."""

    ANY = auto()
    """All callers may use the route, also without a key."""
    KEY = auto()
    """Callers with a key may use the route."""
    WATCH = auto()
    """Callers with a key that allows watching the scheduler may use the route. If the server has no
    page for watching, the route does not exist."""
    MANAGE = auto()
    """Callers with a key that allows loading and unloading adapters may use the route."""


Parameter = Mapping[str, Any]
"""Type of the description of a request's parameter, such as a header, in the form of OpenAPI."""

RESUMING: Parameter = {
    "name": LAST_EVENT_ID,
    "in": "header",
    "schema": {"type": "string"},
    "description": "Id of the last event of a stream that broke; only with `resumption`.",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Route:
    """The handler for a path and a method, and the description of the route for clients."""

    method: str
    path: str
    handler: Handler
    name: str = ""
    """Name of the operation in generated clients; empty for a route that is not part of the API."""
    description: str = ""
    """Description of the route."""
    access: Access = Access.KEY
    dialect: Dialect | None = None
    """Error dialect of the route; None for the dialect of OpenAI's API."""
    body: type[BaseModel] | None = None
    answer: Any = None
    """Type of the answer in JSON; None if the answer may be any object."""
    media_type: str = JSON
    errors: tuple[int, ...] = ()
    """HTTP statuses of errors that this route adds to the errors that follow from its access and
    from its body."""
    answers_503: bool = False
    """Whether an answer of the type `answer` may also have the status 503."""
    parameters: tuple[Parameter, ...] = ()
    stream: str = ""
    """Description of the events if the answer may be a stream, else empty."""
    chunk: Any = None
    """Type of the data in the events of a stream, if all events have the same type."""


class RouteFields(TypedDict, total=False):
    """Further arguments of the functions that make routes, which pass them on to `Route` unchanged.
    Only `description` is required."""

    name: str
    description: Required[str]
    access: Access
    dialect: Dialect
    errors: tuple[int, ...]
    parameters: tuple[Parameter, ...]
    stream: str
    chunk: Any


def get(
    path: str,
    handler: Callable[[Api, Request, Account], Coroutine[Any, Any, Answer]],
    **fields: Unpack[RouteFields],
) -> Route:
    """Returns the route of a GET request, which has no body, for callers with a key."""
    fields.setdefault("name", _name(handler))

    async def handle(api: Api, request: Request) -> Response:
        return json_response(await handler(api, request, api.admit(request)))

    answer = get_type_hints(handler)["return"]
    return Route(method="GET", path=path, handler=handle, answer=answer, **fields)


def get_openly(path: str, handler: Callable[[], Answer], **fields: Unpack[RouteFields]) -> Route:
    """Returns the route of a GET request that any caller may make, and whose answer is always the
    same."""
    fields.setdefault("name", _name(handler))
    fields.setdefault("access", Access.ANY)

    async def handle(_: Api, __: Request) -> Response:
        return json_response(handler())

    answer = get_type_hints(handler)["return"]
    return Route(method="GET", path=path, handler=handle, answer=answer, **fields)


def probe(
    path: str, handler: Callable[[Api], tuple[bool, Answer]], **fields: Unpack[RouteFields]
) -> Route:
    """Returns the route of a health check, which any caller may use. The status of the answer is
    200 if the handler returns True, else 503."""
    fields.setdefault("name", _name(handler))
    fields.setdefault("access", Access.ANY)

    async def handle(api: Api, request: Request) -> Response:
        is_well, said = handler(api)
        return json_response(said, 200 if is_well else 503)

    _, answer = get_args(get_type_hints(handler)["return"])
    return Route(method="GET", path=path, handler=handle, answer=answer, answers_503=True, **fields)


def post(
    path: str,
    handler: Callable[[Api, Body, Account], Coroutine[Any, Any, Answer]],
    *,
    checks_room: bool = False,
    **fields: Unpack[RouteFields],
) -> Route:
    """Returns the route of a POST request whose handler returns the whole answer. With
    `checks_room`, the request is refused if the server has no room for another request that
    generates."""
    fields.setdefault("name", _name(handler))
    _, body, _, answer = get_type_hints(handler).values()

    async def handle(api: Api, request: Request) -> Response:
        account = api.admit_generation(request) if checks_room else api.admit(request)
        if fields.get("access") is Access.MANAGE:
            account.check_managing()
        asked = await api.read(request, body, account)
        answered = await while_connected(request.receive, handler(api, asked, account))
        return Response(to_json(answered), media_type=JSON)

    return Route(method="POST", path=path, handler=handle, body=body, answer=answer, **fields)


def post_in_parts(
    path: str,
    handler: Callable[[Api, Body, Account], AsyncGenerator[bytes, None]],
    answer: type[Mapping[str, Any]],
    **fields: Unpack[RouteFields],
) -> Route:
    """Returns the route of a POST request whose handler yields the answer as parts of its JSON. The
    request is refused if the server has no room for another request that generates."""
    fields.setdefault("name", _name(handler))
    _, body, _, _ = get_type_hints(handler).values()

    async def handle(api: Api, request: Request) -> Response:
        account = api.admit_generation(request)
        asked = await api.read(request, body, account)
        return JsonParts(handler(api, asked, account))

    return Route(method="POST", path=path, handler=handle, body=body, answer=answer, **fields)


def generate(
    path: str,
    body: type[RequestBody],
    answer: type[Mapping[str, Any]],
    **fields: Unpack[RouteFields],
) -> Route:
    """Returns the route of a POST request whose answer the model generates. The classes of the body
    and of the reply hold all that is specific to the protocol."""

    async def handle(api: Api, request: Request) -> Response:
        account = api.admit_generation(request)
        asked = await api.read(request, body, account)
        asked.resume_at(headers_of(request).get(LAST_EVENT_ID.lower()))
        if asked.stream:
            return stream_reply(api.models, asked, account, comment_s=api.comment_s)
        working = whole_reply(api.models, asked, account)
        return await while_connected(request.receive, working)

    return Route(method="POST", path=path, handler=handle, body=body, answer=answer, **fields)


def _name(handler: Callable[..., Any]) -> str:
    """Returns the name of a handler's operation in camel case: `listModels`."""
    first, *others = handler.__name__.split("_")
    return first + "".join(map(str.capitalize, others))
