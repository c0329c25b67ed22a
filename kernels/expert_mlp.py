"""The gated MLPs of a mixture of experts, each run once over all tokens that chose it.

Tokens are brought into the order of their experts, so that an expert's tokens lie side by side and
its two matrix products are two calls, however many tokens there are. Experts that nobody chose cost
nothing. On a GPU the one wait for the counts is the price of not padding. The experts' shares are
summed in float32.
"""

import torch
from torch import Tensor

from kernels.silu_and_mul import silu_and_mul


def expert_mlp(
    x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor
) -> Tensor:
    """Returns `sum_i weights[t, i] * mlp of experts[t, i] (x[t])` for every token t.

    `x` is [n_tokens, hidden], `gate_up` [n_experts, 2 * size, hidden], `down`
    [n_experts, hidden, size], `experts` (int64, all different for a token) and `weights` are
    [n_tokens, n_chosen]. The result is [n_tokens, hidden].
    """
    n_chosen = experts.shape[1]
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)  # [n_tokens * n_chosen]
    n_of_expert = torch.bincount(chosen, minlength=len(gate_up)).tolist()
    tokens = order // n_chosen
    shares = weights.flatten().index_select(0, order).float()  # [n_tokens * n_chosen]
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    begin = 0
    for expert, n in enumerate(n_of_expert):
        if n:
            mine = tokens[begin : begin + n]
            inner = silu_and_mul(x.index_select(0, mine) @ gate_up[expert].t())  # [n, size]
            outer = inner @ down[expert].t()  # [n, hidden]
            out.index_add_(0, mine, outer * shares[begin : begin + n, None])
            begin += n
    return out.to(x.dtype)
