"""The interface of a model runner that a rank uses."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from kernels.forms.logits import Logits
from services.worker.engine.last_tokens import Numbers
from services.worker.engine.logprobs import BatchLogprobs
from services.worker.engine.plan import IterationPlan
from services.worker.engine.pooled_requests import BatchVectors


class Runner(Protocol):
    """Computes the iterations of one epoch on this rank's share of the stage."""

    def prepare(self, plan: IterationPlan) -> Any:
        """Returns the batch of a plan, and updates the state of the plan's requests."""

    def empty_hidden(self, n_tokens: Sequence[int]) -> torch.Tensor:
        """Returns an uninitialised tensor, into which the previous stage's hidden states are
        received, for spans of `n_tokens` tokens."""

    def forward(self, batch: Any, hidden: torch.Tensor | None) -> torch.Tensor:
        """Runs the stage's layers and returns their hidden states."""

    def logits(self, batch: Any, hidden: torch.Tensor | None) -> Logits:
        """Runs the stage's layers and head and returns the logits. Called on the last stage
        only."""

    def sample(self, batch: Any, logits: Logits) -> Numbers:
        """Returns sampled tokens. Called on the last stage only."""

    def cut(self, batch: Any) -> list[int]:
        """Returns the indices of the sampled tokens whose outputs end early, because a step of the
        grammar takes too much work."""

    def logprobs(self, batch: Any, logits: Logits, tokens: Numbers) -> BatchLogprobs | None:
        """Returns the log-probabilities that requests ask for, or None if no request does. Called
        on the last stage only."""

    def vectors(self, batch: Any, logits: Logits) -> BatchVectors | None:
        """Returns the vectors (embeddings or scores) of the prompts that end in the batch, or None
        if there are none. Called on the last stage only."""

    def close(self) -> None:
        """Releases the recorded graphs that use the transport's process groups."""
