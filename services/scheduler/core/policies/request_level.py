"""Request-level scheduling, as before Orca (Yu et al., OSDI'22, section 3, challenge 1).

A batch of requests runs until all of them are complete. Requests that arrive meanwhile wait for the
next batch, and requests that end early wait for the others of their batch. A pipeline of several
stages has several such batches in flight.

Here a complete request is no longer computed. `whole_batches.py` withholds its answer.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import ClassVar

from services.scheduler.core.memory.reservation import Reservation
from services.scheduler.core.policies import MemoryView, Policy, PolicyOptions, PoolView, Selection
from services.scheduler.core.request import Request, RequestState

_FINISHED = RequestState.FINISHED


class RequestLevelPolicy(Policy):
    """The policy `request_level`: whole batches in the order of arrival, `n_shares` at a time."""

    name: ClassVar[str] = "request_level"

    def __init__(self, options: PolicyOptions, *, microbatch_size: int | None = None) -> None:
        """With `microbatch_size`, a batch passes through the pipeline in parts of that many
        requests."""
        super().__init__(options)
        self._microbatch_size = microbatch_size or self.max_batch_size
        self._n_groups = options.n_shares
        self._groups: list[Sequence[Request]] = []
        self._parts: deque[Sequence[Request]] = deque()  # the one that has waited longest first
        self._group_of: dict[Request, Sequence[Request]] = {}

    def answered_with(self, request: Request) -> Collection[Request]:
        """Returns all requests of the batch to which a request belongs."""
        return self._group_of.get(request, ())

    def n_tokens(self, request: Request, group: Sequence[Request]) -> int:
        """Returns the number of tokens of a request in the next iteration of its batch."""
        return request.n_unscheduled

    def select(self, pool: PoolView, kv_manager: MemoryView) -> list[Selection]:
        """Returns the selections of the next iteration. Among the parts of batches that are ready,
        the one that has waited longest runs."""
        self._forget_complete()
        ready = self._join(pool, kv_manager)
        for part in self._parts:
            if selections := self._selections(part, ready, kv_manager):
                self._parts.remove(part)
                self._parts.append(part)
                return selections
        return []

    def _forget_complete(self) -> None:
        for group in [one for one in self._groups if all(r.state is _FINISHED for r in one)]:
            self._groups.remove(group)
            for request in group:
                del self._group_of[request]
        self._parts = deque(part for part in self._parts if part[0] in self._group_of)

    def _join(self, pool: PoolView, kv_manager: MemoryView) -> list[Request]:
        """Begins another batch if there may be one. Returns the requests that can run now, in the
        order of the pool. A batch does not count if all that is left of it was preempted, and the
        pool offers only requests that come first."""
        candidates: Iterable[Request] = pool.candidates()
        outside = [one for one in self._group_of if one.state is RequestState.INITIATION]
        if outside:
            candidates = list(candidates)
            offered = {*candidates, *(one for one in self._group_of if one.reservation is not None)}
            n_groups = sum([not offered.isdisjoint(group) for group in self._groups])
        else:
            n_groups = len(self._groups)
        is_forming = n_groups < self._n_groups
        n_blocks = kv_manager.n_free_blocks - sum(map(kv_manager.n_blocks_to_admit, outside))
        ready: list[Request] = []
        group: list[Request] = []
        n_passed = 0
        for request in candidates:
            if request in self._group_of:
                ready.append(request)
            elif is_forming and len(group) < self.max_batch_size:
                n_blocks -= kv_manager.n_blocks_to_admit(request)
                is_forming = n_blocks >= 0
                if is_forming:
                    group.append(request)
            elif outside or not n_passed:
                n_passed += 1  # the first may be a called request, before some that run
            else:
                break
        if group:
            self._groups.append(group)
            self._group_of.update(dict.fromkeys(group, group))
            size = self._microbatch_size
            self._parts.extend(group[i : i + size] for i in range(0, len(group), size))
        return ready + group

    def _selections(
        self, part: Sequence[Request], ready: list[Request], kv_manager: MemoryView
    ) -> list[Selection]:
        """Returns the selections for the next iteration of a part of a batch. Returns an empty list
        if one of its requests is in flight. A request that was preempted joins again when it is
        the first that waits."""
        left = [one for one in part if one.state is not _FINISHED and not one.is_cancelled]
        chosen = [one for one in left if one.reservation is not None and _has_more(one)]
        if not set(ready).issuperset(chosen):
            return []
        selections = [self._selection(one, one.reservation) for one in chosen if one.reservation]
        for request in ready:
            if request.reservation is None:
                reservation = kv_manager.reserve(request) if request in part else None
                if reservation is None:
                    break
                selections.append(self._selection(request, reservation))
        return selections

    def _selection(self, request: Request, reservation: Reservation) -> Selection:
        n_tokens = self.n_tokens(request, self._group_of[request])
        return Selection(request, n_tokens, reservation)


def _has_more(request: Request) -> bool:
    """Returns whether a request needs an iteration beside those in flight."""
    if request.wants_vector:
        return request.n_scheduled < request.n_tokens
    return len(request.generated_token_ids) + request.n_awaited < request.max_new_tokens
