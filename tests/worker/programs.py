"""Runs the steps that a piece of a model describes, without a stage."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels import TORCH, Ops
from kernels.ops import LayerKV
from kernels.program import Program
from kernels.steps import Buffer
from kernels.upload import uploads_for
from services.worker.models.stage import StageBatch
from services.worker.models.tensor_parallel import SINGLE, TensorParallel


def computed(
    describe: Callable[[Program, Buffer], Buffer],
    x: Tensor,
    *,
    ranks: TensorParallel = SINGLE,
    ops: Ops = TORCH,
) -> Tensor:
    """Returns the result of the described steps for hidden states `x` [n_tokens, width]. `x` is not
    changed."""
    program = Program(x.dtype, tp_size=ranks.size)
    program.end_layers(describe(program, program.take_in(x.shape[1])))
    return ops.runner(program)(x.clone(), batch_of(len(x), ranks), ())


def embedded(
    describe: Callable[[Program], Buffer], token_ids: Tensor, *, ranks: TensorParallel = SINGLE
) -> Tensor:
    """Returns the result of a described embedding in float32 for tokens."""
    program = Program(torch.float32, tp_size=ranks.size)
    program.end_layers(describe(program))
    return TORCH.runner(program)(token_ids, batch_of(len(token_ids), ranks), ())


def batch_of(n_tokens: int, ranks: TensorParallel = SINGLE) -> StageBatch:
    """Returns a batch with one prompt of `n_tokens`, for steps without attention."""
    kv: Sequence[LayerKV] = [(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))]
    plan: Any = TORCH.plan_attention(
        np.array([0]),
        np.array([n_tokens]),
        block_tables=np.zeros((1, n_tokens), np.int64),
        key_caches=[kv[0][0]],
        n_heads=1,
        uploads=uploads_for(torch.device("cpu")),
    )
    positions = torch.arange(n_tokens)
    return StageBatch(positions, positions, plan, ranks)
