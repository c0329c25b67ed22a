"""The argmax of every row of logits."""

import torch
from torch import Tensor


def greedy(logits: Tensor) -> Tensor:
    """Returns the argmax of each row of `logits` [n, vocab_size], [n] int64.

    Among equal logits, the token with the lowest id is chosen. The result of a row with a NaN or an
    infinity is -1.
    """
    # A sum is finite only if all its terms are. It takes one pass and no tensor of flags.
    is_finite = logits.sum(-1, dtype=torch.float32).isfinite()
    return logits.argmax(-1).masked_fill_(~is_finite, -1)
