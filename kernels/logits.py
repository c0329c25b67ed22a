"""Logits, and what was found on the way to them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Logits:
    """The scores of all tokens after some of a batch's."""

    values: Tensor  # [n_sampled, vocab_size]
    likeliest: NDArray[np.int64] | None = None
    """What `kernels.greedy` makes of them, [n_sampled], where the host knows it already."""
