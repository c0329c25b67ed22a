"""Web pages of other origins: which of them a browser lets use the API (CORS).

A browser sends a page's texts and forms anywhere without asking, and only hides the answers. So
pages that may not use the API must send JSON, of which a browser asks first.
"""

from collections.abc import Collection, Mapping

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from services.common import errors
from services.frontend.http.anthropic import errors as anthropic_errors
from services.frontend.http.openai import errors as openai_errors
from services.frontend.http.transport import media_types
from services.frontend.request.client_call import ID_HEADER

METHODS = ("GET", "HEAD", "POST")

RESPONSE_HEADERS = (
    "retry-after",
    "x-orcinus-ignored-fields",
    openai_errors.RETRY_HEADER,
    ID_HEADER,
    anthropic_errors.ID_HEADER,
)


def check_page(headers: Mapping[str, str], origins: Collection[str]) -> None:
    """Raises InvalidRequest for a body that a browser may have sent for a page of none of these
    origins without asking first."""
    origin = headers.get("origin")
    if origin is None or origin in origins or "*" in origins:
        return
    if headers.get("content-type", "").partition(";")[0].strip().lower() != media_types.JSON:
        raise errors.InvalidRequest(
            "content-type",
            f"must be {media_types.JSON} where the request has an origin that is not let in",
        )


def with_cors(app: ASGIApp, origins: Collection[str]) -> ASGIApp:
    """Returns the app for pages of these origins, `*` for all; as it is if there are none.

    A browser's question before a request needs no key. Requests may have any headers, since clients
    for browsers send a dozen of their own; nothing here depends on a browser's cookies.
    """
    if not origins:
        return app
    for_pages = CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=METHODS,
        allow_headers=("*",),
        expose_headers=RESPONSE_HEADERS,
    )

    async def either(scope: Scope, receive: Receive, send: Send) -> None:
        # It costs each event of a stream a few microseconds, which others need not pay.
        is_of_page = any(name == b"origin" for name, _ in scope["headers"])
        await (for_pages if is_of_page else app)(scope, receive, send)

    return either
