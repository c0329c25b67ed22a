"""How each row of a batch of logits is sampled, in columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Columns are [n_rows], where the logits are; `kernels.sample` says what they mean.

    What the host must know to choose what to launch it is told, so that it fetches nothing. If
    every row `is_greedy`, columns may be empty.
    """

    temperature: Tensor  # float32; 0 takes the most likely token, above it one is drawn
    top_k: Tensor  # int64; 0 keeps all
    top_p: Tensor  # float64, in (0, 1]
    min_p: Tensor  # float32, in [0, 1]
    uniform: Tensor  # float64, in [0, 1): the draw
    forbidden_rows: Tensor  # [n_forbidden] int64, in order; of each pair the row
    forbidden_ids: Tensor  # [n_forbidden] int64, within the vocabulary; never all ids of a row
    any_drawn: bool  # some temperature is above 0
    any_limited: bool  # some drawn row has a top_k or a top_p below 1
    any_min_p: bool  # some drawn row has a min_p above 0

    @property
    def is_greedy(self) -> bool:
        """Whether every row's token is the most likely one of all."""
        return not self.any_drawn and not len(self.forbidden_ids)


_EMPTY = torch.empty(0)

ALL_GREEDY = SamplingColumns(
    temperature=_EMPTY,
    top_k=_EMPTY.long(),
    top_p=_EMPTY.double(),
    min_p=_EMPTY,
    uniform=_EMPTY.double(),
    forbidden_rows=_EMPTY.long(),
    forbidden_ids=_EMPTY.long(),
    any_drawn=False,
    any_limited=False,
    any_min_p=False,
)
"""Of any number of rows, on any device."""
