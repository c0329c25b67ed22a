"""A rank within one epoch: a fresh model runner, fresh groups, one iteration after the other.

receive (or embed) → run the layers → send (or sample)
"""

import time
from typing import Any, Protocol

import torch
from orcinus.v1 import worker_pb2

from services.worker import wire
from services.worker.input_batch import IterationPlan
from services.worker.transport import Transport


class Runner(Protocol):
    """What a rank needs of a model runner."""

    def prepare(self, plan: IterationPlan) -> Any:
        """Takes in a plan and builds its batch."""

    def empty_hidden(self, n_tokens: int) -> torch.Tensor:
        """Room for the previous stage's hidden states."""

    def forward(self, batch: Any, hidden: torch.Tensor | None) -> torch.Tensor:
        """Runs the stage's layers."""

    def sample(self, batch: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Chooses tokens; last stage only."""


class EpochMember:
    """A rank within one epoch: a fresh model runner, fresh groups."""

    def __init__(
        self,
        request: worker_pb2.JoinPipelineRequest,
        runner: Runner,
        peers: Transport,
    ) -> None:
        self.request = request
        self._runner = runner
        self._peers = peers
        self._is_first = request.stage_index == 0
        self._is_last = request.stage_index + 1 == len(request.members)

    def run(
        self, message: worker_pb2.RunIterationsRequest
    ) -> tuple[worker_pb2.IterationTiming, list[int] | None]:
        """Runs one iteration of this stage; the last stage returns the sampled tokens.

        Raises:
            TransferError: a neighbour is gone.
        """
        started = time.perf_counter_ns()
        batch = self._runner.prepare(wire.plan_of(message))
        prepared = time.perf_counter_ns()
        hidden = None if self._is_first else self._receive(message)
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
        return timing, token_ids

    def close(self) -> None:
        """Leaves the epoch."""
        self._peers.close()

    def _receive(self, message: worker_pb2.RunIterationsRequest) -> torch.Tensor:
        hidden = self._runner.empty_hidden(sum(message.n_tokens))
        self._peers.receive(hidden, message.iteration)
        return hidden
