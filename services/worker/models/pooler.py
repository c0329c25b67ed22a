"""Makes vectors (embeddings or scores) of hidden states, on the last stage, for requests that ask
for a vector.

A vector is made in three steps. `Pooler.states` normalises the hidden states of a prompt's tokens.
The engine combines these states into one (`engine.pooled_requests`). `Pooler.vector` makes the
vector of the prompt from this one state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ops import ProgramRunner
from kernels.program import Program
from services.common.pooling import Pooling
from services.worker.models.decoder_layers import Norm
from services.worker.models.score_heads import ScoreHead
from services.worker.models.tensor_parallel import SINGLE, TensorParallel


class Pooler:
    """Makes vectors (embeddings or scores) from the hidden states of a model's last stage. All
    ranks of the stage have equal poolers."""

    def __init__(
        self, pooling: Pooling, norm: ProgramRunner | None, head: ScoreHead | None
    ) -> None:
        """`norm` runs a program of `norm_program`. It is None if the last layer ends with a norm.
        `head` turns a hidden state into scores. It is None if vectors are embeddings, which are
        hidden states."""
        self.pooling = pooling
        self._norm = norm
        self._head = head

    def states(self, hidden: Tensor, ranks: TensorParallel = SINGLE) -> Tensor:
        """Returns the normalised states [n, hidden_size] of hidden states [n, hidden_size] after
        all layers. Each row depends on its own hidden state only."""
        return hidden if self._norm is None else self._norm.head(hidden, ranks)

    def vector(self, state: Tensor) -> Tensor:
        """Returns the vector [n_values] float32 of one normalised state [hidden_size]."""
        return state.float() if self._head is None else self._head.scores(state)


def norm_program(norm: Norm, hidden_size: int, dtype: torch.dtype) -> Program:
    """Returns a program that only normalises hidden states of `dtype`. It has no layers, and `norm`
    takes the place of the head."""
    to = Program(dtype)
    hidden = to.take_in(hidden_size)
    to.end_layers(hidden)
    to.end_head(norm.describe(to, to.select(hidden)))
    return to
