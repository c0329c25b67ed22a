"""An MLP in which only the largest gates of a token are open.

A limit is subtracted from all gates, and gates below it become zero. The limit follows from the
mean and the standard deviation of the token's gates, which the ranks that share the MLP compute
together.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.program import Program
from kernels.steps import Buffer
from services.worker.models.layers import ColumnParallelLinear, RowParallelLinear
from services.worker.models.weights import TensorSource


@dataclass(frozen=True, slots=True)
class SparseMLP:
    """This rank's share of an MLP that subtracts a limit from the gates of each token. Gates below
    the limit become zero.

    The limit is `n_deviations` standard deviations above the mean of the token's gates.
    """

    gate_up: ColumnParallelLinear
    down: RowParallelLinear
    size: int  # number of gates on all ranks
    n_deviations: float

    @classmethod
    def read(
        cls,
        source: TensorSource,
        prefix: str,
        *,
        hidden_size: int,
        size: int,
        sparsity: float,
    ) -> Self:
        """Reads `gate_proj`, `up_proj` and `down_proj` under `prefix`.

        `sparsity` is the share of gates that become zero if gates are normally distributed.
        """
        names = [f"{prefix}.{name}_proj" for name in ("gate", "up")]
        gate_up = ColumnParallelLinear.read(
            source, names, n_in=hidden_size, n_out=(size, size), has_bias=False
        )
        down = RowParallelLinear.read(
            source, f"{prefix}.down_proj", n_in=size, n_out=hidden_size, has_bias=False
        )
        return cls(gate_up, down, size, NormalDist().inv_cdf(sparsity))

    def describe(self, to: Program, x: Buffer, residual: Buffer | None = None) -> Buffer:
        """Adds the steps of the MLP to a program, as `MLP.describe` specifies."""
        both = self.gate_up.describe(to, x)
        gates = to.buffer(both.width // 2, torch.float32)
        total, squares = to.buffer(1, torch.float32), to.buffer(1, torch.float32)
        to.call("sums of gates", _with_sums, (both,), gates, total)
        to.all_reduce(total)
        to.call("squared deviations of gates", self._squares, (gates, total), squares)
        to.all_reduce(squares)
        to.call("closed gates", self._closed, (both, gates, total, squares), both)
        return self.down.describe(to, to.gate("gelu_tanh", both), residual)

    def _squares(self, gates: Tensor, total: Tensor) -> Tensor:
        """Returns the sum of squared deviations of this rank's gates from the mean,
        [n_tokens, 1]."""
        return (gates - total / self.size).square().sum(-1, keepdim=True)

    def _closed(self, both: Tensor, gates: Tensor, total: Tensor, squares: Tensor) -> Tensor:
        """Overwrites the first half of `both` with the gates minus the limit, or with zero for
        gates below the limit, and returns `both`."""
        limit = total / self.size + self.n_deviations * (squares / self.size).sqrt()
        both[:, : gates.shape[1]] = F.relu(gates - limit)
        return both


def _with_sums(both: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gates, which are the first half of `both`, and the sum of each token's gates on
    this rank. Both are float32."""
    gates = both[:, : both.shape[1] // 2].to(torch.float32, copy=True)
    return gates, gates.sum(-1, keepdim=True)
