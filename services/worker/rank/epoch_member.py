"""A rank's part in one epoch: runs its iterations, with a new model runner and new process groups.

    announce: start receiving → start: receive (or embed), run the layers, send (or sample) → finish

A plan is announced as soon as the rank has read it, possibly while earlier plans still wait. Its
activations are then received while the rank computes.

On a CPU an iteration is finished when it has been started. On a GPU an iteration is only launched:
the host starts the next announced iteration, and checks from time to time which iterations are
complete. The host never waits for the device, and the device waits only for activations.
"""

import time
from collections import deque
from typing import Any

import torch
from orcinus.v1 import worker_pb2

from services.common.iteration_limit import IterationSize
from services.worker.rank import wire
from services.worker.rank.activity import Activity
from services.worker.rank.adapter_loader import NO_LOADER
from services.worker.rank.data_plane.transport import Transport
from services.worker.rank.device_clock import DeviceClock, HostClock
from services.worker.rank.epoch_adapters import NO_RUNNER, EpochAdapters
from services.worker.rank.iterations import Announced, FinishedIteration, Sampled, Started
from services.worker.rank.kv_journal import NO_JOURNAL, Journal
from services.worker.rank.reported_tokens import reported
from services.worker.rank.runner import Runner


class EpochMember:
    """A rank's part in one epoch: runs iterations in the order in which they were announced."""

    def __init__(
        self,
        request: worker_pb2.JoinPipelineRequest,
        runner: Runner,
        peers: Transport,
        clock: DeviceClock | None = None,
        activity: Activity | None = None,
        journal: Journal = NO_JOURNAL,
        adapters: EpochAdapters | None = None,
    ) -> None:
        """`clock` tells when the device has finished an iteration. Without `clock`, each iteration
        that was started is finished. `activity` records the steps. `journal` is the record of the
        K/V memory. `adapters` carries out orders about adapters; None if the rank loads none."""
        self.request = request
        self.adapters = adapters or EpochAdapters(NO_LOADER, NO_RUNNER)
        """The adapters that are loaded in this epoch."""
        self.joined = journal.answer(request)
        """The rank's answer to the request."""
        self.journal = journal
        self._runner = runner
        self._peers = peers
        self._clock = clock or HostClock()
        self._activity = activity or Activity()
        self._is_first = request.stage_index == 0
        self._is_last = request.stage_index + 1 == len(request.members)
        self._n_messages = 0
        self._announced: deque[Announced] = deque()
        self._started: deque[Started] = deque()

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
        """Queues a plan and starts to receive its activations, or queues an order about adapters.

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
        self._announced.append(Announced(message, self._n_messages, work, hidden, receipt))

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
        self.journal.note_begun(message)
        result, sampled = self._compute(batch, hidden)
        self.journal.note_complete(message.iteration)
        computed = self._clock.mark()
        computed_ns = time.perf_counter_ns()
        if result is not None:
            activity.exchange(message.iteration, epoch)
            self._peers.send(result, message.iteration)
        sent_ns, sent_unix_ns = time.perf_counter_ns(), time.time_ns()
        self._started.append(
            Started(
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
    ) -> tuple[torch.Tensor | None, Sampled]:
        """Runs the stage's layers. Returns the hidden states for the next stage, or None on the
        last stage. Also returns the sampled tokens."""
        runner = self._runner
        if not self._is_last:
            return runner.forward(batch, hidden), Sampled()
        logits = runner.logits(batch, hidden)
        tokens = runner.sample(batch, logits)
        cut = runner.cut(batch)
        logprobs = runner.logprobs(batch, logits, tokens)
        logprobs = None if logprobs is None else logprobs.to_host()
        vectors = runner.vectors(batch, logits)
        vectors = None if vectors is None else vectors.to_host()
        if isinstance(tokens, torch.Tensor):
            token_ids = tokens.to("cpu", non_blocking=True)  # pinned memory if from a GPU
            return None, Sampled(token_ids, cut, logprobs, vectors)
        return None, Sampled(tokens.tolist(), cut, logprobs, vectors)

    def take_finished(self) -> list[FinishedIteration]:
        """Returns the iterations that have completed since the last call. Does not wait."""
        finished = []
        while self._started and self._has_ended(self._started[0]):
            finished.append(self._finish(self._started[0]))
            self._started.popleft()
        return finished

    def close(self) -> None:
        """Drops all iterations and the runner's recorded graphs, and leaves the process groups."""
        self._announced.clear()
        self._started.clear()
        self._runner.close()
        self._peers.close()

    def _has_ended(self, started: Started) -> bool:
        return self._clock.has_passed(started.marks[-1])

    def _finish(self, started: Started) -> FinishedIteration:
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
            if tokens.broken:
                self.journal.note_failed()
        trace = None
        if started.message.HasField("trace"):
            duration_ns = timing.receive_ns + timing.compute_ns + timing.send_ns
            start_unix_ns = (started.ended_unix_ns or time.time_ns()) - duration_ns
            trace = wire.trace_of(
                started.message, started.number, timing, start_unix_ns=start_unix_ns
            )
        return FinishedIteration(timing, tokens, sampled.cut, trace)
