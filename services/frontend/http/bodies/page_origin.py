"""Bodies that a browser sends for a web page without asking whether the page may.

A browser sends a page's texts and forms anywhere, and only hides the answers. So pages that may not
use the API must send JSON, before which a browser asks (`cross_origin.py`).
"""

from collections.abc import Collection, Mapping

from services.common import errors
from services.frontend.http.transport.media_types import JSON


def check_page(headers: Mapping[str, str], origins: Collection[str]) -> None:
    """Raises InvalidRequest for a body that a browser may have sent without asking first for a page
    of none of these origins."""
    origin = headers.get("origin")
    if origin is None or origin in origins or "*" in origins:
        return
    if headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise errors.InvalidRequest(
            "content-type", f"must be {JSON} where the request has an origin that is not let in"
        )
