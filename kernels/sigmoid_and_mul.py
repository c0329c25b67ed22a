"""Gates whole tokens by one number each."""

from torch import Tensor


def sigmoid_and_mul(gates: Tensor, x: Tensor) -> Tensor:
    """Returns `sigmoid(gates) * x`, [n_tokens, size], for `gates` [n_tokens, 1].

    `x` may be used up. The sigmoid may be rounded to the element type, or the product alone.
    """
    return gates.sigmoid() * x
