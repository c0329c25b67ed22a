"""How each row of a batch of logits is sampled, in columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IN_PROMPT = 1 << 30
"""The bit of a token's count that says that the prompt has it; below are its times since."""


@dataclass(frozen=True, slots=True)
class Penalties:
    """The rows of a batch of logits that are penalised; columns are [n_penalized], where the logits
    are, and `kernels.penalize` says what they mean."""

    rows: Tensor  # int64, in order
    repetition: Tensor  # float32, above 0; 1 changes nothing
    frequency: Tensor  # float32; 0 changes nothing
    presence: Tensor  # float32; 0 changes nothing
    count_rows: Tensor  # int64, of each the row in `counts`
    counts: Tensor  # [any, vocab_size] int32: times that it was generated, and IN_PROMPT


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
    penalties: Penalties | None = None  # if there is a row that has any

    @property
    def is_greedy(self) -> bool:
        """Whether every row's token is the most likely one of all, penalised or not."""
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
