"""Sampling parameters as columns: tensors with one value for each row of a batch of logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IN_PROMPT = 1 << 30
"""The bit of a token's count that is set if the prompt contains the token. The lower bits are the
number of times that the token was generated."""


@dataclass(frozen=True, slots=True)
class Penalties:
    """The rows of a batch of logits that have penalties, and the penalties of these rows.
    `kernels.pytorch.penalize` describes the penalties.

    Columns are [n_penalized], on the device of the logits.
    """

    rows: Tensor  # int64, in ascending order
    repetition: Tensor  # float32, above 0; 1 changes nothing
    frequency: Tensor  # float32; 0 changes nothing
    presence: Tensor  # float32; 0 changes nothing
    count_rows: Tensor  # int64, the row of `counts` that belongs to each penalised row
    counts: Tensor  # [any, vocab_size] int32: times that a token was generated, and IN_PROMPT


@dataclass(frozen=True, slots=True)
class Biases:
    """Numbers that are added to single logits. Columns are [n_biases], on the device of the
    logits."""

    rows: Tensor  # int64
    ids: Tensor  # int64, within the vocabulary; a row has no id twice
    values: Tensor  # float32


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """Rows of a batch of logits in which only some tokens may be sampled, and a mask of the allowed
    tokens for each of these rows. A mask allows at least one token."""

    rows: Tensor  # [n_masked] int64, in ascending order
    masks: Tensor  # [n_masked, vocab_size / 32, rounded up] int32: bit b of word w is id 32 w + b


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """The sampling parameters of each row of logits, for `Ops.sample`.

    Columns are [n_rows], on the device of the logits; if `is_greedy` they may be empty. The flags
    tell the host which kernels to launch, so that it need not read the columns from the device.
    """

    temperature: Tensor  # float32; 0 takes the argmax, above it a token is sampled
    top_k: Tensor  # int64; 0 and less keep all
    top_p: Tensor  # float64, in (0, 1]
    min_p: Tensor  # float32, in [0, 1]
    uniform: Tensor  # float64, in [0, 1): the random number
    banned_rows: Tensor  # [n_banned] int64, in ascending order; the row of each banned token
    banned_ids: Tensor  # [n_banned] int64, ids of banned tokens; a row never has all ids banned
    any_sampled: bool  # some temperature is above 0
    any_limited: bool  # some sampled row has a top_k or a top_p below 1
    any_min_p: bool  # some sampled row has a min_p above 0
    penalties: Penalties | None = None  # None if no row has penalties
    biases: Biases | None = None  # None if no row has biases
    allowed: AllowedTokens | None = None  # None if every row may sample all tokens

    @property
    def is_greedy(self) -> bool:
        """Whether every row's token is the argmax of its logits after penalties, biases and masks.
        False if a token of any row is banned."""
        return not self.any_sampled and not len(self.banned_ids)


_EMPTY = torch.empty(0)

ALL_GREEDY = SamplingColumns(
    temperature=_EMPTY,
    top_k=_EMPTY.long(),
    top_p=_EMPTY.double(),
    min_p=_EMPTY,
    uniform=_EMPTY.double(),
    banned_rows=_EMPTY.long(),
    banned_ids=_EMPTY.long(),
    any_sampled=False,
    any_limited=False,
    any_min_p=False,
)
"""Columns that select the argmax of every row, for any number of rows and any device."""
