"""WatchService: the gRPC service for watchers of the scheduler."""

from collections.abc import AsyncIterator
from typing import Any

from orcinus.v1 import watch_pb2

from services.common import tls
from services.common.errors import Unavailable
from services.common.stream_places import StreamPlaces
from services.scheduler.watching.watching import Watching

SERVICE = watch_pb2.DESCRIPTOR.services_by_name["WatchService"]

CALLERS = {"Watch": {tls.FRONTEND}}
"""Roles that may call each method."""

MAX_WATCHERS = 32
"""Maximum number of concurrent calls of `Watch`."""


class WatchService:
    """The servicer of orcinus.v1.WatchService."""

    def __init__(self, watching: Watching, *, max_watchers: int = MAX_WATCHERS) -> None:
        self.is_leading = False
        """Whether this scheduler leads; other schedulers have no events."""
        self._watching = watching
        self._places = StreamPlaces(max_watchers, of="watchers")

    async def Watch(
        self, request: watch_pb2.WatchRequest, context: Any
    ) -> AsyncIterator[watch_pb2.WatchResponse]:
        """Streams the present state and all further events, across epochs.

        Raises:
            Unavailable: this scheduler does not lead any more, or the watcher was too slow.
            PoolFull: there are too many watchers.
        """
        if not self.is_leading:
            raise Unavailable("this scheduler is not the leader")
        self._places.take()
        with self._watching.watch(has_decisions=request.has_decisions) as watcher:
            # The metadata tells the caller that it gets all events from now on.
            await context.send_initial_metadata(())
            while True:
                yield await watcher.next_message()
