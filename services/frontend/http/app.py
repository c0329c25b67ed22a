"""The ASGI app: finds the route of a request, and answers with what the route's handler returns or
raises.

Starlette's own app would pass each request through ten layers of middleware. The task of a stream
would pass through all layers each time it resumes, and so would each message. This app has one
layer.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from starlette import routing
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from services.common import errors
from services.frontend.http.bodies import unknown_fields
from services.frontend.http.docs import openapi, page
from services.frontend.http.openai import errors as openai_errors
from services.frontend.http.operations.page_files import page_files
from services.frontend.http.protocol.api import Api
from services.frontend.http.protocol.api_description import ApiDescription, Description
from services.frontend.http.protocol.errors import Dialect, answer
from services.frontend.http.protocol.json_text import to_json
from services.frontend.http.protocol.route import Route
from services.frontend.http.routes import served_routes
from services.frontend.http.transport.media_types import EVENTS
from services.frontend.request.client_call import current_call

Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(api: Api) -> "App":
    """Returns the app that serves the API and, if clients may watch the scheduler, the page that
    shows the pipeline.

    Raises:
        OSError: a file of the page cannot be read.
        ValueError: the index of the page is missing, or the media type of a file is not known.
    """
    if api.has_page:
        page_files()  # raises errors at start rather than at the first request
    served = served_routes(
        has_page=api.has_page,
        has_metrics=api.registry is not None,
        has_receipts=api.receipt_keys is not None,
    )

    def describe() -> Description:
        document = openapi.document(
            served, needs_key=api.api_keys.are_needed, refuses_unknown=api.unknown.are_refused
        )
        return Description(to_json(document), page.render(document))

    return App(replace(api, description=ApiDescription(describe)), served)


class App:
    """Routes requests to handlers. If a handler raises an error before the answer has begun, the
    error becomes the answer, in the form of the route's protocol (its dialect)."""

    def __init__(self, api: Api, routes: Sequence[Route]) -> None:
        """Prepares the routes. The first route in `routes` that matches a request answers it."""
        self.routes = [_entry(api, route) for route in routes]
        self._dialects = {route.path: route.dialect for route in routes if route.dialect}
        """Dialect (form of errors) of each route whose dialect is not that of OpenAI's API, keyed
        by the path of the route."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request. An unexpected error is answered and raised again, so that the server
        logs the error and closes the connection."""
        request = Request(scope, receive, send)
        has_begun = False

        async def send_on(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            if message["type"] == "http.response.start":
                self._name_request(message, scope)
            await send(message)

        try:
            response = unknown_fields.mark(request, await self._endpoint(scope)(request))
            await response(scope, receive, send_on)
        except Exception as error:  # a bug: 500 for the client, raised again below
            is_foreseen = not has_begun and isinstance(error, _ANSWERS)
            if not has_begun:
                refusal = unknown_fields.mark(request, answer(request, error, self._dialect(scope)))
                await refusal(scope, receive, send_on)
            if not is_foreseen:
                raise

    def _endpoint(self, scope: Scope) -> Endpoint:
        """Returns the endpoint that answers a request, and stores the route in the request's scope.

        Raises:
            HTTPException: no route has the path, or no route with the path has the method.
        """
        others: list[routing.Route] = []
        for route in self.routes:
            match, found = route.matches(scope)
            if match is routing.Match.FULL:
                scope["route"] = route
                scope.update(found)
                endpoint: Endpoint = route.endpoint
                return endpoint
            if match is routing.Match.PARTIAL:
                others.append(route)
        if not others:
            raise HTTPException(404)
        scope["route"] = others[0]
        raise HTTPException(405, headers={"Allow": ", ".join(others[0].methods or ())})

    def _dialect(self, scope: Scope) -> Dialect:
        """Returns the dialect of a request: the form in which its errors are written. If no route
        serves the path, this is the dialect of a route whose path is a parent of the path, or of
        the protocol whose version header the request has. Otherwise it is OpenAI's dialect."""
        if (route := scope.get("route")) is not None:
            return self._dialects.get(route.path, openai_errors.DIALECT)
        names = {name.decode("latin-1") for name, _ in scope["headers"]}
        for served, dialect in self._dialects.items():
            if _is_below(scope["path"], served) or dialect.version_header in names:
                return dialect
        return openai_errors.DIALECT

    def _name_request(self, start: Message, scope: Scope) -> None:
        """Adds the id of a request to the headers of its answer, in the header that the request's
        dialect uses for ids. Does nothing if the dialect has no such header."""
        call, header = current_call(), self._dialect(scope).id_header
        if call is not None and header:
            start["headers"] = [*start["headers"], (header.encode(), call.shown_id.encode())]


def _is_below(path: str, served: str) -> bool:
    return path == served or path.startswith(f"{served}/")


_ANSWERS = (errors.OrcinusError, HTTPException, ClientDisconnect)
"""Exceptions that handlers may raise to answer a request with an error."""


def _entry(api: Api, route: Route) -> routing.Route:
    entry = routing.Route(route.path, partial(route.handler, api))
    # Starlette adds HEAD to each GET. A stream must not have HEAD.
    has_head = route.method == "GET" and route.media_type != EVENTS
    entry.methods = {route.method, "HEAD"} if has_head else {route.method}
    return entry
