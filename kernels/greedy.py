"""The most likely token of every row of logits."""

import torch
from torch import Tensor


def greedy(logits: Tensor) -> Tensor:
    """Token ids [n] int64 of `logits` [n, vocab_size]; -1 for a row with a NaN or an infinity.

    Of equally likely tokens the first.
    """
    # A sum is finite only if everything in it is, and it needs one pass and no second tensor.
    is_finite = logits.sum(-1, dtype=torch.float32).isfinite()
    return logits.argmax(-1).masked_fill_(~is_finite, -1)
