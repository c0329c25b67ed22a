"""Handler of GET /metrics on the port of the API. The route exists if the setting `api_metrics` is
on."""

import asyncio

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from services.common.metrics import exposed
from services.frontend.http.protocol.api import Api


async def metrics(api: Api, request: Request) -> Response:
    """Answers with the metrics of this process in the text format of Prometheus."""
    if api.registry is None:
        raise HTTPException(404)
    api.admit(request)
    accept = request.headers.get("accept", "")
    # In a thread, as on the port for metrics: there may be thousands of series.
    data, media_type = await asyncio.to_thread(exposed, api.registry, accept)
    return Response(data, headers={"content-type": media_type})
