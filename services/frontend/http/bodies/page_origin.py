"""Refuses bodies that a browser may have sent for a web page of an origin that is not allowed.

A browser sends plain texts and forms of a page to any server without asking the server first, and
only hides the answers from the page. Before it sends JSON, it asks the server (`cross_origin.py`).
A page of an origin that is not allowed must therefore send JSON.
"""

from collections.abc import Collection, Mapping

from services.common import errors
from services.frontend.http.transport.media_types import JSON


def check_page(headers: Mapping[str, str], origins: Collection[str]) -> None:
    """Raises InvalidRequest if the request comes from a page whose origin is not in `origins`, and
    the content type is not JSON: a browser may send such a body without asking the server first.
    `*` in `origins` allows all pages."""
    origin = headers.get("origin")
    if origin is None or origin in origins or "*" in origins:
        return
    if headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise errors.InvalidRequest(
            "content-type", f"must be {JSON} where the request has an origin that is not let in"
        )
