"""The loop of a rank, one device's shard of one stage: receive messages, run, report.

The rank has loaded its weights when the loop begins. It joins the epochs that its controller names
and runs one plan after the other. The rank leaves the epoch when the transport fails, when the
controller cancels the epoch, or when an iteration fails with an error that leaves the weights
usable. It then drops its groups and K/V, keeps its weights and waits for the next epoch. Any other
error ends the process.
"""

import logging
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import NoReturn, Protocol

from orcinus.v1 import worker_pb2
from torch.distributed import TCPStore

from services.worker.channel import ChannelClosed, MessageKind, RankEnd
from services.worker.rank import wire
from services.worker.rank.activity import Activity
from services.worker.rank.data_plane.transport import TransferError
from services.worker.rank.epoch_member import EpochMember
from services.worker.rank.iteration_errors import spares_weights
from services.worker.rank.iteration_profiler import IterationProfiler
from services.worker.rank.iterations import FinishedIteration
from services.worker.rank.membership import Membership

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.25
"""Interval in seconds between two reports of the timings of iterations."""

LOAD_INTERVAL_S = 0.01
"""Interval in seconds at which an idle rank checks whether an adapter has been loaded."""


class Grammars(Protocol):
    """The grammars that a rank compiles, implemented by `services.grammar.grammars.Grammars`."""

    def prepare(
        self,
        digest: bytes,
        grammar: str,
        *,
        kept: Collection[bytes],
        on_end: Callable[[str], None],
    ) -> None:
        """Compiles a grammar in another thread, and forgets grammars that are not in `kept`. Calls
        `on_end`, from any thread, with the reason why no output can follow the grammar. The reason
        is empty if outputs can follow it."""


