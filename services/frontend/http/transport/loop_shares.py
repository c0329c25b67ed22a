"""The shares of the event loop that the connections of one HTTP server have.

Requests with a body, requests without one and large reads have a share each: requests do not wait
for the uploads of other clients, and probes do not wait for requests.
"""

import asyncio

from services.frontend.loop_share import LoopShare


class LoopShares:
    """The shares of the connections of one server."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.requests = LoopShare(loop)
        """For requests that begin, and for those that end because their client has gone."""
        self.lookups = LoopShare(loop)
        """For requests without a body that begin."""
        self.reads = LoopShare(loop)
        """For connections that resume reading or parsing."""
