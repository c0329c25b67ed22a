"""Runs the two kinds of matrices that are parts of steps, and no functions by themselves."""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels import TORCH, Ops
from kernels.program import Program
from kernels.pytorch.interpreter import Interpreter
from kernels.steps import Buffer, ExpertMatrices
from kernels.weights.gated_in_two import GatedMatrix
from tests.worker.programs import batch_of


def gated(weight: GatedMatrix, x: Tensor, ops: Ops = TORCH) -> Tensor:
    """The gated product of tokens `x` [n_tokens, n_in], [n_tokens, n_out]."""
    return _interpreted(lambda to, hidden: to.gated(weight, hidden), x, ops)


def mixed(
    matrices: ExpertMatrices, x: Tensor, experts: Tensor, weights: Tensor, ops: Ops = TORCH
) -> Tensor:
    """The weighted sum of the chosen `experts` [n_tokens, n_chosen] of tokens `x`."""

    def describe(to: Program, hidden: Buffer) -> Buffer:
        n_chosen = experts.shape[1]
        chosen = to.buffer(n_chosen, torch.int64), to.buffer(n_chosen, torch.float32)
        to.call("choice", lambda x: (experts, weights), (hidden,), *chosen)
        return to.run_experts(matrices, hidden, *chosen)

    return _interpreted(describe, x, ops)


def _interpreted(describe: Callable[[Program, Buffer], Buffer], x: Tensor, ops: Ops) -> Tensor:
    program = Program(x.dtype)
    program.end_layers(describe(program, program.take_in(x.shape[1])))
    return Interpreter(program, ops)(x.clone(), batch_of(len(x)), ())
