"""Sampling as slow and obvious code, one row and one token at a time, in float64."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from kernels.forms.sampling_columns import IN_PROMPT, AllowedTokens, Penalties, SamplingColumns


def penalize(logits: Tensor, penalties: Penalties) -> Tensor:
    """Returns a float64 copy of `logits` [n_rows, vocab_size] in which the rows of `penalties` are
    penalised."""
    penalized = logits.to(torch.float64, copy=True)
    for i, (row, count_row) in enumerate(
        zip(penalties.rows.tolist(), penalties.count_rows.tolist(), strict=True)
    ):
        repetition = penalties.repetition[i].item()
        for token, count in enumerate(penalties.counts[count_row].tolist()):
            if not count:
                continue
            logit = penalized[row, token].item()
            n_generated = count - IN_PROMPT if count >= IN_PROMPT else count
            logit = logit / repetition if logit > 0 else logit * repetition
            logit -= penalties.frequency[i].item() * n_generated
            logit -= penalties.presence[i].item() if n_generated else 0
            penalized[row, token] = logit
    return penalized


def _not_allowed(allowed: AllowedTokens | None, row: int, *, vocab_size: int) -> set[int]:
    """Returns the tokens that the mask of `row` bans. Returns an empty set if the row has no
    mask."""
    if allowed is None or row not in allowed.rows.tolist():
        return set()
    words = allowed.masks[allowed.rows.tolist().index(row)].tolist()
    return {token for token in range(vocab_size) if not words[token // 32] >> token % 32 & 1}


def sample(logits: Tensor, columns: SamplingColumns) -> Tensor:
    """Returns a token id for each row of `logits` [n_rows, vocab_size]. Returns -1 for a row with a
    NaN or an infinity.

    All tokens of a row are sorted, and all numbers are float64.
    """
    if columns.penalties is not None:
        logits = penalize(logits, columns.penalties)
    logits = logits.double()
    if (biases := columns.biases) is not None:
        for row, token, value in zip(biases.rows, biases.ids, biases.values, strict=True):
            logits[row, token] += value.item()
    pairs = list(zip(columns.banned_rows.tolist(), columns.banned_ids.tolist(), strict=True))
    tokens = []
    for row, values in enumerate(logits):
        if not values.isfinite().all():
            tokens.append(-1)
            continue
        banned = {token for of_row, token in pairs if of_row == row}
        banned |= _not_allowed(columns.allowed, row, vocab_size=len(values))
        logit = dict(enumerate(values.tolist()))
        order = sorted(logit.keys() - banned, key=lambda token: (-logit[token], token))
        temperature = columns.temperature[row].item()
        if not temperature:
            tokens.append(order[0])
            continue
        weight = {
            token: math.exp(max((logit[token] - logit[order[0]]) / temperature, -1e3))
            for token in order
        }
        order = order[: max(int(columns.top_k[row]), 0) or len(order)]
        top_p, total = columns.top_p[row].item(), math.fsum(weight[token] for token in order)
        if top_p < 1:
            ends = itertools.accumulate(weight[token] for token in order)
            # A token is kept if the tokens before it do not add up to `top_p`.
            order = [
                token
                for token, end in zip(order, ends, strict=True)
                if end - weight[token] < top_p * total
            ]
        kept = sorted(token for token in order if weight[token] >= columns.min_p[row].item())
        up_to = list(itertools.accumulate(weight[token] for token in kept))
        target = columns.uniform[row].item() * up_to[-1]
        tokens.append(next(token for token, end in zip(kept, up_to, strict=True) if end > target))
    return torch.tensor(tokens)
