"""A request's rules for single tokens: biases of logits, and a mask of the tokens that may be
sampled.

Rules are made once, when the request is admitted. This module also builds the columns of
`Ops.sample` from the rules of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kernels.forms.sampling_columns import AllowedTokens, Biases
from kernels.upload import Uploads
from services.common.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenRules:
    """The biases and the mask of one request."""

    biased_ids: NDArray[np.int64]  # [n_biases]
    biases: NDArray[np.float32]  # [n_biases]
    mask: NDArray[np.int32] | None
    """Bit mask of the tokens that may be sampled, [n_words]: bit b of word w is 1 if token 32 w + b
    may be sampled. None allows all tokens."""

    @classmethod
    def of(cls, sampling: SamplingParams, *, vocab_size: int) -> Self | None:
        """Returns the token rules of a request's options; None if the options set no rule."""
        if not (sampling.logit_bias or _has_mask(sampling)):
            return None
        biases = dict(sampling.logit_bias)
        return cls(
            biased_ids=np.fromiter(biases.keys(), np.int64, len(biases)),
            biases=np.fromiter(biases.values(), np.float32, len(biases)),
            mask=_mask(sampling, vocab_size),
        )


def bias_columns(rules: Sequence[tuple[int, TokenRules]], uploads: Uploads) -> Biases | None:
    """Returns the logit biases of a batch, or None if no row has one. `rules` has pairs of a row
    and its token rules, in ascending order of rows."""
    biased = [(row, one) for row, one in rules if len(one.biases)]
    if not biased:
        return None
    rows = np.repeat(*np.array([(row, len(one.biases)) for row, one in biased]).T)
    return Biases(
        rows=uploads.add(rows),
        ids=uploads.add(np.concatenate([one.biased_ids for _, one in biased])),
        values=uploads.add(np.concatenate([one.biases for _, one in biased])),
    )


def mask_columns(rules: Sequence[tuple[int, TokenRules]], uploads: Uploads) -> AllowedTokens | None:
    """Returns the token masks of a batch, or None if no row has one. `rules` has pairs of a row and
    its token rules, in ascending order of rows."""
    masks = [(row, one.mask) for row, one in rules if one.mask is not None]
    if not masks:
        return None
    return AllowedTokens(
        rows=uploads.add(np.array([row for row, _ in masks])),
        masks=uploads.add(np.stack([mask for _, mask in masks])),
    )


def allowed_mask(sampling: SamplingParams, vocab_size: int) -> NDArray[np.bool_]:
    """Returns, for each token of the vocabulary, whether the request's lists of allowed and of
    banned tokens permit it. The array is padded to a multiple of 32."""
    is_allowed = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    is_allowed[list(sampling.allowed_token_ids) or slice(vocab_size)] = True
    is_allowed[list(sampling.bad_token_ids)] = False
    return is_allowed


def _has_mask(sampling: SamplingParams) -> bool:
    """Returns whether a request's lists of allowed and banned tokens make a mask that stays the
    same for the whole output. A request with banned words has no such mask, because its mask
    depends on the output (`BadWordsMatcher`)."""
    lists = sampling.allowed_token_ids or sampling.bad_token_ids
    return bool(lists) and not sampling.bad_words


def _mask(sampling: SamplingParams, vocab_size: int) -> NDArray[np.int32] | None:
    if not _has_mask(sampling):
        return None
    return np.packbits(allowed_mask(sampling, vocab_size), bitorder="little").view(np.int32)
