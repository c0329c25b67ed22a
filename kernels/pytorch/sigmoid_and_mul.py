"""A gate of its own for what is already there: attention's output, or that of an expert."""

from torch import Tensor


def sigmoid_and_mul(gate: Tensor, x: Tensor) -> Tensor:
    """Returns `sigmoid(gate) * x`, [n_tokens, size].

    `gate` is [n_tokens, size], or [n_tokens, 1] for one of the whole token.
    """
    return gate.float().sigmoid().mul(x.float()).to(x.dtype)
