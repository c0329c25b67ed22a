"""Changes logits before a token is chosen from them: penalties, then biases, then a mask.

    penalties  make tokens that have occurred more or less likely (`kernels.pytorch.penalize`)
    biases     are added to the logits of single tokens
    masks      leave only some tokens of a row; the others get BANNED, so that a NaN or an infinity
               still marks a row that cannot be sampled

All of it is in float32, and in operations that wait for no device.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kernels.forms.sampling_columns import AllowedTokens, Biases, Penalties, SamplingColumns

BANNED = -(2.0**100)
"""The logit of a token that may not be sampled: below any of a model, divided by any temperature up
to MAX_TEMPERATURE it weighs nothing, and the sum of a row of it is finite."""

MAX_TEMPERATURE = 2.0**90
"""Temperatures above it count as it; long before, all tokens are equally likely."""


def adjust(
    logits: Tensor, columns: SamplingColumns, *, penalize: Callable[[Tensor, Penalties], Tensor]
) -> Tensor:
    """Returns `logits` [n_rows, vocab_size] as the columns change them: a float32 copy, or `logits`
    itself if they change nothing."""
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
    # A finite logit is so small beside BANNED that their sum is BANNED; others stay what they are.
    rows.add_(_banned(allowed.masks)[:, : logits.shape[1]], alpha=BANNED)
    return rows if are_all else logits.index_copy_(0, allowed.rows, rows)


def _banned(masks: Tensor) -> Tensor:
    """Returns 1 for each bit of `masks` [n, n_words] int32 that is 0, and 0 for the others, lowest
    first: [n, 32 * n_words] uint8."""
    of_bytes = masks.bitwise_not().view(torch.uint8)  # which lie lowest first
    if of_bytes.is_cpu:  # where NumPy has an operation for it
        return torch.from_numpy(np.unpackbits(of_bytes.numpy(), axis=1, bitorder="little"))
    shifts = torch.arange(8, dtype=torch.uint8, device=masks.device)
    return (of_bytes[..., None] >> shifts & 1).view(len(masks), -1)
