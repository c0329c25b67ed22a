"""Changes logits before a token is chosen from them: penalties, then biases, then a mask.

    penalties  change the logits of tokens that have occurred (`kernels.pytorch.penalize`)
    biases     are added to the logits of single tokens
    masks      say which tokens of a row may be sampled; the logits of all other tokens become
               BANNED, a finite number, because a NaN or an infinity marks a row that cannot be
               sampled

All changes are computed in float32. The host does not wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kernels.forms.sampling_columns import AllowedTokens, Biases, Penalties, SamplingColumns

BANNED = -(2.0**100)
"""The logit of a token that may not be sampled. It is below every logit of a model. The token's
probability is 0 at every temperature up to MAX_TEMPERATURE. The value is finite, so that the sum of
a row is finite, too."""

MAX_TEMPERATURE = 2.0**90
"""Largest temperature that is used; a higher one is replaced by this value. Already at far lower
temperatures, all tokens are equally likely."""


def adjust(
    logits: Tensor, columns: SamplingColumns, *, penalize: Callable[[Tensor, Penalties], Tensor]
) -> Tensor:
    """Returns a float32 copy of `logits` [n_rows, vocab_size], changed by all options in `columns`.
    If no option changes a logit, returns `logits` itself."""
    if columns.penalties is not None:
        logits = penalize(logits, columns.penalties)
    if columns.biases is not None:
        logits = _add_biases(logits, columns.biases)
    if columns.allowed is not None:
        logits = _keep_allowed(logits, columns.allowed)
    return logits


def _add_biases(logits: Tensor, biases: Biases) -> Tensor:
    places = (biases.rows, biases.ids)
    return logits.to(torch.float32, copy=True).index_put_(places, biases.values, accumulate=True)


def _keep_allowed(logits: Tensor, allowed: AllowedTokens) -> Tensor:
    logits = logits.to(torch.float32, copy=True)
    are_all = len(allowed.rows) == len(logits)
    rows = logits if are_all else logits.index_select(0, allowed.rows)  # [n_masked, vocab_size]
    # Any finite logit plus BANNED rounds to BANNED. NaN and infinities stay unchanged.
    rows.add_(_banned(allowed.masks)[:, : logits.shape[1]], alpha=BANNED)
    return rows if are_all else logits.index_copy_(0, allowed.rows, rows)


def _banned(masks: Tensor) -> Tensor:
    """Returns 1 for each token that a mask bans and 0 for each token that it allows, [n, 32 *
    n_words] uint8. `masks` are [n, n_words] int32, with the lowest bit of a word first."""
    of_bytes = masks.bitwise_not().view(torch.uint8)  # the lowest byte of a word first
    if of_bytes.is_cpu:  # NumPy has an operation that unpacks bits
        return torch.from_numpy(np.unpackbits(of_bytes.numpy(), axis=1, bitorder="little"))
    shifts = torch.arange(8, dtype=torch.uint8, device=masks.device)
    return (of_bytes[..., None] >> shifts & 1).view(len(masks), -1)
