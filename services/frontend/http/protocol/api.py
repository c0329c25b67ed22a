"""The parts of the frontend that the handlers of all routes share, and the steps of reading a
request: admitting the caller and reading the body."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry
from starlette.requests import Request

from services.frontend.api_keys import Account, ApiKeys
from services.frontend.http.bodies import page_origin
from services.frontend.http.bodies.reader import Body, parse_body
from services.frontend.http.bodies.unknown_fields import UnknownFields
from services.frontend.http.protocol import credentials
from services.frontend.http.protocol.api_description import ApiDescription, Description
from services.frontend.http.transport.event_stream import LAST_EVENT_ID
from services.frontend.http.transport.request_body import BodyLimits, read_body
from services.frontend.http.transport.request_headers import headers_of
from services.frontend.models.served_models import ServedModels
from services.receipts.key_file import KeyFile

_NOTHING = ApiDescription(lambda: Description(b"", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """The parts of the frontend that handlers use."""

    models: ServedModels
    bodies: BodyLimits
    api_keys: ApiKeys
    comment_s: float
    """Seconds without an event after which a stream sends a comment, to keep the connection
    open."""
    unknown: UnknownFields
    origins: Collection[str] = ()
    """Origins of the web pages that may use the API; `*` allows all pages."""
    has_page: bool = False
    """Whether the server has the page that shows the pipeline, so that clients may watch the
    schedulers."""
    registry: CollectorRegistry | None = None
    """Metrics of this process; None if the API does not have `/metrics`."""
    receipt_keys: KeyFile | None = None
    """Keys that sign receipts; None if no receipts are made."""
    description: ApiDescription = _NOTHING
    """The OpenAPI document and the page that shows it."""

    def admit(self, request: Request) -> Account:
        """Returns the account of the caller, and counts the request against the limit of the
        caller's API key.

        Raises:
            Unauthenticated: the request has no known API key.
            PoolFull: the API key allows no further request at the moment.
        """
        return self.api_keys.admit(credentials.shown_in(headers_of(request)))

    def admit_generation(self, request: Request) -> Account:
        """Does what `admit` does, and checks that the server has room for another request that
        generates. A request that resumes a stream is admitted without this check.

        Raises:
            Unauthenticated: the request has no known API key.
            PoolFull: there is no room for another request, or the API key allows none at the
            moment.
            Unavailable: this process is stopping.
        """
        account = self.admit(request)
        if LAST_EVENT_ID.lower() not in headers_of(request):
            self.models.check_room(account)
        return account

    async def read(self, request: Request, kind: type[Body], account: Account) -> Body:
        """Reads the body of a request, and parses it as the model `kind`. Meanwhile the body counts
        as an answer in flight of the account. So an account that may have two answers in flight can
        also upload only two bodies at a time. The answers themselves are counted later, when the
        generation is opened."""
        page_origin.check_page(headers_of(request), self.origins)
        with account.receiving(), self.bodies.budget.share() as share:
            data = await read_body(request, self.bodies, share)
            return parse_body(kind, data, partial(self.unknown.found, request))
