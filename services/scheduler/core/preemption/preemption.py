"""Preemption: a running request gives up its memory, or its place in batches, for another request.

A preempted request waits again, with all its tokens, and is computed again when it is next
admitted. The paper never preempts. Here there are three reasons, each in a file of its own: memory
that was promised twice (`for_memory.py`), clients that have less than their share
(`for_fairness.py`), and a pipeline that is to end (`for_departure.py`).
"""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.order.fair import Fair
from services.scheduler.core.policies import Policy
from services.scheduler.core.preemption.for_fairness import ForFairness
from services.scheduler.core.preemption.for_memory import ForMemory
from services.scheduler.core.request import Request
from services.scheduler.core.request_pool import RequestPool


class Preemption(Protocol):
    """Decides which requests are preempted. The scheduler reports to it when a batch is selected,
    and when a request returns, is preempted or ends."""

    def prepare(self) -> None:
        """Preempts running requests, or keeps them out of the next batch, to make room for others.
        Must be called before a batch is selected."""

    def settle(self, selected: Collection[Request]) -> None:
        """Notes the requests of the batch that was just selected. Must be called before these
        requests count as running."""

    def is_due(self, request: Request) -> bool:
        """Returns whether a request must be preempted now. Called when no batch in flight contains
        the request any more."""

    def note_preempted(self, request: Request) -> None:
        """Notes that a request was preempted."""

    def note_end(self, request: Request) -> None:
        """Notes that a request has ended. Batches in flight may still use its memory."""

    def note_freed(self, request: Request) -> None:
        """Notes that the memory of a request is free: the request has ended or was preempted, and
        no batch in flight uses the memory any more."""


class Preemptions:
    """Combines several reasons to preempt; without any reason, no request is preempted."""

    def __init__(self, reasons: Sequence[Preemption]) -> None:
        self._reasons = reasons

    def prepare(self) -> None:
        for reason in self._reasons:
            reason.prepare()

    def settle(self, selected: Collection[Request]) -> None:
        for reason in self._reasons:
            reason.settle(selected)

    def is_due(self, request: Request) -> bool:
        for reason in self._reasons:  # noqa: SIM110 (half the time of `any`, for each token)
            if reason.is_due(request):
                return True
        return False

    def note_preempted(self, request: Request) -> None:
        for reason in self._reasons:
            reason.note_preempted(request)

    def note_end(self, request: Request) -> None:
        for reason in self._reasons:
            reason.note_end(request)

    def note_freed(self, request: Request) -> None:
        for reason in self._reasons:
            reason.note_freed(request)


def preemption_of(
    pool: RequestPool,
    kv_manager: KVManager,
    policy: Policy,
    *,
    can_run: Callable[[Request], bool],
    preempt: Callable[[Request], None],
) -> Preemption:
    """Returns the object that decides which requests are preempted. It preempts for memory if
    requests may need more than they have reserved, and for fairness if the order of the pool is
    `Fair`. If neither holds, it preempts no request.

    `can_run` says whether a request could join the next batch. `preempt` preempts a request that is
    in no batch.
    """
    reasons: list[Preemption] = []
    if kv_manager.expected_use.may_be_exceeded:
        reasons.append(ForMemory(pool, kv_manager, can_run=can_run, preempt=preempt))
    if isinstance(pool.order, Fair):
        reasons.append(
            ForFairness(pool, pool.order, kv_manager, policy, can_run=can_run, preempt=preempt)
        )
    return reasons[0] if len(reasons) == 1 else Preemptions(reasons)
