"""The description of the API for its readers, made at the first request for it. To make it takes
0.25 s of processor time, which would lengthen the start of a frontend by a fifth."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple


class Description(NamedTuple):
    """The OpenAPI document in JSON, and as a page in HTML."""

    document: bytes
    page: str


class ApiDescription:
    """The description of the API. It is made once, in a thread, so that streams continue
    meanwhile."""

    def __init__(self, make: Callable[[], Description]) -> None:
        self._make = make
        self._made: asyncio.Task[Description] | None = None

    async def get(self) -> Description:
        """Returns the description. Concurrent calls share one computation, which continues if one
        of the calls is cancelled."""
        if self._made is None:
            self._made = asyncio.create_task(asyncio.to_thread(self._make))
        return await asyncio.shield(self._made)
