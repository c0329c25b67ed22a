"""The three forms of an iteration on a rank: announced, started and finished."""

from dataclasses import dataclass, field
from typing import Any

import torch
from orcinus.v1 import worker_pb2

from services.common.iteration_limit import IterationSize
from services.worker.engine.logprobs import BatchLogprobs
from services.worker.engine.pooled_requests import BatchVectors
from services.worker.rank.data_plane.transport import Receipt
from services.worker.rank.reported_tokens import ReportedTokens


@dataclass(frozen=True, slots=True)
class FinishedIteration:
    """The report of a rank about a finished iteration."""

    timing: worker_pb2.IterationTiming
    tokens: ReportedTokens | None  # on the last stage
    cut: list[int]  # indices of sampled tokens that end an output before its grammar ends
    trace: worker_pb2.IterationTrace | None  # if the iteration is recorded


class Announced:
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
        """Orders about adapters that came after this plan and before the next plan."""
        self._hidden = hidden
        self._receipt = receipt

    def receive(self) -> torch.Tensor | None:
        """Waits for the activations and returns them. Returns None on the first stage."""
        if self._receipt is not None:
            self._receipt.wait()
        return self._hidden


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens sampled on the last stage. They are on the host when the iteration is complete."""

    token_ids: torch.Tensor | list[int] | None = None
    cut: list[int] = field(default_factory=list)
    logprobs: BatchLogprobs | None = None
    vectors: BatchVectors | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """An iteration that has been started, and its results. They are valid when the iteration is
    complete."""

    message: worker_pb2.RunIterationsRequest
    number: int  # of the plan among all messages of the epoch, from 1
    work: IterationSize
    sampled: Sampled
    marks: tuple[Any, Any, Any]  # at its begin, after the receive, after the computation
    prepare_ns: int
    send_ns: int
    ended_unix_ns: int | None  # None if it was not complete after the start, as on a GPU
