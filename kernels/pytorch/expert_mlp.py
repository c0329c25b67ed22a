"""Runs the gated MLPs of a mixture of experts, each of them once for all tokens that chose it.

Tokens are sorted by expert. The tokens of one expert are then adjacent, and the expert's two matrix
products are one call each for any number of tokens. Experts that no token chose are skipped. On a
GPU the host waits once for the number of tokens of each expert; padding would avoid this wait. The
experts' outputs are summed in float32, in the order of the experts.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.forms.experts import PLAIN_EXPERTS, ExpertForm
from kernels.pytorch.gates import clamp_and_mul, gelu_and_mul, silu_and_mul


def expert_mlp(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    experts: Tensor,
    weights: Tensor,
    form: ExpertForm = PLAIN_EXPERTS,
) -> Tensor:
    """Runs the experts of a layer one after the other, and returns the weighted sums of their
    outputs, as `kernels.ops.RunExpertMLPs` describes."""
    gate = silu_and_mul if form.gate == "silu" else gelu_and_mul
    if form.clamp is not None:
        gate = partial(clamp_and_mul, clamp=form.clamp)

    def mlp(expert: int, some: Tensor) -> Tensor:
        inner = gate(_product(some, gate_up, form.gate_up_bias, expert))  # [n, size]
        return _product(inner, down, form.down_bias, expert)  # [n, hidden]

    return mix_experts(x, experts, weights, n_experts=len(down), mlp=mlp)


def _product(x: Tensor, matrices: Tensor, biases: Tensor | None, expert: int) -> Tensor:
    if biases is None:
        return x @ matrices[expert].t()
    return F.linear(x, matrices[expert], biases[expert])


def mix_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    *,
    n_experts: int,
    mlp: Callable[[int, Tensor], Tensor],
) -> Tensor:
    """Returns the weighted sum of the chosen experts' outputs, [n_tokens, hidden], of the type of
    `x`.

    `x` is [n_tokens, hidden]. `experts` and `weights` are [n_tokens, n_chosen]. `mlp(expert, rows)`
    returns the output of one expert for some rows [n, hidden] of `x`.
    """
    n_chosen = experts.shape[1]
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)  # [n_tokens * n_chosen]
    n_of_expert = torch.bincount(chosen, minlength=n_experts).tolist()
    tokens = order // n_chosen
    shares = weights.flatten().index_select(0, order).float()  # [n_tokens * n_chosen]
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    begin = 0
    for expert, n in enumerate(n_of_expert):
        if n:
            mine = tokens[begin : begin + n]
            outer = mlp(expert, x.index_select(0, mine))  # [n, hidden]
            out.index_add_(0, mine, outer * shares[begin : begin + n, None])
            begin += n
    return out.to(x.dtype)
