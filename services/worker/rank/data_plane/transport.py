"""The interface of the data plane for a rank and its model, and the error that ends an epoch.

A receive is started as soon as its plan is known, before the activations are sent and possibly long
before the rank needs them. A rank does not wait for its sends, unless more than MAX_PENDING_SENDS
are in flight. If a peer has ended or is stopped, another thread ends all waits with `abort`.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from services.worker.models.tensor_parallel import TensorParallel

MAX_PENDING_SENDS = 4
"""Largest number of sends in flight. A further send first waits for the oldest one. With NCCL the
device waits, not the host."""


class TransferError(Exception):
    """A tensor could not be sent or received. The epoch is then over for this rank."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of a rank in an epoch of its pipeline: its stage, and its index within the
    stage."""

    pipeline_id: str
    epoch: int
    stage_index: int
    n_stages: int
    tp_rank: int
    tp_size: int

    @property
    def world_size(self) -> int:
        """Number of ranks in the pipeline."""
        return self.n_stages * self.tp_size

    @property
    def world_rank(self) -> int:
        """Index of this rank among all ranks of the pipeline. The ranks of a stage have consecutive
        indices."""
        return self.stage_index * self.tp_size + self.tp_rank

    @property
    def prefix(self) -> str:
        """Prefix of the epoch's keys in the rendezvous store."""
        return f"{self.pipeline_id}/{self.epoch}"


class Receipt(Protocol):
    """A receive that has been started."""

    def wait(self) -> None:
        """Waits until the tensor may be used. On a GPU the method returns at once, and only the
        current stream waits.

        Raises:
            TransferError: the tensor was not received.
        """


class Transport(Protocol):
    """Moves hidden states [n_tokens, hidden_size] from stage to stage."""

    @property
    def tensor_parallel(self) -> TensorParallel:
        """The ranks that share this stage's layers. Their collective operations raise
        TransferError."""

    def warm_up(self) -> None:
        """Exchanges a first tensor with each neighbour, so that all connections are open.

        Raises:
            TransferError: a neighbour did not answer.
        """

    def start_receive(self, hidden: torch.Tensor, iteration: int) -> Receipt:
        """Starts to receive the previous stage's hidden states of an iteration into `hidden`.

        Receives must be started in the order of iterations.

        Raises:
            TransferError: the previous stage is gone.
        """

    def send(self, hidden: torch.Tensor, iteration: int) -> None:
        """Starts to send `hidden` to the next stage. The caller must not write to `hidden` after
        the call.

        Raises:
            TransferError: the next stage is gone.
        """

    def abort(self) -> None:
        """Makes all current and later operations raise TransferError. May be called from any
        thread."""

    def close(self) -> None:
        """Leaves the epoch's groups and drops all transfers in flight."""
