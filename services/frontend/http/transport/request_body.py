"""Reads the body of a request, within limits of size, structure, time and memory."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import Request

from services.common import errors
from services.frontend.http.transport.json_structure import StructureCount
from services.frontend.http.transport.request_headers import headers_of
from services.frontend.request.memory_budget import MemoryBudget, Share
from services.frontend.request.refusals import Refusal, Refusals

NEARLY_JSON = frozenset(
    {
        "",
        "*/*",
        "application/octet-stream",
        "application/x-www-form-urlencoded",
        "text/javascript",
        "text/plain",
    }
)
"""Media types that clients send by mistake with bodies that are JSON. The empty text stands for a
body without a type."""

SMALL_BODY_BYTES = 64 * 2**10
"""Largest size of a small body, in bytes. A part of the memory budget is kept free for small
bodies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """The limits of bodies. `FrontendSettings` explains the fields."""

    max_bytes: int
    limit_s: float
    budget: MemoryBudget
    refusals: Refusals

    def check_size(self, n_bytes: int) -> None:
        """Raises TooLarge if a body of `n_bytes` bytes is too large."""
        if n_bytes > self.max_bytes:
            self.refusals[Refusal.BODY_TOO_LARGE] += 1
            raise errors.TooLarge("body", f"must not be larger than {self.max_bytes} bytes")

    def check_room(self, n_bytes: int) -> None:
        """Raises PoolFull if the memory budget has no room for a body of `n_bytes` bytes. A body of
        any size passes while nothing else uses the budget. Must be called before the body is
        received."""
        if self.budget.n_bytes and not self.budget.has_room(n_bytes + self.reserve(n_bytes)):
            raise self.budget.refuse()

    def reserve(self, n_bytes: int) -> int:
        """Returns the part of the memory budget, in bytes, that must stay free for small bodies
        when a body of `n_bytes` bytes is received."""
        return 0 if n_bytes <= SMALL_BODY_BYTES else self.budget.max_bytes // 4


def check_media(headers: Mapping[str, str]) -> None:
    """Raises Unsupported if the headers say that the body is compressed, or has a type that cannot
    be JSON. Types that clients often send with JSON by mistake are accepted, such as curl's
    default."""
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise errors.Unsupported("content-encoding", "a body must come as it is")
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type.endswith(("/json", "+json")) or media_type in NEARLY_JSON:
        return
    raise errors.Unsupported("content-type", "must be application/json")


async def read_body(request: Request, limits: BodyLimits, share: Share) -> bytes:
    """Returns the body of a request. `share` grows while the body is received. Large bodies leave a
    quarter of the memory budget free for small bodies, so that slow uploads of large bodies do not
    keep small bodies out.

    Raises:
        Unsupported: the headers say that the body is compressed, or that it is not JSON.
        TooLarge: the body or its declared length is too large, or the body has too much structure.
        TimedOut: the body was not received within `limits.limit_s`.
        PoolFull: the memory budget has no room for the body.
    """
    headers = headers_of(request)
    check_media(headers)
    declared = headers.get("content-length", "0")
    n_declared = int(declared) if declared.isdecimal() else 0
    limits.check_size(n_declared)
    limits.check_room(n_declared)
    body, structure = bytearray(), StructureCount(limits.refusals)
    try:
        async with asyncio.timeout(limits.limit_s):
            async for chunk in request.stream():
                n_bytes = len(body) + len(chunk)
                limits.check_size(n_bytes)
                share.grow(len(chunk), leaving=limits.reserve(n_bytes))
                structure.add(chunk)
                body += chunk
    except TimeoutError:
        limits.refusals[Refusal.BODY_TIMEOUT] += 1
        raise errors.TimedOut(f"the body did not come in {limits.limit_s:g} s") from None
    return bytes(body)
