"""The OpenAPI document, in JSON and as an HTML page. Both are made when a client first requests one
of them, because making them takes 0.25 s of processor time and would make the start of a frontend a
fifth longer."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple


class Description(NamedTuple):
    """The OpenAPI document in JSON, and as a page in HTML."""

    document: bytes
    page: str


class ApiDescription:
    """The OpenAPI document and its page, which are made once. They are made in a thread, so that
    streams continue meanwhile."""

    def __init__(self, make: Callable[[], Description]) -> None:
        self._make = make
        self._made: asyncio.Task[Description] | None = None

    async def get(self) -> Description:
        """Returns the description. Concurrent calls share one computation, which continues if one
        of the calls is cancelled."""
        if self._made is None:
            self._made = asyncio.create_task(asyncio.to_thread(self._make))
        return await asyncio.shield(self._made)
