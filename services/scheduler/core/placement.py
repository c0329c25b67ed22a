"""Placement: which of several pipelines admits a waiting request.

A pipeline that has room takes the next request in the order of the pool, with one exception: it
leaves the request to another pipeline that also has room and is better for it. How good a pipeline
is depends on two numbers of prompt tokens. The first counts tokens that the pipeline must compute
before the request: tokens of admitted requests that are not selected yet. Each running request
counts as `RUNNING_TOKENS` tokens in addition, because it has a token in each iteration. The second
number counts tokens of the request itself that the pipeline's prefix cache does not have. These
tokens count `COMPUTING_WEIGHT` times: they delay not only this request, but all later ones of the
pipeline. So requests spread over idle pipelines, and a request goes to the pipeline that has
computed its beginning, unless that one is much busier.

The choice is made anew at each selection and depends on what is known then, so that two pipelines
never leave a request to each other in turn: each leaves it only to one that is better. A pipeline
without room is never waited for. So no pipeline is idle while a request waits that it could run,
with one bounded exception. An idle pipeline leaves a request to a busy pipeline that has a part of
the request in its prefix cache, if the busy pipeline has fewer tokens to compute until the first
token of the request than the idle pipeline has. In this comparison, each token counts once.

Only pipelines that may run the request are compared (`room.py`).

The decision depends on the requests and the memory of the pipelines alone. It has no clock, so a
recording of the inputs is enough to repeat it.
"""

from collections.abc import Collection, Hashable, Iterator, Mapping
from itertools import islice

from services.scheduler.core.request import Request
from services.scheduler.core.room import Room, Rooms

RUNNING_TOKENS = 16
"""Number of prompt tokens that take about as long as the tokens of a running request: each running
request makes a pipeline less suitable by that many tokens."""

COMPUTING_WEIGHT = 3
"""Weight of a prompt token of the placed request itself, where a prompt token that is computed
before the request has the weight 1. The request's own tokens weigh more, because they delay all
later requests too."""


