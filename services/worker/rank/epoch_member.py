"""A rank's part in one epoch: runs its iterations in order, with a new model runner and new groups.

    announce: start receiving → start: receive (or embed), run the layers, send (or sample) → finish

A plan is announced as soon as the rank has read it, possibly while earlier plans still wait. Its
activations are then received while the rank computes.

On a CPU an iteration is finished when it has been started. On a GPU an iteration is only launched:
the host starts the next announced iteration, and checks from time to time which iterations are
complete. The host never waits for the device, and the device waits only for activations.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from orcinus.v1 import worker_pb2

from services.common.iteration_limit import IterationSize
from services.worker.engine.kv_record import KVRecord
from services.worker.engine.logprobs import BatchLogprobs
from services.worker.engine.pooled_requests import BatchVectors
from services.worker.rank import wire
from services.worker.rank.activity import Activity
from services.worker.rank.adapter_loader import NO_LOADER
from services.worker.rank.data_plane.transport import Receipt, Transport
from services.worker.rank.device_clock import DeviceClock, HostClock
from services.worker.rank.epoch_adapters import NO_RUNNER, EpochAdapters
from services.worker.rank.reported_tokens import ReportedTokens, reported
from services.worker.rank.runner import Runner


@dataclass(frozen=True, slots=True)
class FinishedIteration:
    """The report of a rank about a finished iteration."""

    timing: worker_pb2.IterationTiming
    tokens: ReportedTokens | None  # on the last stage
    cut: list[int]  # indices of sampled tokens that end an output before its grammar ends
    trace: worker_pb2.IterationTrace | None  # if the iteration is recorded


class EpochMember:
    """A rank's part in one epoch: runs iterations in the order in which they were announced."""

    def __init__(
        self,
        request: worker_pb2.JoinPipelineRequest,
        runner: Runner,
        peers: Transport,
        clock: DeviceClock | None = None,
        activity: Activity | None = None,
        kv_record: KVRecord | None = None,
        adapters: EpochAdapters | None = None,
    ) -> None:
        """`clock` tells when the device has finished an iteration. Without `clock`, an iteration
        counts as finished when it has been started. `activity` records the steps of this member.
        `kv_record` is the record of the memory with the keys and values. It is None if keys and
        values do not outlive epochs, as on every GPU. `adapters` carries out orders about adapters;
        None if the rank loads none."""
        self.request = request
        self.adapters = adapters or EpochAdapters(NO_LOADER, NO_RUNNER)
        """The adapters that are loaded in this epoch."""
        self.stored_kv = None if kv_record is None else kv_record.stored
        """The keys and values that the rank's memory held when it joined the epoch. None if keys
        and values do not outlive epochs."""
        self._kv_record = kv_record
        self._has_begun = False
        self._runner = runner
        self._peers = peers
        self._clock = clock or HostClock()
        self._activity = activity or Activity()
        self._is_first = request.stage_index == 0
        self._is_last = request.stage_index + 1 == len(request.members)
        self._n_messages = 0
        self._announced: deque[_Announced] = deque()
        self._started: deque[_Started] = deque()

    @property
    def n_announced(self) -> int:
        """Number of iterations that have been announced and not yet started."""
        return len(self._announced)

    @property
    def n_started(self) -> int:
        """Number of iterations that have been started and not yet returned by `take_finished`."""
        return len(self._started)

    @property
    def next_iteration(self) -> int:
        """Number of the announced iteration that is started next. At least one iteration must be
        announced."""
        return self._announced[0].message.iteration

    def announce(self, message: worker_pb2.RunIterationsRequest) -> None:
        """Queues a plan and starts to receive its activations. If the message has an order about
        adapters, carries the order out when the plans before it have been started.

        Raises:
            TransferError: the previous stage is gone.
        """
        self._n_messages += 1
        if message.HasField("adapter_order"):
            if self._announced:
                self._announced[-1].orders.append(message.adapter_order)
            else:
                self.adapters.obey(message.adapter_order)
            return
        hidden = receipt = None
        if not self._is_first:
            hidden = self._runner.empty_hidden(message.n_tokens)
            receipt = self._peers.start_receive(hidden, message.iteration)
        work = IterationSize.of(message.start_position, message.n_tokens)
        self._announced.append(_Announced(message, self._n_messages, work, hidden, receipt))

    def show_activity(self) -> None:
        """Records in `activity` which step of the oldest started iteration the device works on."""
        started = self._started[0]
        if self._clock.has_passed(started.marks[1]):
            self._activity.compute(started.message.iteration, started.work)
        else:
            self._activity.exchange(started.message.iteration, self.request.epoch)

    def start_next(self) -> None:
        """Runs the first announced iteration on a CPU. On a GPU, launches it.

        Raises:
            TransferError: a neighbour is gone.
        """
        announced = self._announced.popleft()
        message, work = announced.message, announced.work
        activity, epoch = self._activity, self.request.epoch
        activity.compute(message.iteration, work)
        # While the device computes another iteration, this one's preparation costs it no time.
        is_hidden = bool(self._started) and not self._has_ended(self._started[-1])
        started_ns = time.perf_counter_ns()
        batch = self._runner.prepare(wire.plan_of(message))
        prepared_ns = time.perf_counter_ns()
        began = self._clock.mark()
        activity.exchange(message.iteration, epoch)
        hidden = announced.receive()
        activity.compute(message.iteration, work)
        received = self._clock.mark()
        if self._kv_record is not None and not self._has_begun:
            self._kv_record.note_begun(epoch)
            self._has_begun = True
        result, sampled = self._compute(batch, hidden)
        if self._kv_record is not None:
            self._kv_record.note_complete(message.iteration)
        computed = self._clock.mark()
        computed_ns = time.perf_counter_ns()
        if result is not None:
            activity.exchange(message.iteration, epoch)
            self._peers.send(result, message.iteration)
        sent_ns, sent_unix_ns = time.perf_counter_ns(), time.time_ns()
        self._started.append(
            _Started(
                message,
                announced.number,
                work,
                sampled,
                marks=(began, received, computed),
                prepare_ns=0 if is_hidden else prepared_ns - started_ns,
                send_ns=sent_ns - computed_ns,
                ended_unix_ns=sent_unix_ns if self._clock.has_passed(computed) else None,
            )
        )
        for order in announced.orders:
            self.adapters.obey(order)

    def _compute(
        self, batch: Any, hidden: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, "_Sampled"]:
        """Runs the stage's layers. Returns the hidden states for the next stage, or None on the
        last stage. Also returns the sampled tokens."""
        runner = self._runner
        if not self._is_last:
            return runner.forward(batch, hidden), _Sampled()
        logits = runner.logits(batch, hidden)
        tokens = runner.sample(batch, logits)
        cut = runner.cut(batch)
        logprobs = runner.logprobs(batch, logits, tokens)
        logprobs = None if logprobs is None else logprobs.to_host()
        vectors = runner.vectors(batch, logits)
        vectors = None if vectors is None else vectors.to_host()
        if isinstance(tokens, torch.Tensor):
            token_ids = tokens.to("cpu", non_blocking=True)  # pinned memory if from a GPU
            return None, _Sampled(token_ids, cut, logprobs, vectors)
        return None, _Sampled(tokens.tolist(), cut, logprobs, vectors)

    def take_finished(self) -> list[FinishedIteration]:
        """Returns the iterations that have completed since the last call. Does not wait."""
        finished = []
        while self._started and self._has_ended(self._started[0]):
            finished.append(self._finish(self._started[0]))
            self._started.popleft()
        return finished

    def close(self) -> None:
        """Leaves the epoch and releases its groups."""
        self._announced.clear()
        self._started.clear()
        self._runner.close()
        self._peers.close()

    def _has_ended(self, started: "_Started") -> bool:
        return self._clock.has_passed(started.marks[-1])

    def _finish(self, started: "_Started") -> FinishedIteration:
        began, received, computed = started.marks
        timing = worker_pb2.IterationTiming(
            iteration=started.message.iteration,
            receive_ns=self._clock.elapsed_ns(began, received),
            compute_ns=started.prepare_ns + self._clock.elapsed_ns(received, computed),
            send_ns=started.send_ns,
        )
        self._activity.computed(started.work, timing.compute_ns / 1e9)
        sampled, tokens = started.sampled, None
        if sampled.token_ids is not None:
            tokens = reported(sampled.token_ids, sampled.logprobs, started.message, sampled.vectors)
        trace = None
        if started.message.HasField("trace"):
            duration_ns = timing.receive_ns + timing.compute_ns + timing.send_ns
            ended_unix_ns = started.ended_unix_ns or time.time_ns()
            start_unix_ns = ended_unix_ns - duration_ns
            trace = wire.trace_of(
                started.message, started.number, timing, start_unix_ns=start_unix_ns
            )
        return FinishedIteration(timing, tokens, sampled.cut, trace)


