"""Chooses a token for each row of logits of a batch.

Logits are adjusted first (`adjust`). Then the filters apply in this order: banned tokens are
removed, the logits are divided by the temperature, `top_k` keeps the most likely tokens, `top_p`
keeps the smallest set of the remaining tokens whose renormalised probabilities add up to at least
`top_p`, and `min_p` drops tokens whose probability is below `min_p` times the probability of the
most likely token. Of equally likely tokens, tokens with smaller ids come first, so `top_k = 1`
equals the argmax.

A token is sampled by looking up one uniform random number in the cumulative distribution over token
ids. The token depends only on its own row, and so not on the other rows of the batch.

This version is for a CPU. On a GPU the host would wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.forms.sampling_columns import SamplingColumns
from kernels.pytorch.adjust import MAX_TEMPERATURE, adjust
from kernels.pytorch.greedy import greedy
from kernels.pytorch.penalize import penalize

# Number of tokens per block of the two-level cumulative sum. Two levels are 100 times cheaper than
# one cumulative sum in float64 over a vocabulary of 128,000.
CDF_BLOCK = 128

# Numbers of most likely tokens that are examined for `top_k` and `top_p`, one number after the
# other until a row is settled. Finding the first 64 of 32,000 takes a thirtieth of sorting all.
_WIDTHS = (64, 1024)


def sample(
    logits: Tensor, columns: SamplingColumns, *, greedy: Callable[[Tensor], Tensor] = greedy
) -> Tensor:
    """Returns a token id for each row of `logits` [n_rows, vocab_size], [n_rows] int64.

    The result of a row with a NaN or an infinity is -1. `greedy` is the operation `Ops.greedy` for
    the device of the logits. Greedy rows without banned tokens are read only once.
    """
    logits = adjust(logits, columns, penalize=penalize)
    tokens = greedy(logits)
    if columns.is_greedy:
        return tokens
    is_unsettled = columns.temperature > 0
    is_unsettled[columns.banned_rows] = True
    rows = (is_unsettled & (tokens >= 0)).nonzero()[:, 0]
    if len(rows):
        tokens[rows] = _sample_rows(logits[rows].float(), columns, rows)
    return tokens


def _sample_rows(logits: Tensor, columns: SamplingColumns, rows: Tensor) -> Tensor:
    """Samples tokens [n] for the `rows` [n] of the batch. `logits` are the float32 logits of these
    rows and may be overwritten."""
    _ban(logits, columns, rows)
    tokens = logits.argmax(-1)
    sampled = (columns.temperature[rows] > 0).nonzero()[:, 0]
    if len(sampled):
        weights = _weights(logits[sampled], columns, rows[sampled])
        tokens[sampled] = invert_cdf(weights, columns.uniform[rows[sampled]])
    return tokens


def token_weights(logits: Tensor, columns: SamplingColumns) -> Tensor:
    """Returns the weights with which tokens are sampled, [n_rows, vocab_size]. Does not make the
    changes of `adjust`.

    A weight is a token's probability divided by the probability of the row's most likely token. It
    is 0 for tokens that the filters drop. Every row's temperature must be above 0.
    """
    rows = torch.arange(len(logits), device=logits.device)
    logits = logits.clone()
    _ban(logits, columns, rows)
    return _weights(logits, columns, rows)[:, : logits.shape[1]]


def _ban(logits: Tensor, columns: SamplingColumns, rows: Tensor) -> None:
    """Sets the logits of banned tokens to minus infinity, in place. `rows` are the indices in the
    batch of the rows of `logits`, in ascending order."""
    if not len(columns.banned_ids):
        return
    n_rows = len(columns.temperature)
    places = torch.full((n_rows,), -1, device=logits.device)  # index of each row in `logits`
    places[rows] = torch.arange(len(rows), device=logits.device)
    places = places[columns.banned_rows]
    is_here = places >= 0
    logits[places[is_here], columns.banned_ids[is_here]] = -torch.inf


def _weights(logits: Tensor, columns: SamplingColumns, rows: Tensor) -> Tensor:
    """Returns the sampling weights for `logits` [n, vocab_size], which are the logits of the `rows`
    [n] of the batch.

    The result is [n, vocab_size rounded up to a multiple of CDF_BLOCK]. The most likely token of a
    row has the weight 1.
    """
    n, vocab_size = logits.shape
    padded = logits.new_zeros(n, -(-vocab_size // CDF_BLOCK) * CDF_BLOCK)
    weights = padded[:, :vocab_size]
    # The subtraction comes first so that a division by a small temperature gives no infinity.
    torch.sub(logits, logits.amax(-1, keepdim=True), out=weights)
    weights.div_(columns.temperature[rows, None].clamp(max=MAX_TEMPERATURE)).exp_()
    if columns.any_limited:
        top_k, top_p = columns.top_k[rows], columns.top_p[rows]
        _keep_most_likely(logits, weights, top_k=top_k, top_p=top_p)
    if columns.any_min_p:
        weights.masked_fill_(weights < columns.min_p[rows, None], 0)
    return padded


def _keep_most_likely(logits: Tensor, weights: Tensor, *, top_k: Tensor, top_p: Tensor) -> None:
    """Applies `top_k` and `top_p` in place: sets the weight of each dropped token to 0."""
    vocab_size = logits.shape[1]
    top_k = top_k.where((top_k > 0) & (top_k < vocab_size), vocab_size)
    limited = ((top_k < vocab_size) | (top_p < 1)).nonzero()[:, 0]
    if not len(limited):
        return
    logits, kept_weights = logits[limited], weights[limited]
    n_kept, least = _n_most_likely(logits, kept_weights, top_k=top_k[limited], top_p=top_p[limited])
    is_kept = _largest(logits, n_kept, least)
    weights[limited] = kept_weights.masked_fill_(~is_kept, 0)


def _n_most_likely(
    logits: Tensor, weights: Tensor, *, top_k: Tensor, top_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns two results for each row: the number of tokens that `top_k` and `top_p` keep [n], and
    the smallest logit among the kept tokens [n].

    Only the most likely tokens of a row are sorted. They suffice if they include all tokens that
    `top_k` keeps, or if their probabilities add up to `top_p`.
    """
    n, vocab_size = logits.shape
    n_kept = torch.zeros_like(top_k)
    least = logits.new_zeros(n)
    pending = torch.arange(n, device=logits.device)
    for width in (*(w for w in _WIDTHS if w < vocab_size), vocab_size):
        values, ids = logits[pending].topk(width)  # [n_pending, width], largest first
        k, p = top_k[pending, None], top_p[pending, None]
        in_k = torch.arange(width, device=logits.device) < k
        mass = weights[pending].gather(1, ids).double() * in_k
        up_to = mass.cumsum(-1)
        # The weights are divided by the sum over the `top_k` tokens, or over the whole vocabulary.
        whole = weights[pending].sum(-1, keepdim=True, dtype=torch.float64)
        total = torch.where(k < vocab_size, up_to[:, -1:], whole)
        # A token belongs to the smallest set if the tokens before it do not add up to `top_p`.
        is_kept = in_k & ((up_to - mass < p * total) | (p >= 1))
        is_enough = (k == vocab_size) & (up_to[:, -1:] >= p * total)
        is_settled = ((k <= width) | is_enough)[:, 0]
        count = is_kept.sum(-1)
        settled = pending[is_settled]
        n_kept[settled] = count[is_settled]
        least[settled] = values.gather(1, count[:, None] - 1)[is_settled, 0]
        pending = pending[~is_settled]
        if not len(pending):
            break
    return n_kept, least


