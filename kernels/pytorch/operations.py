"""PyTorch's versions of all operations, as `Ops`."""

from kernels.ops import Ops
from kernels.pytorch import (
    attention,
    delta_net,
    elementwise,
    embedding,
    expert_mlp,
    gates,
    greedy,
    norms,
    rotary,
    routing,
    sample,
)
from kernels.pytorch.interpreter import Interpreter

TORCH = Ops.of(
    attention,
    delta_net,
    elementwise,
    embedding,
    expert_mlp,
    gates,
    greedy,
    norms,
    rotary,
    routing,
    sample,
    run_program=Interpreter,
)