class Placement:
    """Decides which pipeline admits each waiting request."""

    def __init__(self) -> None:
        self._rooms = Rooms()
        self._n_most = 0  # most pipelines that were open at the same time

    @property
    def n_open(self) -> int:
        """Number of pipelines that admit requests; at least 1."""
        return max(1, len(self._rooms))

    def open(self, pipeline: Hashable, room: Room) -> None:
        """Lets a pipeline admit requests from now on."""
        self._rooms.add(pipeline, room)
        self._n_most = max(self._n_most, len(self._rooms))

    def close(self, pipeline: Hashable) -> None:
        """Removes a pipeline, which admits no request from now on."""
        self._rooms.remove(pipeline)

    def drain(self, pipeline: Hashable, *, is_last: bool) -> None:
        """Notes that a pipeline drains: it is about to end. Waiting requests are left to pipelines
        that do not drain, if any of them may run them. With `is_last`, the draining pipeline admits
        no request at all."""
        self._rooms.drain(pipeline, is_last=is_last)

    def drains(self, pipeline: Hashable) -> bool:
        """Returns whether a pipeline drains, so that it is about to end."""
        return self._rooms.drains(pipeline)

    def is_needed(self, pipeline: Hashable, waiting: Collection[Request]) -> bool:
        """Returns whether a pipeline that drains must go on, because no other pipeline stays, or
        because a waiting request may run in this pipeline only."""
        return self._rooms.is_needed(pipeline, waiting)

    def n_tokens_elsewhere(
        self, pipeline: Hashable, request: Request, *, n_more: int, n_more_blocks: int
    ) -> int | None:
        """Returns the least number of tokens that another pipeline would have to compute to
        continue a request that runs in `pipeline`. The other pipeline must also have room for
        `n_more` further requests, which need `n_more_blocks` blocks. Returns None if no pipeline
        has room, or if the request may stay in `pipeline`."""
        rooms = self._rooms.eligible(request)
        if pipeline in rooms:
            return None
        return min(
            (
                room.n_uncached_tokens(request)
                for room in rooms.values()
                if room.n_places > n_more and room.takes(request, n_more_blocks=n_more_blocks)
            ),
            default=None,
        )

    def n_blocks_elsewhere(self, pipeline: Hashable, request: Request) -> int:
        """Returns the largest number of blocks that another pipeline would reserve for a request; 0
        if there is no other pipeline."""
        return max(
            (
                room.n_blocks_for(request)
                for one, room in self._rooms.all.items()
                if one is not pipeline
            ),
            default=0,
        )

    def fits(self, pipeline: Hashable, request: Request) -> bool:
        """Returns whether a pipeline may run a request. Returns True for a pipeline that does not
        serve."""
        if pipeline not in self._rooms:
            return True
        eligible = self._rooms.eligible(request)
        return pipeline in eligible and eligible[pipeline].fits_ever(request)

    def fits_elsewhere(self, pipeline: Hashable, request: Request) -> bool:
        """Returns whether another pipeline than `pipeline` could run a request."""
        return any(
            room.fits_ever(request) for one, room in self._rooms.all.items() if one is not pipeline
        )

    def is_for(self, pipeline: Hashable, request: Request) -> bool:
        """Returns whether `pipeline` would be chosen for a waiting request if the request were the
        first in the order."""
        if self._has_no_choice(pipeline):
            return True
        return _Choice(self._rooms).of(request, pipeline) is pipeline

    def passing(self, pipeline: Hashable, requests: Iterator[Request]) -> Iterator[Request]:
        """Yields the requests that `pipeline` may have in its next batch, in order. The other
        requests are left to the pipelines that are chosen for them, and these pipelines are woken.
        The caller must take each request before it asks for the next one."""
        if self._has_no_choice(pipeline):
            return requests
        return self._chosen(pipeline, requests)

    def _has_no_choice(self, pipeline: Hashable) -> bool:
        """Returns whether `pipeline` gets every waiting request: there has never been a second
        pipeline and no pipeline drains, or `pipeline` is not open."""
        is_only = self._n_most < 2 and not self._rooms.are_draining
        return is_only or pipeline not in self._rooms

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
    """Chooses a pipeline for one waiting request after the other, during one selection. Each choice
    counts the requests before it as if their pipelines had admitted them."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._n_tokens: dict[Hashable, int] = {}
        # Places of the pipelines that have any, idle pipelines first. A pipeline without memory for
        # a request has none for the requests behind it.
        placed = [(one, room, n) for one, room in rooms.all.items() if (n := room.n_places)]
        placed.sort(key=lambda entry: entry[1].n_running > 0)
        self._n_places = {one: n for one, _, n in placed}

    def of(self, request: Request, selecting: Hashable) -> Hashable | None:
        """Returns the pipeline that is to admit a waiting request. `selecting` is the pipeline that
        selects a batch. If `selecting` has no place, the result may be any pipeline that could
        admit the request. Returns None if the request has to wait for memory and cannot run in
        `selecting`."""
        rooms = self._rooms.eligible(request)
        # A pipeline without a place leaves the request to any other, and compares none.
        compares = selecting in self._n_places
        taking = self._taking(request, rooms, n=len(rooms) if compares else 1)
        if not taking:
            fitting = {one for one, room in rooms.items() if room.fits_ever(request)}
            for one in fitting & self._n_places.keys():
                del self._n_places[one]
            return selecting if selecting in fitting else None
        best = taking[0]
        if compares:
            costs = {
                one: (self._before(one), rooms[one].n_uncached_tokens(request)) for one in taking
            }
            best = self._best(costs, selecting)
            self._n_tokens[best] = sum(costs[best]) + RUNNING_TOKENS
        self._n_places[best] -= 1
        if not self._n_places[best]:
            del self._n_places[best]
        return best

    def _taking(
        self, request: Request, rooms: Mapping[Hashable, Room], *, n: int
    ) -> list[Hashable]:
        """Returns at most `n` pipelines that have a place for a request, idle ones first."""
        placed = self._n_places
        return list(
            islice((one for one in placed if one in rooms and rooms[one].takes(request)), n)
        )

    def _best(self, costs: Mapping[Hashable, tuple[int, int]], selecting: Hashable) -> Hashable:
        """Returns the best pipeline for a request. `costs` has the number of tokens before the
        request and the number of its own tokens to compute, for each pipeline with room.
        `selecting` is chosen over pipelines that are equally good."""

        def soonest(one: Hashable) -> tuple[int, bool]:
            return sum(costs[one]), one is not selecting

        def cheapest(one: Hashable) -> tuple[int, bool]:
            n_before, n_own = costs[one]
            return n_before + COMPUTING_WEIGHT * n_own, one is not selecting

        best = min(costs, key=cheapest)
        idle = [one for one, (n_before, _) in costs.items() if not n_before]
        return min((best, *idle), key=soonest) if idle else best

    def _before(self, pipeline: Hashable) -> int:
        """Returns how many prompt tokens a pipeline has to compute before it begins another
        request. Running requests are counted as prompt tokens."""
        n_tokens = self._n_tokens.get(pipeline)
        if n_tokens is None:
            room = self._rooms[pipeline]
            n_tokens = room.n_prompt_tokens_left + RUNNING_TOKENS * room.n_running
            self._n_tokens[pipeline] = n_tokens
        return n_tokens
