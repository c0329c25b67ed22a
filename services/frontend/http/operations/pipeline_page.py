"""The page that shows the pipeline at work: the files of the page, and the stream of events that
the page shows.

The files hold nothing secret, so clients need no key for the files. The events describe the
requests of all clients. With API keys, only accounts with `may_watch` get the events, and the
stream ends when an account loses `may_watch`.
"""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from services.common import errors
from services.frontend.api_keys import Account
from services.frontend.http.operations.page_files import INDEX, page_files
from services.frontend.http.protocol import credentials
from services.frontend.http.protocol.api import Api
from services.frontend.http.transport.event_output import EventOutput
from services.frontend.http.transport.event_stream import Event, EventStream, framed
from services.frontend.http.transport.request_headers import headers_of
from services.frontend.models.served_model import ServedModel
from services.frontend.watching.view_feed import note

DECISIONS = "decisions"
"""Name of the query parameter with which a viewer requests the events about decisions of the
scheduling core, in addition to the other events."""

MODEL = "model"
"""Name of the query parameter that names the model whose scheduler is watched."""

_TRUTHS = {"true": True, "false": False}


async def index(_: Api, request: Request) -> Response:
    """Answers with `index.html` of the page that shows the pipeline."""
    return _file(request, INDEX)


async def file(_: Api, request: Request) -> Response:
    """Answers with the file of the page that the path names, or with the status 404 if there is
    none."""
    return _file(request, request.path_params["name"])


def _file(request: Request, name: str) -> Response:
    files = page_files()
    if name not in files:
        raise HTTPException(404)
    return files[name].answer(request.headers.get("if-none-match"))


async def watch(api: Api, request: Request) -> Response:
    """Answers with a stream of events that show what the scheduler does."""
    key = credentials.shown_in(headers_of(request))
    model = request.query_params.get(MODEL, "")
    _watched(api, api.api_keys.admit(key), model)
    asked = request.query_params.get(DECISIONS, "false")
    if asked not in _TRUTHS:
        raise errors.InvalidRequest(DECISIONS, "must be true or false")
    return _stream(api, key, model, wants_decisions=_TRUTHS[asked])


def _watched(api: Api, account: Account, model: str) -> ServedModel:
    """Returns the model whose scheduler a caller requests to watch. `model` is a name of the model,
    and may be empty if the caller may use only one model.

    Raises:
        PermissionDenied: the caller may not watch.
        InvalidRequest: the name is empty, and the caller may use several models.
        UnknownModel: no model that the caller may use has the name.
    """
    account.check_watching()
    return api.models.select(model, account)


def _stream(api: Api, key: str | None, model: str, *, wants_decisions: bool) -> EventStream:
    async def write(output: EventOutput) -> None:
        feed = _watched(api, api.api_keys.account_of(key), model).feed
        with feed.viewer(wants_decisions=wants_decisions) as viewer:
            await output.start()
            while True:
                told = await viewer.next()
                _watched(api, api.api_keys.account_of(key), model)
                await output.write(b"data: " + b"\n\ndata: ".join(told) + b"\n\n")

    return EventStream(write, explain=_explain, comment_s=api.comment_s)


def _explain(error: errors.OrcinusError) -> Event:
    return framed(note("away", text=error.message))
