"""A model runner as far as a rank uses it."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from kernels.forms.logits import Logits
from services.worker.engine.last_tokens import Numbers
from services.worker.engine.logprobs import BatchLogprobs
from services.worker.engine.plan import IterationPlan


class Runner(Protocol):
    """Computes the iterations of one epoch on this rank's share of the stage."""

    def prepare(self, plan: IterationPlan) -> Any:
        """Takes in a plan and returns its batch."""

    def empty_hidden(self, n_tokens: Sequence[int]) -> torch.Tensor:
        """Returns room for the previous stage's hidden states of spans of `n_tokens`."""

    def forward(self, batch: Any, hidden: torch.Tensor | None) -> torch.Tensor:
        """Runs the stage's layers and returns hidden states."""

    def logits(self, batch: Any, hidden: torch.Tensor | None) -> Logits:
        """Runs the stage's layers and its head, on the last stage only."""

    def sample(self, batch: Any, logits: Logits) -> Numbers:
        """Samples tokens, on the last stage only."""

    def cut(self, batch: Any) -> list[int]:
        """Returns the places of sampled tokens that end an output before its grammar ends."""

    def logprobs(self, batch: Any, logits: Logits, tokens: Numbers) -> BatchLogprobs | None:
        """Returns the log-probabilities that requests want, on the last stage only."""

    def close(self) -> None:
        """Lets go of the transport's groups."""
