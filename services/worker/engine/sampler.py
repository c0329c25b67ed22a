"""How a batch of rows is sampled, as far as the host decides it.

`SamplingBatch` has the options of the rows; `columns` lays them out for the operation that chooses
the tokens (`Ops.sample`), which nothing on the host waits for. A row's random number is a hash
of (seed, position) and nothing else: a request gets the same tokens alone or in any batch, on any
number of stages, before and after a recovery.

Knows no requests: a row is a row of logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels.forms.sampling_columns import ALL_GREEDY, Penalties, SamplingColumns
from kernels.upload import Uploads
from services.common.sampling import OPTIONS, SamplingParams
from services.worker.engine.token_rules import TokenRules, bias_columns, mask_columns

_COLUMNS = {name: option.column for name, option in OPTIONS.items() if option.column}

SAMPLING_COLUMNS = np.dtype(list(_COLUMNS.items()))
"""The options of a row that have one value each, by name."""

LEAST_TOP_P = np.finfo(np.float32).tiny
"""Value in place of a smaller `top_p`, such as 0, with which only the most likely token stays."""

_values = attrgetter(*_COLUMNS)


def column_values(params: SamplingParams) -> tuple[Any, ...]:
    """Returns the options in the order of SAMPLING_COLUMNS."""
    values: tuple[Any, ...] = _values(params)
    return values


class NonFiniteLogits(ArithmeticError):
    """A model's output is not a number; nothing can be sampled from it."""

    def __init__(self, rows: Sequence[int], n_rows: int) -> None:
        """`rows` of the batch's `n_rows` rows of logits are not finite."""
        super().__init__(f"logits of rows {list(rows)} of {n_rows} are not finite")
        self.rows = rows
        self.has_others = len(rows) < n_rows
        """Whether other rows are finite: the weights are what they were, then."""


@dataclass(frozen=True, slots=True)
class PenalizedRows:
    """The rows of a batch that have penalties; arrays are [n_penalized]."""

    rows: NDArray[np.int64]  # in order
    options: NDArray[np.void]  # SAMPLING_COLUMNS
    count_rows: NDArray[np.int64]
    counts: Tensor  # see `TokenCounts.tensor`

    def columns(self, uploads: Uploads) -> Penalties:
        """Returns the columns for the operation, readable when `uploads` has been flushed."""
        options = self.options
        return Penalties(
            rows=uploads.add(self.rows),
            repetition=uploads.add(options["repetition_penalty"].copy()),
            frequency=uploads.add(options["frequency_penalty"].copy()),
            presence=uploads.add(options["presence_penalty"].copy()),
            count_rows=uploads.add(self.count_rows),
            counts=self.counts,
        )


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How the token of each row of a batch is chosen; arrays are [n_rows]."""

    options: NDArray[np.void]  # SAMPLING_COLUMNS
    positions: NDArray[np.int64]  # of the sampled tokens in their sequences
    banned: tuple[tuple[int, NDArray[np.int64]], ...]  # (row, token ids) not to be sampled
    penalized: PenalizedRows | None = None  # if there are any
    rules: tuple[tuple[int, TokenRules], ...] = ()  # (row, rules) of rows that have any, in order

    def columns(self, uploads: Uploads, vocab_size: int) -> SamplingColumns:
        """Returns the columns for the operation, readable when `uploads` has been flushed.

        Raises ValueError if every token of a row is banned.
        """
        options = self.options
        is_sampled = options["temperature"] > 0
        any_sampled = bool(is_sampled.any())
        adjustments = self._adjustments(uploads)
        if not any_sampled and not self.banned:
            return replace(ALL_GREEDY, **adjustments) if adjustments else ALL_GREEDY
        rows, ids = self._banned_pairs(vocab_size)
        top_k, top_p, min_p = options["top_k"], options["top_p"], options["min_p"]
        is_limited = ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1)
        # Columns of a table of records have gaps; copies have none.
        return SamplingColumns(
            temperature=uploads.add(options["temperature"].copy()),
            top_k=uploads.add(top_k.copy()),
            top_p=uploads.add(np.maximum(top_p, LEAST_TOP_P)),
            min_p=uploads.add(min_p.copy()),
            uniform=uploads.add(uniforms(options["seed"], self.positions)),
            banned_rows=uploads.add(rows),
            banned_ids=uploads.add(ids),
            any_sampled=any_sampled,
            any_limited=bool((is_sampled & is_limited).any()),
            any_min_p=bool((is_sampled & (min_p > 0)).any()),
            **adjustments,
        )

    def _adjustments(self, uploads: Uploads) -> dict[str, Any]:
        """Returns the columns of the options that change logits, by name; columns without an effect
        are left out."""
        columns = {
            "penalties": None if self.penalized is None else self.penalized.columns(uploads),
            "biases": bias_columns(self.rules, uploads),
            "allowed": mask_columns(self.rules, uploads),
        }
        return {name: column for name, column in columns.items() if column is not None}

    def _banned_pairs(self, vocab_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns (rows, ids) of equal length, ordered by row."""
        rows, ids = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for row, token_ids in sorted(self.banned, key=lambda pair: pair[0]):
            # The model has no logit for an id beyond its vocabulary, so there is nothing to ban.
            within = np.unique(token_ids[token_ids < vocab_size])
            if len(within) == vocab_size:
                raise ValueError(f"every token of row {row} is banned")
            rows.append(np.full(len(within), row))
            ids.append(within)
        return np.concatenate(rows), np.concatenate(ids)


def refuse_non_finite(token_ids: Sequence[int]) -> None:
    """Raises NonFiniteLogits if a token is -1: its row of logits has a NaN or an infinity."""
    rows = [row for row, token_id in enumerate(token_ids) if token_id < 0]
    if rows:
        raise NonFiniteLogits(rows, len(token_ids))


def without_rejected(
    token_ids: Sequence[int], drafts: Sequence[Sequence[int]]
) -> tuple[list[int], list[int]]:
    """Returns a batch's sampled tokens with 0 in place of each -1 after a draft that was wrong, and
    for each span the least of the other tokens: -1 if one has no finite logits. What follows a
    wrong draft does not count. `drafts` are the drafts of each sampled span, which has one sampled
    token more.

    `drafts` are those of each sampled span, which has one sampled token more.
    """
    kept, least, end = list(token_ids), [], 0
    for draft in drafts:
        start, end = end, end + 1 + len(draft)
        sampled = token_ids[start:end]
        n_right = next((i for i, one in enumerate(draft) if one != sampled[i]), len(draft))
        least.append(min(sampled[: n_right + 1]))
        kept[start + n_right + 1 : end] = [max(0, one) for one in sampled[n_right + 1 :]]
    return kept, least


def uniforms(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns a number in [0, 1) of 52 bits for each (seed, position).

    SplitMix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", 2014) is a
    hash of a counter: output n of seed s is mix(s + n * gamma). The seed is mixed once more before,
    since otherwise seeds that differ by a multiple of gamma would share their sequences. A negative
    seed stands for the one that is 2^64 larger.
    """
    counter = _mix(seeds.view(np.uint64)) + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA
    mantissa = (_mix(counter) >> np.uint64(12)).astype(np.float64)
    return mantissa * 2.0**-52


_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Applies SplitMix64's finaliser (Stafford's variant 13), a bijection of 64-bit numbers."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
