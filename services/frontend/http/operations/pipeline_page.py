"""The page that shows the pipeline at work: its files, and the stream of events that feeds it.

The files hold nothing secret, so anybody may have them. The events tell of all clients, so where
there are API keys, only those with `may_watch` may have them, and only as long as they may.
"""

from functools import partial

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from services.common import errors
from services.frontend.api_keys import ApiKeys
from services.frontend.http.operations.page_files import INDEX, read_files
from services.frontend.http.protocol import credentials
from services.frontend.http.transport.event_output import EventOutput
from services.frontend.http.transport.event_stream import Event, EventStream, framed
from services.frontend.http.transport.request_headers import headers_of
from services.frontend.watching.view_feed import ViewFeed, note

EVENTS_PATH = "/pipeline/events"
FILES_PATH = "/page/{name:path}"
DECISIONS = "decisions"
"""The parameter with which events have the scheduling core's input, too."""

_TRUTHS = {"true": True, "false": False}


class PipelinePage:
    """The handlers of the page."""

    def __init__(self, feed: ViewFeed, *, api_keys: ApiKeys, comment_s: float) -> None:
        """Reads the page's files; streams have a comment after `comment_s` seconds without an
        event.

        Raises:
            OSError: a file cannot be read.
            ValueError: one is missing, or of a kind that is not known.
        """
        self._feed = feed
        self._api_keys = api_keys
        self._comment_s = comment_s
        self._files = read_files()

    async def index(self, request: Request) -> Response:
        """Answers with the page, to anybody."""
        return self._file(request, INDEX)

    async def file(self, request: Request) -> Response:
        """Answers with a file of the page, to anybody."""
        return self._file(request, request.path_params["name"])

    async def events(self, request: Request) -> Response:
        """Streams what the scheduler does."""
        key = credentials.shown_in(headers_of(request))
        self._api_keys.admit(key).check_watching()
        asked = request.query_params.get(DECISIONS, "false")
        if asked not in _TRUTHS:
            raise errors.InvalidRequest(DECISIONS, "must be true or false")
        write = partial(self._write_events, key, _TRUTHS[asked])
        return EventStream(write, explain=_explain, comment_s=self._comment_s)

    def _file(self, request: Request, name: str) -> Response:
        if name not in self._files:
            raise HTTPException(404)
        return self._files[name].answer(request.headers.get("if-none-match"))

    async def _write_events(
        self, key: str | None, wants_decisions: bool, output: EventOutput
    ) -> None:
        with self._feed.viewer(wants_decisions=wants_decisions) as viewer:
            await output.start()
            while True:
                told = await viewer.next()
                self._api_keys.account_of(key).check_watching()
                await output.write(b"data: " + b"\n\ndata: ".join(told) + b"\n\n")


def _explain(error: errors.OrcinusError) -> Event:
    return framed(note("away", text=error.message))
