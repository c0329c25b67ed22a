"""Limits the number of calls that a streaming method serves at once.

A server cannot end a call whose client reads nothing: gRPC sends the call's status after all
messages that wait to be read. Such calls cost memory until their connections end, so their number
is limited.
"""

import asyncio

from services.common.errors import PoolFull


class StreamPlaces:
    """Limits the number of concurrent calls of one method, or of several methods together. Each
    call takes one of a fixed number of places."""

    def __init__(self, n_places: int, *, of: str) -> None:
        """`n_places` is the number of places. `of` is the plural noun by which error messages name
        the calls, such as `streams`."""
        self.n_taken = 0
        """Number of places taken: by calls in progress, and by calls that have ended but whose
        status the client has not read."""
        self._n_places = n_places
        self._of = of

    def take(self) -> None:
        """Takes a place for the call that the current task serves. The place becomes free when the
        task ends: after the client has read the end of the call, or after the connection is lost.

        Raises:
            PoolFull: no place is free.
        """
        if self.n_taken >= self._n_places:
            raise PoolFull(f"there are {self._n_places} {self._of} already")
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("not in a task")
        self.n_taken += 1
        task.add_done_callback(self._give_back)

    def _give_back(self, _task: "asyncio.Task[object]") -> None:
        self.n_taken -= 1
