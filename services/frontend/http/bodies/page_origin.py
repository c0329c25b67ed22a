"""Refuses bodies that a browser sends for a web page without asking the server first whether the
page may send them. A browser sends plain texts and forms of a page to any server, and only hides
the answers from the page. A page of an origin that is not allowed must therefore send JSON, because
a browser asks the server before it sends JSON (`cross_origin.py`)."""

from collections.abc import Collection, Mapping

from services.common import errors
from services.frontend.http.transport.media_types import JSON


def check_page(headers: Mapping[str, str], origins: Collection[str]) -> None:
    """Raises InvalidRequest if the page's origin is not in `origins` and the content type is not
    JSON. A browser may have sent such a body without asking first."""
    origin = headers.get("origin")
    if origin is None or origin in origins or "*" in origins:
        return
    if headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise errors.InvalidRequest(
            "content-type", f"must be {JSON} where the request has an origin that is not let in"
        )
