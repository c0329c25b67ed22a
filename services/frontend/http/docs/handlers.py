"""Handlers of GET /openapi.json and GET /docs."""

from starlette.requests import Request
from starlette.responses import Response

from services.frontend.http.docs import page
from services.frontend.http.protocol.api import Api
from services.frontend.http.transport.media_types import HTML, JSON


async def openapi(api: Api, _: Request) -> Response:
    """Answers with the OpenAPI document. No key is needed, because the document says nothing about
    the model."""
    return Response((await api.description.get()).document, media_type=JSON)


async def docs(api: Api, _: Request) -> Response:
    """Answers with the OpenAPI document as a page in HTML. No key is needed."""
    return Response((await api.description.get()).page, headers=page.HEADERS, media_type=HTML)
