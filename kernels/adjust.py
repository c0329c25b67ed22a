"""Changes logits before a token is chosen from them: penalties, then biases, then a mask.

    penalties  make tokens that have occurred more or less likely (`kernels.penalize`)
    biases     are added to the logits of single tokens
    masks      leave only some tokens of a row; the others get BANNED, so that a NaN or an infinity
               still marks a row that cannot be sampled

All of it is in float32, and in operations that wait for no device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.sampling_columns import AllowedTokens, Biases, Penalties, SamplingColumns

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
    rows = logits.index_select(0, allowed.rows)  # [n_masked, vocab_size]
    is_banned = ~_bits(allowed.masks)[:, : logits.shape[1]] & rows.isfinite()
    return logits.index_copy_(0, allowed.rows, rows.masked_fill_(is_banned, BANNED))


def _bits(masks: Tensor) -> Tensor:
    """Returns the bits of `masks` [n, n_words] int32, lowest first: [n, 32 * n_words] bool."""
    of_byte = torch.arange(8, dtype=torch.uint8, device=masks.device)
    bits = (masks.view(torch.uint8)[..., None] >> of_byte) & 1  # bytes lie lowest first
    return bits.view(len(masks), -1).bool()
