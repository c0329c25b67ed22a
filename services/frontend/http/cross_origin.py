"""Cross-origin resource sharing (CORS): decides which web pages of other origins may use the
API."""

from collections.abc import Collection

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from services.frontend.http.anthropic import errors as anthropic_errors
from services.frontend.http.bodies import unknown_fields
from services.frontend.http.protocol.errors import RETRY_HEADER
from services.frontend.http.protocol.generating import UNENFORCED
from services.frontend.request.client_call import ID_HEADER

METHODS = ("GET", "HEAD", "POST")

RESPONSE_HEADERS = (
    "retry-after",
    unknown_fields.HEADER,
    UNENFORCED,
    RETRY_HEADER,
    ID_HEADER,
    anthropic_errors.ID_HEADER,
)


def with_cors(app: ASGIApp, origins: Collection[str]) -> ASGIApp:
    """Wraps `app` so that web pages of the given origins may use it. `*` stands for all origins.
    Returns `app` itself if there are no origins.

    A browser's preflight request needs no API key. A page's requests may have any headers, because
    clients in browsers send a dozen headers of their own. This is safe, because the API does not
    use cookies.
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
        # CORS costs each event of a stream a few microseconds: skipped for other clients.
        is_of_page = any(name == b"origin" for name, _ in scope["headers"])
        await (for_pages if is_of_page else app)(scope, receive, send)

    return either