def _largest(logits: Tensor, n_kept: Tensor, least: Tensor) -> Tensor:
    """Returns a mask, true for the `n_kept` [n] largest logits of each row. `least` [n] is the
    smallest of these logits in each row."""
    is_kept = logits >= least[:, None]
    surplus = is_kept.sum(-1) - n_kept
    if surplus.any():
        # Several tokens have the logit `least`: those with the lowest ids stay.
        is_tied = logits == least[:, None]
        n_tied_kept = is_tied.sum(-1) - surplus
        is_kept &= ~is_tied | (is_tied.cumsum(-1) <= n_tied_kept[:, None])
    return is_kept


def invert_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """Returns, for each row of `weights` [n, n_ids], the first id at which the cumulative sum
    exceeds `uniform` [n] (float64, in [0, 1)) times the total weight of the row.

    The weight of this id is never 0. `n_ids` is a multiple of CDF_BLOCK. The block of the id is
    found first, then the id within the block.
    """
    rows = torch.arange(len(weights), device=weights.device)
    blocks = weights.view(len(weights), -1, CDF_BLOCK)  # [n, n_blocks, block]
    up_to_block = blocks.sum(-1, dtype=torch.float64).cumsum(-1)  # [n, n_blocks]
    target = uniform * up_to_block[:, -1]
    block = torch.searchsorted(up_to_block, target[:, None], right=True)[:, 0]
    before = torch.where(block > 0, up_to_block[rows, block - 1], 0)
    up_to_token = blocks[rows, block].cumsum(-1, dtype=torch.float64)  # [n, block]
    # The two sums may round differently, so the target is limited to the sum of the block.
    end = up_to_token[:, -1]
    target = torch.minimum(target - before, torch.nextafter(end, torch.zeros_like(end)))
    token = torch.searchsorted(up_to_token, target[:, None], right=True)[:, 0]
    return block * CDF_BLOCK + token