class Rank:
    """Executes the messages of the controller, until the controller closes the channel."""

    def __init__(
        self,
        channel: RankEnd,
        description: worker_pb2.DescribeResponse,
        membership: Membership,
        *,
        rendezvous: TCPStore | None,
        report_results: bool,
        tp_rank: int = 0,
        grammars: Grammars | None = None,
        activity: Activity | None = None,
    ) -> None:
        """`report_results` is true on one rank of each stage: the rank that reports results and
        timings. `rendezvous` is the store in which ranks meet; None except on the one rank of the
        pipeline that serves the store. `grammars` is None on ranks that do not sample, and if the
        model can follow no grammar. `activity` records the steps of the loop."""
        self.membership = membership
        """The epoch that the rank is in. Other threads may only call `leave_before`."""
        self._channel = channel
        self._description = description
        self._rendezvous = rendezvous  # keeps the store open
        self._reports = report_results
        self._tp_rank = tp_rank
        self._grammars = grammars
        self._activity = activity or Activity()
        self._timings: list[worker_pb2.IterationTiming] = []
        self._reported_at = time.monotonic()
        self._profiler = IterationProfiler()

    def serve(self) -> NoReturn:
        """Runs until the channel is closed.

        Raises:
            ChannelClosed: the controller has closed the channel.
        """
        self._channel.send(MessageKind.LOADED, self._description.SerializeToString())
        while True:
            try:
                self._show_activity()
                self._take_in_messages()
                self._report_adapters()
                self._run_next()
                self._finish_profile()
            except TransferError as error:
                self._abandon(str(error))
            if time.monotonic() - self._reported_at >= REPORT_INTERVAL_S:
                self._report_timings()

    def _show_activity(self) -> None:
        """Records what the main thread does: a new pass of the loop, or a step of an iteration that
        the device computes."""
        member = self.membership.current
        if member is not None and member.n_started:
            member.show_activity()
        else:
            self._activity.turn()

    def _take_in_messages(self) -> None:
        """Handles all messages that have been received. If no iteration is to be started or
        finished, waits for a message."""
        # No reference to a member is kept here, so that an epoch's K/V is freed before the next.
        message = self._channel.receive(self._wait_s)
        while message is not None:
            self._handle(*message)
            message = self._channel.receive(0)

    @property
    def _wait_s(self) -> float:
        """Seconds for which the loop waits for a message."""
        member = self.membership.current
        if self.membership.is_busy:
            return 0
        is_loading = member is not None and member.adapters.is_loading
        return LOAD_INTERVAL_S if is_loading else REPORT_INTERVAL_S

    def _handle(self, kind: MessageKind, payload: bytes) -> None:
        if kind is MessageKind.PLAN:
            self._announce(worker_pb2.RunIterationsRequest.FromString(payload))
        elif kind is MessageKind.JOIN:
            self._join(worker_pb2.JoinPipelineRequest.FromString(payload))
        elif kind is MessageKind.PROFILE:
            n_iterations, _, path = payload.decode().partition(" ")
            self._profiler.order(int(n_iterations), path)

    def _join(self, request: worker_pb2.JoinPipelineRequest) -> None:
        self._timings.clear()
        self._activity.turn()
        self.membership.leave()
        self._activity.join(request.epoch)
        try:
            self.membership.join(request)
        except TransferError as error:
            self._channel.send(MessageKind.NOT_JOINED, f"{request.epoch} {error}".encode())
        else:
            self._channel.send(MessageKind.JOINED, self._joined(request.epoch))

    def _joined(self, epoch: int) -> bytes:
        """Returns the payload of the message by which the rank reports that it has joined an
        epoch."""
        member = self.membership.current
        answer = worker_pb2.JoinPipelineResponse() if member is None else member.joined
        return f"{epoch} ".encode() + answer.SerializeToString()

    def prepare_grammar(self, payload: bytes) -> None:
        """Begins to compile the grammar of a PrepareGrammarRequest, and later reports the result to
        the controller. Called from the lifeline's thread, so that compiling need not wait for the
        end of an iteration."""
        request = worker_pb2.PrepareGrammarRequest.FromString(payload)
        on_end = partial(self._report_grammar, request.digest)
        if self._grammars is None:
            on_end("the model can follow no grammar")
        else:
            self._grammars.prepare(
                request.digest, request.grammar, kept=set(request.kept_digests), on_end=on_end
            )

    def _report_grammar(self, digest: bytes, failure: str) -> None:
        report = worker_pb2.PrepareGrammarResponse(digest=digest, failure=failure)
        with suppress(ChannelClosed):  # which the main thread notices
            self._channel.send(MessageKind.GRAMMAR_PREPARED, report.SerializeToString())

    def _announce(self, plan: worker_pb2.RunIterationsRequest) -> None:
        member = self.membership.member_for(plan)
        if member is None:
            log.warning("refused a plan of epoch %d", plan.epoch)
        else:
            member.announce(plan)

    def _report_adapters(self) -> None:
        """Adds the adapters that this rank has loaded to the model, and reports the loads of this
        rank that have ended."""
        member = self.membership.current
        if member is None or not member.adapters.is_loading:
            return
        for report in member.adapters.take_reports():
            report.tp_rank = self._tp_rank
            self._send_report(wire.adapter_report_of(member.request, report))

    def _run_next(self) -> None:
        member = self.membership.current
        if member is None:
            return
        if member.n_started:  # on a GPU an iteration may have been completed in the meantime
            self._report_finished(member)
        if member.n_announced:
            if self._profiler.is_ordered:
                self._activity.profile()
            if not self._start_next(member):
                return
        self._report_finished(member)

    def _start_next(self, member: EpochMember) -> bool:
        """Starts the first announced iteration. Returns False if the iteration failed and the rank
        has therefore left the epoch."""
        iteration, is_alone = member.next_iteration, member.n_started == 0
        try:
            with self._profiler:
                member.start_next()
        except TransferError:
            raise
        except Exception as error:
            self.membership.check()  # after an aborted receive, hidden states are arbitrary
            reason = f"{type(error).__name__}: {error}"
            # A device may raise the error of an iteration that was started before this one.
            known = iteration if is_alone or spares_weights(error) else 0
            report = wire.failure_of(member.request, reason, iteration=known, is_by_itself=True)
            member.journal.note_failed()
            self._send_report(report)
            if not spares_weights(error):
                raise
            log.exception("left the epoch: iteration %d broke off", iteration)
            self.membership.leave()
            return False
        return True

    def _report_finished(self, member: EpochMember) -> None:
        all_finished = member.take_finished()
        self.membership.check()  # after an aborted receive, hidden states are arbitrary
        if self._reports:
            for finished in all_finished:
                self._report(member.request, finished)

    def _report(self, place: worker_pb2.JoinPipelineRequest, finished: FinishedIteration) -> None:
        tokens = finished.tokens
        if tokens is None:
            self._timings.append(finished.timing)
        else:
            for report in wire.results_of(
                place,
                finished.timing,
                tokens.token_ids,
                cut=finished.cut,
                broken=tokens.broken,
                logprobs=tokens.logprobs,
                vectors=tokens.vectors,
            ):
                self._send_report(report)
        if finished.trace is not None:
            self._channel.send(MessageKind.TRACE, finished.trace.SerializeToString())

    def _finish_profile(self) -> None:
        if self._profiler.is_running:
            self._activity.profile()
        try:
            path = self._profiler.take()
        except OSError as error:
            self._channel.send(MessageKind.NOT_PROFILED, str(error).encode())
        else:
            if path is not None:
                self._channel.send(MessageKind.PROFILED, path.encode())

    def _report_timings(self) -> None:
        self._reported_at = time.monotonic()
        member = self.membership.current
        if member is not None and self._timings:
            self._send_report(wire.timings_of(member.request, self._timings))
            self._timings.clear()

    def _abandon(self, reason: str) -> None:
        """Leaves the epoch and reports the reason to the controller. Reports nothing if the
        controller has already ended the epoch."""
        self._activity.turn()
        member = self.membership.current
        was_over = self.membership.leave()
        if member is None:
            return
        if was_over:
            log.info("left epoch %d, which is over", member.request.epoch)
        else:
            log.error("left the epoch: %s", reason)
            report = wire.failure_of(member.request, reason, is_of_neighbour=True)
            self._send_report(report)

    def _send_report(self, report: worker_pb2.WatchStageResponse) -> None:
        self._channel.send(MessageKind.REPORT, report.SerializeToString())
