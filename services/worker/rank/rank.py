"""A rank: one device's shard of one stage, in a process of its own.

It is started by the controller (`services.worker.rank`), loads its weights
once, joins epochs as it is told, and runs one plan after the other. When the transport fails, or
the controller calls the epoch off, the epoch is over: it drops groups and K/V, keeps its weights
and waits for the next epoch. Any other error ends the process.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from orcinus.v1 import worker_pb2
from torch.distributed import TCPStore

from services.worker.channel import MessageKind, RankEnd
from services.worker.engine.sampler import NonFiniteLogits
from services.worker.rank import transport, wire
from services.worker.rank.epoch_entry import EpochEntry
from services.worker.rank.epoch_member import EpochMember, Finished
from services.worker.rank.iteration_profiler import Profiler

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.25
"""How often timings are reported."""

JOIN_TIMEOUT_S = 40.0
"""For finding the other ranks and a first exchange; less than the controller's, which hears why."""


class Rank:
    """Does what the controller says, until the controller is gone."""

    def __init__(
        self,
        channel: RankEnd,
        description: worker_pb2.DescribeResponse,
        *,
        rendezvous: TCPStore | None,
        report_results: bool,
        connect: Callable[[worker_pb2.JoinPipelineRequest], transport.Transport],
        enter: Callable[[worker_pb2.JoinPipelineRequest, transport.Transport], EpochMember],
    ) -> None:
        self._channel = channel
        self._description = description
        self._rendezvous = rendezvous  # the store lives as long as this object
        self._reports = report_results
        self._connect = connect  # called in a thread of its own
        self._enter = enter
        self._member: EpochMember | None = None
        self._entry: EpochEntry | None = None
        self._first_epoch = 0  # those before it are over
        self._leaving = threading.Lock()  # for the two above
        self._timings: list[worker_pb2.IterationTiming] = []
        self._reported_at = time.monotonic()
        self._profiler = Profiler()

    def leave(self, before: int | None) -> None:
        """All epochs before the given one are over, or all if there is none: wherever the rank
        waits for other ranks, it stops. Called in another thread than `serve`."""
        with self._leaving:
            self._first_epoch = max(self._first_epoch, sys.maxsize if before is None else before)
            entry = self._entry
        if entry is not None and entry.epoch < self._first_epoch:
            entry.call_off(f"epoch {entry.epoch} is over")

    def serve(self) -> NoReturn:
        """Runs until the channel is closed.

        Raises:
            ChannelClosed: it is.
        """
        self._channel.send(MessageKind.LOADED, self._description.SerializeToString())
        while True:
            try:
                self._take_in_messages()
                self._run_next()
                self._finish_profile()
            except transport.TransferError as error:
                self._abandon(str(error))
            if time.monotonic() - self._reported_at >= REPORT_INTERVAL_S:
                self._report_timings()

    def _take_in_messages(self) -> None:
        """All messages that are there; waits for one if there is nothing to start or to finish."""
        member = self._member
        is_busy = member is not None and bool(member.n_announced or member.n_started)
        message = self._channel.receive(0 if is_busy else REPORT_INTERVAL_S)
        while message is not None:
            self._handle(*message)
            message = self._channel.receive(0)

    def _handle(self, kind: MessageKind, payload: bytes) -> None:
        if kind is MessageKind.PLAN:
            self._announce(worker_pb2.RunIterationsRequest.FromString(payload))
        elif kind is MessageKind.JOIN:
            self._join(worker_pb2.JoinPipelineRequest.FromString(payload))
        elif kind is MessageKind.PROFILE:
            n_iterations, _, path = payload.decode().partition(" ")
            self._profiler.order(int(n_iterations), path)

    def _join(self, request: worker_pb2.JoinPipelineRequest) -> None:
        self._leave()
        self._timings.clear()
        try:
            entry = self._open(request)
            self._member = self._enter(request, entry.wait(JOIN_TIMEOUT_S))
            self._check_epoch()  # it may have ended while decodes were recorded
        except transport.TransferError as error:
            self._leave()
            self._channel.send(MessageKind.NOT_JOINED, f"{request.epoch} {error}".encode())
        else:
            self._channel.send(MessageKind.JOINED, str(request.epoch).encode())

    def _open(self, request: worker_pb2.JoinPipelineRequest) -> EpochEntry:
        with self._leaving:
            if request.epoch < self._first_epoch:
                raise transport.TransferError(f"epoch {request.epoch} is over")
            self._entry = EpochEntry(request.epoch, lambda: self._connect(request))
            return self._entry

    def _leave(self) -> None:
        with self._leaving:
            self._entry = None
        if self._member is not None:
            self._member.close()
            self._member = None

    def _announce(self, message: worker_pb2.RunIterationsRequest) -> None:
        member = self._member
        if member is None or (message.pipeline_id, message.epoch) != (
            member.request.pipeline_id,
            member.request.epoch,
        ):
            log.warning("refused a plan of epoch %d", message.epoch)
        else:
            member.announce(message)

    def _run_next(self) -> None:
        member = self._member
        if member is None:
            return
        if member.n_started:  # on a GPU, which may have finished while the host did other things
            self._report_finished(member)
        if member.n_announced:
            with self._profiler:
                member.start_next()
        self._report_finished(member)

    def _report_finished(self, member: EpochMember) -> None:
        try:
            all_finished = member.take_finished()
        except NonFiniteLogits:
            self._check_epoch()  # what was not received when it ended is anything
            raise
        self._check_epoch()
        if self._reports:
            for finished in all_finished:
                self._report(member.request, finished)

    def _check_epoch(self) -> None:
        if self._entry is not None and self._entry.is_over:
            raise transport.TransferError("called off")  # NCCL aborts without an error

    def _report(self, place: worker_pb2.JoinPipelineRequest, finished: Finished) -> None:
        if finished.token_ids is None:
            self._timings.append(finished.timing)
        else:
            self._send_report(wire.result_of(place, finished.timing, finished.token_ids))
        if finished.trace is not None:
            self._channel.send(MessageKind.TRACE, finished.trace.SerializeToString())

    def _finish_profile(self) -> None:
        try:
            path = self._profiler.take()
        except OSError as error:
            self._channel.send(MessageKind.NOT_PROFILED, str(error).encode())
        else:
            if path is not None:
                self._channel.send(MessageKind.PROFILED, path.encode())

    def _report_timings(self) -> None:
        self._reported_at = time.monotonic()
        if self._member is not None and self._timings:
            self._send_report(wire.timings_of(self._member.request, self._timings))
            self._timings.clear()

    def _abandon(self, reason: str) -> None:
        member, entry = self._member, self._entry
        self._leave()
        if member is None:
            return
        if entry is not None and entry.is_over:
            log.info("left epoch %d, which is over", member.request.epoch)
            return
        log.error("left the epoch: %s", reason)
        self._send_report(
            worker_pb2.WatchStageResponse(
                pipeline_id=member.request.pipeline_id,
                epoch=member.request.epoch,
                failure=worker_pb2.StageFailure(reason=reason),
            )
        )

    def _send_report(self, report: worker_pb2.WatchStageResponse) -> None:
        self._channel.send(MessageKind.REPORT, report.SerializeToString())
