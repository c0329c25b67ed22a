"""The fleet: the pipelines of one model that serve at the same time under one leader.

All pipelines take their requests from one pool, in one order. So code that has a request for the
model need not know how many pipelines there are.
"""

from services.common.errors import Unavailable
from services.scheduler.core.request import Request
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.serving_loop import ServingLoop


class Fleet:
    """Holds the serving loops of all pipelines, and passes each request to the right loop."""

    def __init__(self, pool: RequestPool) -> None:
        self._pools = [pool]  # the pool as each pipeline sees it, by the pipeline's number
        self._loops: dict[int, ServingLoop] = {}  # of the pipelines that serve, by their numbers
        self._last: ServingLoop | None = None  # served last

    @property
    def is_serving(self) -> bool:
        """Whether at least one pipeline serves."""
        return bool(self._loops)

    @property
    def n_free(self) -> int:
        """Number of free places for requests in the pool."""
        return self._pools[0].n_free

    @property
    def loops(self) -> list[ServingLoop]:
        """The loops of the pipelines that serve."""
        return list(self._loops.values())

    def may_take_over(self, number: int) -> bool:
        """Returns whether another pipeline could run the requests of the pipeline `number`. Such a
        pipeline is of the same build, is not late and does not drain."""
        build, placement = self._pools[number].build, self._pools[number].shared.placement
        others = [self._pools[one] for one in self._loops if one != number]
        return any(
            one.build == build and not one.is_late and not placement.drains(one) for one in others
        )

    def pool_of(self, number: int) -> RequestPool:
        """Returns the `RequestPool` of the pipeline with the number `number`, and creates it at the
        first call. The pools of all pipelines share the waiting requests."""
        while len(self._pools) <= number:
            self._pools.append(self._pools[0].beside())
        return self._pools[number]

    def open(self, number: int, loop: ServingLoop) -> None:
        """Notes that a pipeline serves from now on."""
        self._loops[number] = self._last = loop

    def close(self, number: int) -> None:
        """Removes a pipeline that no longer serves. Does nothing if the pipeline has never
        served."""
        if (loop := self._loops.pop(number, None)) is not None:
            self._last = loop

    def submit(self, request: Request) -> None:
        """Puts a request into the pool. `Scheduler.submit` describes the errors. The pipeline with
        the largest memory decides whether the request could ever run.

        Raises:
            Unavailable: no pipeline serves.
        """
        if not self._loops:
            raise Unavailable("no pipeline serves at the moment")
        max(self._loops.values(), key=_memory_of).submit(request)

    def cancel(self, request: Request) -> None:
        """Cancels a request, whether it waits or runs in some pipeline."""
        for loop in self._loops.values():
            if loop.runs(request):
                loop.cancel(request)
                return
        if self._last is not None:
            self._last.cancel(request)

    def give_up(self, request: Request, message: str) -> None:
        """Ends a waiting request that no pipeline can serve any more, with `message` as the
        reason."""
        if self._last is not None:
            self._last.give_up(request, message)


def _memory_of(loop: ServingLoop) -> int:
    return loop.max_sequence_len
