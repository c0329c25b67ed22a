"""The shares of the event loop that one HTTP server's connections have.

Requests with and without a body, and large reads, have one each: nobody's request waits for what
others upload, and no probe for what they ask.
"""

import asyncio

from services.frontend.loop_share import LoopShare


class LoopShares:
    """The shares of one server's connections."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.requests = LoopShare(loop)
        """Requests that begin, and end because their client has gone."""
        self.lookups = LoopShare(loop)
        """Requests without a body that begin."""
        self.reads = LoopShare(loop)
        """Connections that read on, or parse on."""
