"""Placement: which of several pipelines admits a waiting request.

A pipeline that has room takes the next request in the order of the pool, with one exception: it
leaves the request to another pipeline that also has room and would have the first token sooner.
How soon that is, is compared by the prompt tokens that the pipeline computes before that token:
those of the requests that it has admitted and that have no token yet, and those of the request
itself that its prefix cache does not have. Each running request counts as `RUNNING_TOKENS` tokens
in addition, since it has a token in each iteration. So requests spread over idle pipelines, and a
request goes to the pipeline that has computed its beginning, unless that one is much busier.

A request that is left to a pipeline stays with that pipeline as long as the pipeline has room for
it, so that two pipelines never leave a request to each other in turn. A pipeline without room is
never waited for: as soon as another one has room, that one takes the request. So no pipeline is
idle while a request waits that it could run, except for the time until the iteration ends in which
the chosen pipeline is.

The decision depends on the requests and the memory of the pipelines alone. It has no clock, so a
recording of the inputs is enough to repeat it.
"""

from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import Protocol

from services.scheduler.core.request import Request

RUNNING_TOKENS = 16
"""Prompt tokens that count for each running request."""


class Room(Protocol):
    """The part of a pipeline on which placement depends: its requests, and the room for others."""

    @property
    def running(self) -> Collection[Request]:
        """The requests that the pipeline has admitted."""
        ...

    def fits_ever(self, request: Request) -> bool:
        """Returns whether the pipeline could run a request if it had no other."""
        ...

    def has_room(self, request: Request, *, n_more: int) -> bool:
        """Returns whether the pipeline could admit a request now, and `n_more` others."""
        ...

    def n_uncached_tokens(self, request: Request) -> int:
        """Returns how many tokens of a request the pipeline would have to compute."""
        ...

    def wake(self) -> None:
        """Makes the pipeline select again, if it may send a batch."""
        ...


class Placement:
    """The pipelines that may admit requests, and the waiting requests that are left to one of
    them."""

    def __init__(self) -> None:
        self._rooms: dict[Hashable, Room] = {}  # by pipeline
        self._left: dict[Request, Hashable] = {}  # waiting requests, and the chosen pipelines

    @property
    def n_open(self) -> int:
        """Number of pipelines that may admit requests."""
        return len(self._rooms)

    def open(self, pipeline: Hashable, room: Room) -> None:
        """Lets a pipeline admit requests from now on."""
        self._rooms[pipeline] = room

    def close(self, pipeline: Hashable) -> None:
        """Lets a pipeline admit no further requests. No request is left to it any more."""
        self._rooms.pop(pipeline, None)
        self._left = {request: to for request, to in self._left.items() if to is not pipeline}

    def forget(self, request: Request) -> None:
        """Notes that a request waits no longer."""
        if self._left:
            self._left.pop(request, None)

    def fits_elsewhere(self, pipeline: Hashable, request: Request) -> bool:
        """Returns whether another pipeline than `pipeline` could run a request."""
        return any(
            room.fits_ever(request) for one, room in self._rooms.items() if one is not pipeline
        )

    def is_for(self, pipeline: Hashable, request: Request) -> bool:
        """Returns whether no other pipeline with room was chosen for a waiting request."""
        chosen = self._left.get(request)
        return chosen is None or chosen is pipeline or not self._has_room(chosen, request)

    def passing(self, pipeline: Hashable, requests: Iterator[Request]) -> Iterator[Request]:
        """Yields the requests that `pipeline` may have in its next batch, in order. Leaves the
        other ones to the pipelines that are chosen for them, and wakes these. The caller must take
        each request before it asks for the next one."""
        if len(self._rooms) < 2:
            return requests
        return self._chosen(pipeline, requests)

    def _chosen(self, pipeline: Hashable, requests: Iterator[Request]) -> Iterator[Request]:
        choice: _Choice | None = None
        for request in requests:
            if request.reservation is None:
                if choice is None:
                    choice = _Choice(self._rooms, self._left)
                if choice.of(request, pipeline) is not pipeline:
                    continue
            yield request

    def _has_room(self, pipeline: Hashable, request: Request) -> bool:
        room = self._rooms.get(pipeline)
        return room is not None and room.has_room(request, n_more=0)


class _Choice:
    """The choices of one selection. Each choice counts the requests that were chosen for a pipeline
    before and that the pipeline has not admitted yet."""

    def __init__(self, rooms: Mapping[Hashable, Room], left: dict[Request, Hashable]) -> None:
        self._rooms = rooms
        self._left = left
        self._n_tokens = {one: _n_tokens_before(room) for one, room in rooms.items()}
        self._n_chosen = dict.fromkeys(rooms, 0)
        for request, chosen in left.items():
            self._note(request, chosen)

    def of(self, request: Request, selecting: Hashable) -> Hashable:
        """Returns the pipeline that admits a waiting request. `selecting` is the pipeline that asks
        and could admit the request at once."""
        chosen = self._left.get(request)
        if chosen is not None:
            if chosen is selecting or self._rooms[chosen].has_room(request, n_more=0):
                return chosen
            del self._left[request]
        rooms = [
            one
            for one, room in self._rooms.items()
            if room.has_room(request, n_more=self._n_chosen[one])
        ]
        if not rooms:
            # The first request waits for memory. No request behind it is admitted meanwhile, by no
            # pipeline in which it would fit.
            return selecting if self._fits(selecting, request) else None
        # Where two are equally good, the one that asks is chosen: `False` comes before `True`.
        best = min(rooms, key=lambda one: (self._score(one, request), one is not selecting))
        self._note(request, best)
        if best is not selecting:
            self._left[request] = best
            self._rooms[best].wake()
        return best

    def _fits(self, pipeline: Hashable, request: Request) -> bool:
        room = self._rooms.get(pipeline)
        return room is None or room.fits_ever(request)

    def _score(self, pipeline: Hashable, request: Request) -> int:
        """Returns the number of prompt tokens, or as much work, before the first token of a request
        in a pipeline."""
        return self._n_tokens[pipeline] + self._rooms[pipeline].n_uncached_tokens(request)

    def _note(self, request: Request, chosen: Hashable) -> None:
        self._n_chosen[chosen] += 1
        self._n_tokens[chosen] += RUNNING_TOKENS + self._rooms[chosen].n_uncached_tokens(request)


def _n_tokens_before(room: Room) -> int:
    """Returns how many prompt tokens a pipeline has to compute for its running requests. Each
    running request counts as `RUNNING_TOKENS` tokens in addition."""
    return sum(
        RUNNING_TOKENS
        + (0 if one.n_new_tokens else max(0, one.n_prefill_tokens - one.n_cached_tokens))
        for one in room.running
    )
