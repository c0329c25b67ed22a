"""The data plane as a rank and its model see it: protocols, and the error that ends an epoch.

Nothing here waits that need not. A receive is started as soon as its plan is known, which is before
the activations are on their way and may be long before the rank gets to them; a send is not waited
for. Whatever a vanished or stopped peer leaves waiting is ended from another thread, by `abort`.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from services.worker.models.tensor_parallel import TensorParallel

MAX_PENDING_SENDS = 4
"""Sends that may be under way before the next one waits for the oldest; with NCCL, the device does,
and the host goes on."""


class TransferError(Exception):
    """A tensor could not be sent or received: the epoch is over for this rank."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank's place in its pipeline."""

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
        """Number of this rank among all ranks; the ranks of a stage are neighbours."""
        return self.stage_index * self.tp_size + self.tp_rank

    @property
    def prefix(self) -> str:
        """Prefix of the epoch's keys in the rendezvous store."""
        return f"{self.pipeline_id}/{self.epoch}"


class Receipt(Protocol):
    """A receive that has been started."""

    def wait(self) -> None:
        """Returns when the tensor may be used: on a CPU it is there, on a GPU the current stream
        will not touch it before it is.

        Raises:
            TransferError: it did not come.
        """


class Transport(Protocol):
    """Moves hidden states [n_tokens, hidden_size] from stage to stage."""

    @property
    def tensor_parallel(self) -> TensorParallel:
        """The ranks that share this stage's layers; its operations raise TransferError."""

    def warm_up(self) -> None:
        """Exchanges a first tensor with each neighbour, which opens what connections are missing.

        Raises:
            TransferError: a neighbour did not answer.
        """

    def start_receive(self, hidden: torch.Tensor, iteration: int) -> Receipt:
        """Starts to fill `hidden` with what the previous stage sends for the iteration.

        Receives are started in the order of their iterations.

        Raises:
            TransferError: the previous stage is gone.
        """

    def send(self, hidden: torch.Tensor, iteration: int) -> None:
        """Starts to send `hidden` to the next stage; it must not be written to afterwards.

        Raises:
            TransferError: the next stage is gone.
        """

    def abort(self) -> None:
        """Ends whatever waits and whatever is tried from now on with a TransferError; may be called
        from any thread."""

    def close(self) -> None:
        """Leaves the epoch's groups; what is under way is dropped."""
