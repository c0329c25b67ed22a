"""The number of calls that a streaming method serves at once.

A call whose reader takes nothing cannot be ended from this side: gRPC sends its status after all
that waits to be read. Such calls cost memory until their connections end, so there must not be any
number of them.
"""

import asyncio

from services.common.errors import PoolFull


class StreamPlaces:
    """The places of one method, or of several."""

    def __init__(self, n_places: int, *, of: str) -> None:
        """`of` says for people what takes a place, in the plural."""
        self.n_taken = 0
        """Calls that have not ended, or whose end has not been read."""
        self._n_places = n_places
        self._of = of

    def take(self) -> None:
        """Takes a place for the call whose task this is, until its end is read or its connection is
        gone.

        Raises:
            PoolFull: there is none.
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
