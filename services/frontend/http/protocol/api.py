"""What the handlers of all routes share: the service, the caller's account, and the body."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request

from services.frontend.api_keys import Account, ApiKeys
from services.frontend.generation.generation_service import GenerationService
from services.frontend.http.bodies import page_origin
from services.frontend.http.bodies.reader import Body, parse_body
from services.frontend.http.bodies.unknown_fields import UnknownFields
from services.frontend.http.protocol import credentials
from services.frontend.http.transport.event_stream import LAST_EVENT_ID
from services.frontend.http.transport.request_body import BodyLimits, read_body
from services.frontend.http.transport.request_headers import headers_of
from services.frontend.watching.view_feed import ViewFeed


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """The parts of the frontend that handlers work with."""

    service: GenerationService
    bodies: BodyLimits
    api_keys: ApiKeys
    reason_against_serving: Callable[[], str]
    """Says why requests that come now would get no tokens; an empty text where they would."""
    comment_s: float
    """Seconds without an event after which a stream has a comment."""
    unknown: UnknownFields
    origins: Collection[str] = ()
    """Origins of the web pages that may use the API, `*` for all."""
    feed: ViewFeed | None = None
    """What the scheduler does, if that may be watched."""
    document: bytes = b""
    """The OpenAPI document in JSON."""
    docs_page: str = ""
    """The OpenAPI document as a page to read."""

    def admit(self, request: Request) -> Account:
        """Returns the account of the caller.

        Raises:
            Unauthenticated: the request shows no API key that is known.
        """
        return self.api_keys.admit(credentials.shown_in(headers_of(request)))

    def admit_generation(self, request: Request) -> Account:
        """Returns the account of the caller, if there is room for another request. A stream that
        goes on has its room already.

        Raises:
            Unauthenticated: the request shows no API key that is known.
            PoolFull: there is no room.
        """
        account = self.admit(request)
        if LAST_EVENT_ID.lower() not in headers_of(request):
            self.service.check_room(account)
        return account

    async def read(self, request: Request, kind: type[Body], account: Account) -> Body:
        """Returns the body of a request. From here on the body counts as an answer in flight: an
        account that may have two answers has no more uploads. The request that the body stands for
        takes a share of its own when it is opened."""
        page_origin.check_page(headers_of(request), self.origins)
        with account.receiving(), self.bodies.budget.share() as share:
            data = await read_body(request, self.bodies, share)
            return parse_body(kind, data, partial(self.unknown.found, request))
