"""A rank's membership of an epoch, from the first attempt to connect until its resources are
released.

    join: connect in a separate thread (`EpochEntry`) → enter: a new `EpochMember` → leave

The rank's main thread uses the membership. Only `leave_before` is called from another thread, the
lifeline. While the main thread waits for other ranks, the lifeline receives the controller's order
to leave the epoch, and ends the wait.
"""

import sys
import threading
from collections.abc import Callable

from orcinus.v1 import worker_pb2

from services.worker.rank.data_plane.transport import TransferError, Transport
from services.worker.rank.epoch_entry import EpochEntry
from services.worker.rank.epoch_member import EpochMember

JOIN_TIMEOUT_S = 40.0
"""Timeout in seconds for finding the other ranks and exchanging a first tensor. It is shorter than
the controller's timeout, so that the controller receives the reason."""


class Membership:
    """Joins and leaves epochs, and holds the epoch that the rank is in. A rank may also be in no
    epoch."""

    def __init__(
        self,
        *,
        connect: Callable[[worker_pb2.JoinPipelineRequest], Transport],
        enter: Callable[[worker_pb2.JoinPipelineRequest, Transport], EpochMember],
    ) -> None:
        """`connect` returns the transport of an epoch, and is called in a separate thread. `enter`
        is then called with the transport and returns the member of the epoch. If `enter` raises
        TransferError, it must have closed the transport."""
        self._connect = connect
        self._enter = enter
        self._member: EpochMember | None = None
        self._lock = threading.Lock()  # guards the next two attributes
        self._entry: EpochEntry | None = None
        self._first_epoch = 0  # the epochs before this one are over

    @property
    def current(self) -> EpochMember | None:
        """The member of the current epoch, or None. Callers must not store the member, because it
        keeps the epoch's K/V in memory."""
        return self._member

    @property
    def is_busy(self) -> bool:
        """Whether any iteration has been announced and not yet returned as finished."""
        member = self._member
        return member is not None and bool(member.n_announced or member.n_started)

    def member_for(self, plan: worker_pb2.RunIterationsRequest) -> EpochMember | None:
        """Returns the member of the current epoch, or None if the plan belongs to another epoch."""
        member = self._member
        if member is None or (plan.pipeline_id, plan.epoch) != (
            member.request.pipeline_id,
            member.request.epoch,
        ):
            return None
        return member

    def join(self, request: worker_pb2.JoinPipelineRequest) -> None:
        """Leaves the current epoch, if any, and joins the epoch of the request.

        Raises:
            TransferError: the other ranks did not answer, or the epoch is over. The rank is then
                in no epoch.
        """
        self.leave()
        try:
            transport = self._begin(request).wait(JOIN_TIMEOUT_S)
            self._member = self._enter(request, transport)
            self.check()  # the epoch may have ended while decodes were recorded
        except TransferError:
            self.leave()
            raise

    def check(self) -> None:
        """Raises TransferError if the current epoch has been cancelled. The check is needed because
        an abort of NCCL raises no error."""
        if self._entry is not None and self._entry.is_over:
            raise TransferError("called off")

    def leave(self) -> bool:
        """Leaves the current epoch and releases its resources. Does nothing if the rank is in no
        epoch. Returns whether the epoch had been cancelled before."""
        with self._lock:
            entry, self._entry = self._entry, None
        member, self._member = self._member, None
        if member is not None:
            member.close()
        return entry is not None and entry.is_over

    def leave_before(self, epoch: int | None) -> None:
        """Cancels all epochs before `epoch`, or all epochs if None. If the main thread waits for
        other ranks of such an epoch, its wait ends. May be called from any thread."""
        with self._lock:
            self._first_epoch = max(self._first_epoch, sys.maxsize if epoch is None else epoch)
            entry = self._entry
        if entry is not None and entry.epoch < self._first_epoch:
            entry.call_off(f"epoch {entry.epoch} is over")

    def _begin(self, request: worker_pb2.JoinPipelineRequest) -> EpochEntry:
        with self._lock:
            if request.epoch < self._first_epoch:
                raise TransferError(f"epoch {request.epoch} is over")
            self._entry = EpochEntry(request.epoch, lambda: self._connect(request))
            return self._entry
