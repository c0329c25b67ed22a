"""A rank within one epoch: a fresh model runner, fresh groups, one iteration after the other.

    announce: start receiving → run: receive (or embed), run the layers, send (or sample)

A plan is announced as soon as the rank has read it, which may be while an earlier one still waits:
its activations then come in while the rank computes.
"""

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from orcinus.v1 import worker_pb2

from services.worker import wire
from services.worker.input_batch import IterationPlan
from services.worker.transport import Receipt, Transport


class Runner(Protocol):
    """What a rank needs of a model runner."""

    def prepare(self, plan: IterationPlan) -> Any:
        """Takes in a plan and builds its batch."""

    def empty_hidden(self, n_tokens: Sequence[int]) -> torch.Tensor:
        """Room for the previous stage's hidden states of a batch with such spans."""

    def forward(self, batch: Any, hidden: torch.Tensor | None) -> torch.Tensor:
        """Runs the stage's layers."""

    def sample(self, batch: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Chooses tokens; last stage only."""


class EpochMember:
    """Runs iterations in the order in which they were announced."""

    def __init__(
        self, request: worker_pb2.JoinPipelineRequest, runner: Runner, peers: Transport
    ) -> None:
        self.request = request
        self._runner = runner
        self._peers = peers
        self._is_first = request.stage_index == 0
        self._is_last = request.stage_index + 1 == len(request.members)
        self._announced: deque[_Announced] = deque()
        self.trace: worker_pb2.IterationTrace | None = None
        """Of the iteration that was run last, if it is recorded."""

    @property
    def n_announced(self) -> int:
        """Iterations that wait to be run."""
        return len(self._announced)

    def announce(self, message: worker_pb2.RunIterationsRequest) -> None:
        """Takes a plan in and starts to receive its activations.

        Raises:
            TransferError: the previous stage is gone.
        """
        hidden = receipt = None
        if not self._is_first:
            hidden = self._runner.empty_hidden(message.n_tokens)
            receipt = self._peers.start_receive(hidden, message.iteration)
        self._announced.append(_Announced(message, hidden, receipt))

    def run_next(self) -> tuple[worker_pb2.IterationTiming, list[int] | None]:
        """Runs the iteration announced first; the last stage returns the sampled tokens.

        Raises:
            TransferError: a neighbour is gone.
        """
        announced = self._announced.popleft()
        message = announced.message
        started = time.perf_counter_ns()
        batch = self._runner.prepare(wire.plan_of(message))
        prepared = time.perf_counter_ns()
        hidden = announced.receive()
        received = time.perf_counter_ns()
        hidden = self._runner.forward(batch, hidden)
        token_ids = self._runner.sample(batch, hidden).tolist() if self._is_last else None
        computed = time.perf_counter_ns()
        if not self._is_last:
            self._peers.send(hidden, message.iteration)
        sent = time.perf_counter_ns()
        timing = worker_pb2.IterationTiming(
            iteration=message.iteration,
            receive_ns=received - prepared,
            compute_ns=prepared - started + computed - received,
            send_ns=sent - computed,
        )
        self.trace = None
        if message.HasField("trace"):
            start_unix_ns = time.time_ns() - (time.perf_counter_ns() - started)
            self.trace = wire.trace_of(message, timing, start_unix_ns=start_unix_ns)
        return timing, token_ids

    def close(self) -> None:
        """Leaves the epoch."""
        self._announced.clear()
        self._peers.close()


class _Announced:
    """A plan, and the activations that come for it."""

    def __init__(
        self,
        message: worker_pb2.RunIterationsRequest,
        hidden: torch.Tensor | None,
        receipt: Receipt | None,
    ) -> None:
        self.message = message
        self._hidden = hidden
        self._receipt = receipt

    def receive(self) -> torch.Tensor | None:
        """The activations when they have come; None on the first stage."""
        if self._receipt is not None:
            self._receipt.wait()
        return self._hidden