class _Announced:
    """An announced plan, and the receive of its activations, which has been started."""

    def __init__(
        self,
        message: worker_pb2.RunIterationsRequest,
        number: int,
        work: IterationSize,
        hidden: torch.Tensor | None,
        receipt: Receipt | None,
    ) -> None:
        self.message = message
        self.number = number
        """Place of the plan among all messages of the epoch, from 1."""
        self.work = work
        self.orders: list[worker_pb2.AdapterOrder] = []
        """Orders about adapters that came after this plan and before the next."""
        self._hidden = hidden
        self._receipt = receipt

    def receive(self) -> torch.Tensor | None:
        """Waits for the activations and returns them. Returns None on the first stage."""
        if self._receipt is not None:
            self._receipt.wait()
        return self._hidden


@dataclass(frozen=True, slots=True)
class _Sampled:
    """Tokens sampled on the last stage. They are on the host when the iteration is complete."""

    token_ids: torch.Tensor | list[int] | None = None
    cut: list[int] = field(default_factory=list)
    logprobs: BatchLogprobs | None = None
    vectors: BatchVectors | None = None


@dataclass(frozen=True, slots=True)
class _Started:
    """An iteration that has been started, and its results, which are valid once it is complete."""

    message: worker_pb2.RunIterationsRequest
    number: int  # of the plan among all messages of the epoch, from 1
    work: IterationSize
    sampled: _Sampled
    marks: tuple[Any, Any, Any]  # at its begin, after the receive, after the computation
    prepare_ns: int
    send_ns: int
    ended_unix_ns: int | None  # None if it was not complete after the start, as on a GPU
