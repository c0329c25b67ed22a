"""Logits, together with their argmax if an operation has already computed it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Logits:
    """The logits [n_sampled, vocab_size] of the sampled tokens of a batch."""

    values: Tensor  # [n_sampled, vocab_size]
    argmax: NDArray[np.int64] | None = None
    """The argmax of each row of `values` (`Ops.greedy`), [n_sampled]. None if it has not been
    computed, or is not on the host yet."""
    hidden: Tensor | None = None
    """The hidden states of the batch [n_tokens, hidden_size], if further logits must be computed
    from them."""
