"""Request-level scheduling: a batch runs until all its requests are complete, and then returns.

Requests that arrive late wait for the next batch, and requests that end early wait for the other
requests of their batch (Orca, section 3, challenge 1). With `microbatch_size` a batch passes
through the pipeline in parts, as in FasterTransformer: a part enters its next iteration when its
previous iteration has returned, and the next batch starts when all parts are complete.

This baseline is faster than the engines before Orca: a complete request is no longer computed, and
holds no memory while it waits for its batch.
"""

from collections.abc import Mapping, Sequence

from services.scheduler.core.admission.prompt_groups import NO_PROMPT_GROUPS
from services.scheduler.core.batch import Update
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.memory.reservation import Reservation
from services.scheduler.core.policies import Selection
from services.scheduler.core.request import Request, RequestState
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.span_logprobs import NO_LOGPROBS, SpanLogprobs


class Group:
    """A batch of request-level scheduling, from its first iteration to its last iteration."""

    def __init__(self, reserved: dict[Request, Reservation], *, microbatch_size: int) -> None:
        requests = list(reserved)
        self.requests = frozenset(requests)
        self.parts = [
            requests[i : i + microbatch_size] for i in range(0, len(requests), microbatch_size)
        ]
        """The microbatches; the microbatch that has waited longest is first."""
        self.reserved = reserved
        """The reservations of the requests that have not run."""
        self.withheld: list[Update] = []
        """The updates of the batch's requests, which are returned when all requests are
        complete."""

    @property
    def is_done(self) -> bool:
        return all(request.state is RequestState.FINISHED for request in self.requests)


class RequestLevelPolicy:
    """Selects whole batches in the order of arrival, with at most `n_groups` batches at a time."""

    max_span_tokens = None
    prompt_groups = NO_PROMPT_GROUPS

    def __init__(
        self, *, max_batch_size: int, microbatch_size: int | None = None, n_groups: int = 1
    ) -> None:
        self.name = "request_level" if microbatch_size is None else "microbatched"
        self.groups: list[Group] = []
        self.max_batch_size = max_batch_size
        self._microbatch_size = microbatch_size or max_batch_size
        self._n_groups = n_groups

    def is_full(self, ready: Sequence[Request]) -> bool:
        """Returns whether the requests fill a batch."""
        return len(ready) >= self.max_batch_size

    def select(self, pool: RequestPool, kv_manager: KVManager) -> list[Selection]:
        """Returns the next iteration: the microbatch that has waited longest, of the earliest batch
        that has a ready microbatch."""
        if len(self.groups) < self._n_groups:
            self._form_group(pool, kv_manager)
        ready = {request for request in pool.selectable() if _is_admitted(request)}
        for group in self.groups:
            for part in group.parts:
                selections = _select(part, group, ready)
                if selections:
                    group.parts.remove(part)
                    group.parts.append(part)
                    return selections
        return []

    def _form_group(self, pool: RequestPool, kv_manager: KVManager) -> None:
        taken = {request for group in self.groups for request in group.reserved}
        reserved: dict[Request, Reservation] = {}
        for request in pool.selectable():
            if _is_admitted(request) or request in taken:
                continue
            if len(reserved) == self.max_batch_size:
                break
            reservation = kv_manager.reserve(request)
            if reservation is None:
                break
            reserved[request] = reservation
        if reserved:
            self.groups.append(Group(reserved, microbatch_size=self._microbatch_size))


class RequestLevelScheduler(Scheduler):
    """A scheduler that returns the updates of a batch when the whole batch is complete."""

    def __init__(
        self,
        pool: RequestPool,
        kv_manager: KVManager,
        *,
        policy: RequestLevelPolicy,
        pipeline_depth: int,
        token_hand_off: bool = False,
    ) -> None:
        super().__init__(
            pool,
            kv_manager,
            policy=policy,
            pipeline_depth=pipeline_depth,
            token_hand_off=token_hand_off,
        )
        self._groups = policy.groups

    def apply(
        self,
        iteration: int,
        token_ids: Sequence[int],
        logprobs: Mapping[int, SpanLogprobs] = NO_LOGPROBS,
        *,
        cut: Sequence[int] = (),
        broken: Sequence[int] = (),
    ) -> list[Update]:
        """Applies tokens like `Scheduler.apply`; all updates of a batch are returned at its end."""
        updates = super().apply(iteration, token_ids, logprobs, cut=cut, broken=broken)
        return self._withhold(updates)

    def cancel(self, request: Request) -> list[Update]:
        """Cancels a request like `Scheduler.cancel`; returns the updates of its batch if the batch
        is then complete."""
        return self._withhold(super().cancel(request))

    def _withhold(self, updates: list[Update]) -> list[Update]:
        told: list[Update] = []
        for update in updates:
            group = next((g for g in self._groups if update.request in g.requests), None)
            (told if group is None else group.withheld).append(update)
        for group in [group for group in self._groups if group.is_done]:
            self._release_unused(group)
            self._groups.remove(group)
            told += group.withheld
        return told

    def _release_unused(self, group: Group) -> None:
        """Releases the reservations of requests that were cancelled before they ran."""
        for reservation in group.reserved.values():
            self.kv_manager.release(reservation)


def _is_admitted(request: Request) -> bool:
    return request.state is not RequestState.INITIATION


def _select(part: list[Request], group: Group, ready: set[Request]) -> list[Selection]:
    """Returns the next iteration of a microbatch; empty if one of its requests is still in
    flight."""
    selections = []
    for request in part:
        if request.is_cancelled or request.state is RequestState.FINISHED:
            continue
        if len(request.generated_token_ids) + request.n_awaited == request.max_new_tokens:
            continue  # its remaining tokens are in flight
        if request not in ready and request not in group.reserved:
            return []
        selections.append(request)
    return [
        Selection(
            request, request.n_unscheduled, request.reservation or group.reserved.pop(request)
        )
        for request in selections
    ]
