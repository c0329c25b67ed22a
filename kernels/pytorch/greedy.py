"""The argmax of every row of logits."""

import torch
from torch import Tensor


def greedy(logits: Tensor) -> Tensor:
    """Returns the argmax of each row of `logits` [n, vocab_size]; [n] int64.

    Of equal logits the first one counts. A row with a NaN or an infinity gets -1.
    """
    # A sum is finite only if everything in it is, and it needs one pass and no second tensor.
    is_finite = logits.sum(-1, dtype=torch.float32).isfinite()
    return logits.argmax(-1).masked_fill_(~is_finite, -1)
