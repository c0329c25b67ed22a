"""The ASGI app: finds the endpoint of a request, and answers with what that returns or raises.

It does in one step what Starlette's own app does in ten layers. A stream's task goes through all of
them whenever it goes on, and so does each of its messages.
"""

from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Message, Receive, Scope, Send

from services.common import errors
from services.frontend.http.anthropic import errors as anthropic_errors
from services.frontend.http.bodies import unknown_fields
from services.frontend.http.bodies.unknown_fields import Endpoint
from services.frontend.http.openai import errors as openai_errors


class App:
    """Routes to endpoints. What these raise before their answer has begun becomes the answer, in
    the shape of the API that the path belongs to."""

    def __init__(self, routes: Sequence[Route]) -> None:
        """Takes the routes in the order in which a request's endpoint is looked for."""
        self.routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request. Raises whatever is a bug, so that the server logs it and closes the
        connection."""
        request = Request(scope, receive, send)
        has_begun = False

        async def send_on(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            if message["type"] == "http.response.start":
                anthropic_errors.name_request(scope, message)
            await send(message)

        try:
            response = unknown_fields.mark(request, await self._endpoint(scope)(request))
            await response(scope, receive, send_on)
        except Exception as error:  # of a bug, the client hears 500, and the server all: see below
            is_foreseen = not has_begun and isinstance(error, _ANSWERS)
            if not has_begun:
                await _explained(request, error)(scope, receive, send_on)
            if not is_foreseen:
                raise

    def _endpoint(self, scope: Scope) -> Endpoint:
        """Returns the endpoint of a request, whose scope has the route from then on.

        Raises:
            HTTPException: there is none for its path, or for its method.
        """
        others: list[Route] = []
        for route in self.routes:
            match, found = route.matches(scope)
            if match is Match.FULL:
                scope["route"] = route
                scope.update(found)
                endpoint: Endpoint = route.endpoint
                return endpoint
            if match is Match.PARTIAL:
                others.append(route)
        if not others:
            raise HTTPException(404)
        scope["route"] = others[0]
        raise HTTPException(405, headers={"Allow": ", ".join(others[0].methods or ())})


_ANSWERS = (errors.OrcinusError, HTTPException, ClientDisconnect)
"""What endpoints may raise to answer a request."""


def _explained(request: Request, error: Exception) -> Response:
    response = unknown_fields.mark(request, openai_errors.answer(request, error))
    return anthropic_errors.translated(request, response)
