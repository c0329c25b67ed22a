"""Placement: which of several pipelines admits a waiting request.

A pipeline that has room takes the next request in the order of the pool, with one exception: it
leaves the request to another pipeline that also has room and would have the first token sooner.
How soon that is, is compared by the prompt tokens that the pipeline computes before that token:
those of the requests that it has admitted and that have no token yet, and those of the request
itself that its prefix cache does not have. Each running request counts as `RUNNING_TOKENS` tokens
in addition, since it has a token in each iteration. So requests spread over idle pipelines, and a
request goes to the pipeline that has computed its beginning, unless that one is much busier.

The choice is made anew at each selection and depends on what is known then, so that two pipelines
never leave a request to each other in turn: each leaves it only to one that is better. A pipeline
without room is never waited for. So no pipeline is idle while a request waits that it could run,
with one bounded exception: the request is left to a busy pipeline as long as the tokens before its
first token are fewer there than those that the idle pipeline would compute for the request alone.

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
    """The pipelines that may admit requests."""

    def __init__(self) -> None:
        self._rooms: dict[Hashable, Room] = {}  # by pipeline
        self._n_most = 0  # most pipelines that were open at the same time

    def open(self, pipeline: Hashable, room: Room) -> None:
        """Lets a pipeline admit requests from now on."""
        self._rooms[pipeline] = room
        self._n_most = max(self._n_most, len(self._rooms))

    def close(self, pipeline: Hashable) -> None:
        """Lets a pipeline admit no further requests."""
        self._rooms.pop(pipeline, None)

    def fits(self, pipeline: Hashable, request: Request) -> bool:
        """Returns whether a pipeline could run a request. Returns True for a pipeline that admits
        no requests."""
        room = self._rooms.get(pipeline)
        return room is None or room.fits_ever(request)

    def fits_elsewhere(self, pipeline: Hashable, request: Request) -> bool:
        """Returns whether another pipeline than `pipeline` could run a request."""
        return any(
            room.fits_ever(request) for one, room in self._rooms.items() if one is not pipeline
        )

    def is_for(self, pipeline: Hashable, request: Request) -> bool:
        """Returns whether a waiting request would not be left to another pipeline, if it were the
        first in the order."""
        if self._n_most < 2 or pipeline not in self._rooms:
            return True
        return _Choice(self._rooms).of(request, pipeline) is pipeline

    def passing(self, pipeline: Hashable, requests: Iterator[Request]) -> Iterator[Request]:
        """Yields the requests that `pipeline` may have in its next batch, in order. Leaves the
        other ones to the pipelines that are chosen for them, and wakes these. The caller must take
        each request before it asks for the next one."""
        if self._n_most < 2 or pipeline not in self._rooms:
            return requests
        return self._chosen(pipeline, requests)

    def _chosen(self, pipeline: Hashable, requests: Iterator[Request]) -> Iterator[Request]:
        choice: _Choice | None = None
        for request in requests:
            if request.reservation is None:
                if choice is None:
                    choice = _Choice(self._rooms)
                chosen = choice.of(request, pipeline)
                if chosen is not pipeline:
                    if chosen is not None:
                        self._rooms[chosen].wake()
                    continue
            yield request


class _Choice:
    """The choices of one selection, for one waiting request after the other. Each choice counts the
    requests before it as if their pipelines had admitted them."""

    def __init__(self, rooms: Mapping[Hashable, Room]) -> None:
        self._rooms = rooms
        self._n_tokens: dict[Hashable, int] = {}
        self._n_chosen = dict.fromkeys(rooms, 0)
        self._blocked: set[Hashable] = set()

    def of(self, request: Request, selecting: Hashable) -> Hashable | None:
        """Returns the pipeline that is to admit a waiting request. `selecting` is the pipeline that
        asks and could admit the request at once. Returns None if the request waits for the memory
        of another pipeline, since it would not fit into that of `selecting`."""
        scores = {
            one: self._before(one) + room.n_uncached_tokens(request)
            for one, room in self._rooms.items()
            if one not in self._blocked and room.has_room(request, n_more=self._n_chosen[one])
        }
        if not scores:
            # The request waits for memory. Where it would fit, no request behind it is admitted.
            fitting = {one for one, room in self._rooms.items() if room.fits_ever(request)}
            self._blocked |= fitting
            return selecting if selecting in fitting else None
        # Where two are equally good, the one that asks is chosen: `False` comes before `True`.
        best = min(scores, key=lambda one: (scores[one], one is not selecting))
        self._n_chosen[best] += 1
        self._n_tokens[best] = scores[best] + RUNNING_TOKENS
        return best

    def _before(self, pipeline: Hashable) -> int:
        """Returns how many prompt tokens a pipeline has to compute before another request."""
        n_tokens = self._n_tokens.get(pipeline)
        if n_tokens is None:
            n_tokens = self._n_tokens[pipeline] = _n_tokens_before(self._rooms[pipeline])
        return n_tokens


def _n_tokens_before(room: Room) -> int:
    """Returns how many prompt tokens a pipeline has to compute for its running requests. Each
    running request counts as `RUNNING_TOKENS` tokens in addition."""
    return sum(
        RUNNING_TOKENS
        + (0 if one.n_new_tokens else max(0, one.n_prefill_tokens - one.n_cached_tokens))
        for one in room.running
    )
