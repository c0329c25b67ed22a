"""What placement (`placement.py`) knows of each pipeline, and which pipelines may run a request.

Two rules limit the choice of a pipeline, even where other pipelines have room. A request stays on
the build of workers that made its tokens, as long as a pipeline of this build could run it: another
build may continue with other tokens. And a pipeline that drains admits a request only if no other
pipeline may run it.
"""

from collections.abc import Collection, Hashable, Mapping
from typing import Protocol

from services.scheduler.core.request import Request


class Room(Protocol):
    """The part of a pipeline on which placement depends: its load, and its room for further
    requests."""

    @property
    def n_running(self) -> int:
        """Number of requests that the pipeline has admitted and that have not ended."""
        ...

    @property
    def n_prompt_tokens_left(self) -> int:
        """Number of prompt tokens of admitted requests that were in no batch yet."""
        ...

    @property
    def build(self) -> str:
        """Name of the build of the pipeline's workers."""
        ...

    def fits_ever(self, request: Request) -> bool:
        """Returns whether the pipeline could run a request if no other request ran in it."""
        ...

    @property
    def n_places(self) -> int:
        """Number of further requests that the pipeline could admit now, if its memory has room for
        them."""
        ...

    def takes(self, request: Request, *, n_more_blocks: int = 0) -> bool:
        """Returns whether the pipeline could admit a request in addition to other requests that
        need `n_more_blocks` blocks. Call this only if `n_places` is larger than the number of the
        other requests."""
        ...

    def n_blocks_for(self, request: Request) -> int:
        """Returns how many blocks the pipeline would reserve for a request if its prefix cache had
        no tokens of the request."""
        ...

    def n_uncached_tokens(self, request: Request) -> int:
        """Returns how many tokens of a request the pipeline would have to compute."""
        ...

    def wake(self) -> None:
        """Makes the pipeline select again, if it may send a batch."""
        ...


class Rooms:
    """All pipelines that serve, each with its `Room`."""

    def __init__(self) -> None:
        self._rooms: dict[Hashable, Room] = {}
        self._draining: dict[Hashable, bool] = {}  # whether the pipeline admits no request at all
        self._are_alike = True  # whether each pipeline may run each request for which it has room

    def __contains__(self, pipeline: Hashable) -> bool:
        return pipeline in self._rooms

    def __getitem__(self, pipeline: Hashable) -> Room:
        return self._rooms[pipeline]

    def __len__(self) -> int:
        return len(self._rooms)

    @property
    def all(self) -> Mapping[Hashable, Room]:
        """The `Room` of each pipeline, by pipeline."""
        return self._rooms

    @property
    def are_draining(self) -> bool:
        """Whether any pipeline drains."""
        return bool(self._draining)

    def add(self, pipeline: Hashable, room: Room) -> None:
        """Adds a pipeline that serves from now on."""
        self._rooms[pipeline] = room
        self._compare()

    def remove(self, pipeline: Hashable) -> None:
        """Removes a pipeline that no longer serves. Does nothing if the pipeline has never
        served."""
        self._rooms.pop(pipeline, None)
        self._draining.pop(pipeline, None)
        self._compare()

    def drain(self, pipeline: Hashable, *, is_last: bool) -> None:
        """Notes that a pipeline drains: it is about to end. With `is_last`, the pipeline admits no
        request from now on."""
        self._draining[pipeline] = is_last
        self._compare()

    def drains(self, pipeline: Hashable) -> bool:
        """Returns whether a pipeline drains."""
        return pipeline in self._draining

    def eligible(self, request: Request) -> Mapping[Hashable, Room]:
        """Returns the pipelines that may run a request, each with its `Room`. A pipeline that is
        full, or whose memory is too small, may be among them."""
        if self._are_alike:
            return self._rooms
        fitting = {
            one: room
            for one, room in self._rooms.items()
            if not self._draining.get(one) and room.fits_ever(request)
        }
        if request.generated_token_ids:
            same = {one: room for one, room in fitting.items() if room.build == request.build}
            fitting = same or fitting
        staying = {one: room for one, room in fitting.items() if one not in self._draining}
        return staying or fitting

    def is_needed(self, pipeline: Hashable, waiting: Collection[Request]) -> bool:
        """Returns whether a pipeline that drains must go on: no other pipeline stays, or a waiting
        request may run in this pipeline only. Returns False if `drain` was called with
        `is_last`."""
        if self._draining.get(pipeline):
            return False
        if all(one in self._draining for one in self._rooms):
            return True
        return any(pipeline in self.eligible(request) for request in waiting)

    def _compare(self) -> None:
        n_builds = len({room.build for room in self._rooms.values()})
        self._are_alike = n_builds < 2 and not self._draining
