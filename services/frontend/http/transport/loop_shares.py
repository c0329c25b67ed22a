"""Limits on how much work of a kind begins in each pass of the event loop of an HTTP server.

Requests with a body, requests without a body, and large reads have one share each. Requests
therefore do not wait for the uploads of other clients, and probes do not wait for requests.
"""

import asyncio

from services.frontend.loop_share import LoopShare


class LoopShares:
    """The shares of the event loop that the connections of one server use together."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.requests = LoopShare(loop)
        """Share for beginning requests with a body, and for ending requests whose client has
        disconnected."""
        self.lookups = LoopShare(loop)
        """Share of the event loop's time for beginning requests without a body."""
        self.reads = LoopShare(loop)
        """Share of the event loop's time for connections that resume reading or parsing."""
