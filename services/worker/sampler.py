"""Chooses tokens from logits, a whole batch at once.

The filters apply in this order: the tokens that may not end a request yet are taken out, the logits
are divided by the temperature, `top_k` keeps the most likely, `top_p` the smallest set of what is
left whose probabilities (renormalised) add up to it, `min_p` what is at least that fraction as
likely as the most likely. Of equally likely tokens those with smaller ids come first, so
`top_k = 1` is exactly greedy.

A draw is one uniform number, looked up in the cumulative distribution over token ids. The number
is a hash of (seed, position) and nothing else: a request gets the same tokens alone or in any
batch, on any number of stages, before and after a recovery.

Knows no requests: a row is a row of logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.greedy import greedy

# Tokens per block of the two-level cumulative sum: 100 times cheaper than one level in float64 over
# a vocabulary of 128,000.
CDF_BLOCK = 128

# How many of the most likely tokens `top_p` looks at before it looks at more. Finding the first 64
# of 32,000 takes a thirtieth of the time of sorting all.
_WIDTHS = (64, 1024)


class NonFiniteLogits(ArithmeticError):
    """A model's output is not a number; nothing can be sampled from it."""


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How each row's token is chosen; columns are [n_rows], ranges as in `SamplingParams`."""

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float32]
    seed: NDArray[np.uint64]
    position: NDArray[np.int64]  # that the sampled token will have in its sequence
    forbidden: tuple[tuple[int, NDArray[np.int64]], ...]  # (row, token ids) not to be sampled

    def of_rows(self, rows: NDArray[np.int64]) -> SamplingBatch:
        """The same of some rows, in that order; all that forbid tokens must be among them."""
        place = {int(row): i for i, row in enumerate(rows)}
        return SamplingBatch(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            seed=self.seed[rows],
            position=self.position[rows],
            forbidden=tuple((place[row], token_ids) for row, token_ids in self.forbidden),
        )


def sample(
    logits: Tensor, batch: SamplingBatch, *, greedy: Callable[[Tensor], Tensor] = greedy
) -> Tensor:
    """One token id for each row of `logits` [n_rows, vocab_size]; [n_rows] int64.

    `greedy` is the operation of that name for where the logits are. Only rows that it does not
    settle are looked at again. Raises NonFiniteLogits if any logit is NaN or infinite.
    """
    tokens = greedy(logits)
    _refuse_non_finite(tokens)
    unsettled = batch.temperature > 0
    unsettled[[row for row, _ in batch.forbidden]] = True
    rows = np.flatnonzero(unsettled)
    if not len(rows):
        return tokens
    places = torch.from_numpy(rows).to(logits.device)
    tokens[places] = _sample_rows(logits[places].float(), batch.of_rows(rows))
    return tokens


