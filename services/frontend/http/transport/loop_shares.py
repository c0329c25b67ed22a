"""Limits on how much work of each kind begins in one pass of an HTTP server's event loop.

The three kinds are requests with a body, requests without a body, and large reads. Each kind has
its own share of the pass. So requests do not wait for the uploads of other clients, and probes do
not wait for requests.
"""

import asyncio

from services.frontend.loop_share import LoopShare


class LoopShares:
    """The shares of the event loop that all connections of one server use together."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.requests = LoopShare(loop)
        """Share of the event loop's time for beginning requests with a body, and for ending
        requests whose client has disconnected."""
        self.lookups = LoopShare(loop)
        """Share of the event loop's time for beginning requests without a body."""
        self.reads = LoopShare(loop)
        """Share of the event loop's time for connections that resume reading or parsing."""
