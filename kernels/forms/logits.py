"""Logits, and their argmax where it is known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Logits:
    """The scores of the vocabulary after sampled tokens of a batch."""

    values: Tensor  # [n_sampled, vocab_size]
    argmax: NDArray[np.int64] | None = None
    """The result of `Ops.greedy` on them, [n_sampled], where the host knows it already."""
    hidden: Tensor | None = None
    """The hidden states of the batch [n_tokens, hidden_size], where more logits are wanted."""