def _sample_rows(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """The same for float32 logits, whoever has been settled; they may be written to."""
    _forbid(logits, batch)
    tokens = logits.argmax(-1)
    drawn = np.flatnonzero(batch.temperature > 0)
    if len(drawn):
        weights = _weights(logits[drawn], batch, drawn)
        uniform = uniforms(batch.seed[drawn], batch.position[drawn])
        tokens[drawn] = draw(weights, torch.from_numpy(uniform).to(logits.device))
    return tokens


def token_weights(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """What each token of each row is worth to a draw, relative to the row's most likely one.

    [n_rows, vocab_size], 0 for what the filters drop; every row's temperature must be above 0.
    """
    rows = np.arange(len(logits))
    logits = logits.clone()
    _forbid(logits, batch)
    return _weights(logits, batch, rows)[:, : logits.shape[1]]


def uniforms(seed: NDArray[np.uint64], position: NDArray[np.int64]) -> NDArray[np.float64]:
    """Numbers in [0, 1), one for each (seed, position), of 52 bits each.

    SplitMix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", 2014) is a
    hash of a counter: output n of seed s is mix(s + n * gamma). The seed is mixed once more before,
    since otherwise seeds that differ by a multiple of gamma would share their sequences.
    """
    counter = _mix(seed) + (position.astype(np.uint64) + np.uint64(1)) * _GAMMA
    mantissa = (_mix(counter) >> np.uint64(12)).astype(np.float64)
    return mantissa * 2.0**-52


_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (David Stafford's variant 13); a bijection of 64-bit numbers."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _refuse_non_finite(tokens: Tensor) -> None:
    is_refused = tokens < 0  # as `greedy` says
    if is_refused.any():
        rows = is_refused.nonzero().flatten().tolist()
        raise NonFiniteLogits(f"logits of rows {rows} of {len(tokens)} are not finite")


def _forbid(logits: Tensor, batch: SamplingBatch) -> None:
    vocab_size = logits.shape[1]
    for row, token_ids in batch.forbidden:
        # The model cannot make an id beyond its vocabulary, so there is nothing to forbid.
        logits[row, token_ids[token_ids < vocab_size]] = -torch.inf
        if logits[row].isneginf().all():
            raise ValueError(f"every token of row {row} is forbidden")


def _weights(logits: Tensor, batch: SamplingBatch, rows: NDArray[np.int64]) -> Tensor:
    """The weights of `logits` [n, vocab_size], which are rows `rows` of the batch.

    [n, vocab_size rounded up to CDF_BLOCK], 1 for the most likely token of a row.
    """
    n, vocab_size = logits.shape
    padded = logits.new_zeros(n, -(-vocab_size // CDF_BLOCK) * CDF_BLOCK)
    weights = padded[:, :vocab_size]
    temperature = _column(batch.temperature[rows], logits)
    # Subtracting first keeps a small temperature from making infinities.
    torch.sub(logits, logits.amax(-1, keepdim=True), out=weights)
    weights.div_(temperature).exp_()
    _keep_most_likely(logits, weights, top_k=batch.top_k[rows], top_p=batch.top_p[rows])
    min_p = batch.min_p[rows]
    if min_p.any():
        weights.masked_fill_(weights < _column(min_p, logits), 0)
    return padded


def _keep_most_likely(
    logits: Tensor, weights: Tensor, *, top_k: NDArray[np.int64], top_p: NDArray[np.float64]
) -> None:
    """Zeroes the weights that `top_k` and `top_p` drop."""
    vocab_size = logits.shape[1]
    top_k = np.where((top_k == 0) | (top_k > vocab_size), vocab_size, top_k)
    limited = np.flatnonzero((top_k < vocab_size) | (top_p < 1))
    if not len(limited):
        return
    logits, kept_weights = logits[limited], weights[limited]
    n_kept, least = _n_most_likely(
        logits,
        kept_weights,
        top_k=torch.from_numpy(top_k[limited]).to(logits.device),
        top_p=torch.from_numpy(top_p[limited]).to(logits.device),
    )
    is_kept = _largest(logits, n_kept, least)
    weights[limited] = kept_weights.masked_fill_(~is_kept, 0)


def _n_most_likely(
    logits: Tensor, weights: Tensor, *, top_k: Tensor, top_p: Tensor
) -> tuple[Tensor, Tensor]:
    """How many tokens of each row are kept [n], and the smallest logit among them [n].

    Sorts as little as it can: a row is settled when the tokens looked at are all that `top_k`
    leaves or when they add up to `top_p`.
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
        # Mass that the probabilities are fractions of: of the k, or of the whole vocabulary.
        whole = weights[pending].sum(-1, keepdim=True, dtype=torch.float64)
        total = torch.where(k < vocab_size, up_to[:, -1:], whole)
        # A token belongs to the smallest set if those before it do not suffice.
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
    """Marks the `n_kept` largest of each row, the smallest of which is `least`."""
    is_kept = logits >= least[:, None]
    surplus = is_kept.sum(-1) - n_kept
    if surplus.any():
        # Several tokens have just this logit: the first ones stay.
        is_tied = logits == least[:, None]
        n_tied_kept = is_tied.sum(-1) - surplus
        is_kept &= ~is_tied | (is_tied.cumsum(-1) <= n_tied_kept[:, None])
    return is_kept


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Inverts the cumulative sum of `weights` [n, n_ids] at float64 `uniform` [n]; ids [n].

    `n_ids` is a multiple of CDF_BLOCK, and `uniform` lies in [0, 1). The result is the first id
    whose cumulative weight is above the target, so never one of weight 0; found as the block of ids
    first, then the id within it.
    """
    rows = torch.arange(len(weights), device=weights.device)
    blocks = weights.view(len(weights), -1, CDF_BLOCK)  # [n, n_blocks, block]
    up_to_block = blocks.sum(-1, dtype=torch.float64).cumsum(-1)  # [n, n_blocks]
    target = uniform * up_to_block[:, -1]
    block = torch.searchsorted(up_to_block, target[:, None], right=True)[:, 0]
    before = torch.where(block > 0, up_to_block[rows, block - 1], 0)
    up_to_token = blocks[rows, block].cumsum(-1, dtype=torch.float64)  # [n, block]
    # The two sums may round differently; the target must not lie beyond the block's end.
    end = up_to_token[:, -1]
    target = torch.minimum(target - before, torch.nextafter(end, torch.zeros_like(end)))
    token = torch.searchsorted(up_to_token, target[:, None], right=True)[:, 0]
    return block * CDF_BLOCK + token


def _column(values: NDArray[np.float32], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)[:, None]  # [n, 1]
