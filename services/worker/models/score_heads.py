"""The heads that turn one hidden state into scores. The hidden state stands for a whole prompt, and
is made from the states of its tokens by pooling.

Scores are computed in float64, one state at a time, so that they do not depend on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from services.worker.models.weights import TensorSource


class ScoreHead(Protocol):
    """Turns a hidden state into scores."""

    def scores(self, state: Tensor) -> Tensor:
        """Returns the scores [n_values] float32 of a hidden state [hidden_size]."""


@dataclass(frozen=True, slots=True)
class LinearScores:
    """A head whose scores are the products of the hidden state with the rows of a matrix."""

    matrix: Tensor  # [n_values, hidden_size]

    def scores(self, state: Tensor) -> Tensor:
        return (self.matrix.double() * state.double()).sum(-1).float()


@dataclass(frozen=True, slots=True)
class Affine:
    """A matrix and a bias, as float64."""

    weight: Tensor  # [n_out, n_in]
    bias: Tensor  # [n_out]

    @classmethod
    def read(cls, source: TensorSource, name: str, *, n_in: int, n_out: int) -> Self:
        """Reads `{name}.weight` and `{name}.bias`."""
        weight = source.tensor(f"{name}.weight", n_out, n_in, dtype=torch.float32)
        bias = source.tensor(f"{name}.bias", n_out, dtype=torch.float32)
        return cls(weight.double(), bias.double())

    def of(self, x: Tensor) -> Tensor:
        """Returns the product of a vector [n_in] float64 with the matrix, plus the bias."""
        return (self.weight * x).sum(-1) + self.bias


@dataclass(frozen=True, slots=True)
class TanhScores:
    """The classification head of BERT: a linear layer with tanh, then another linear layer."""

    dense: Affine
    out: Affine

    def scores(self, state: Tensor) -> Tensor:
        return self.out.of(torch.tanh(self.dense.of(state.double()))).float()
