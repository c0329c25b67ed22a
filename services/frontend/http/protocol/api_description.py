"""The description of the API for its readers, made when somebody asks for it.

Making it takes a quarter of a second of a processor, which would be a fifth of a frontend's start.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple


class Description(NamedTuple):
    """The OpenAPI document in JSON, and as a page in HTML."""

    document: bytes
    page: str


class ApiDescription:
    """A description that is made once, in a thread, so that streams go on meanwhile."""

    def __init__(self, make: Callable[[], Description]) -> None:
        self._make = make
        self._made: asyncio.Task[Description] | None = None

    async def get(self) -> Description:
        """Returns the description. Concurrent calls wait for one computation. If one of these calls
        is cancelled, the computation goes on for the others."""
        if self._made is None:
            self._made = asyncio.create_task(asyncio.to_thread(self._make))
        return await asyncio.shield(self._made)
