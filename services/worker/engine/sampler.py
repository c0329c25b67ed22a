"""The sampling options of a batch, prepared on the host for the operation that chooses tokens.

`SamplingBatch` has the options of each row, and its method `columns` converts them to the arguments
of `Ops.sample`. A row's random number is a hash of only (seed, position). So a request gets equal
tokens in any batch, on any number of stages, and after a recovery.

In this module a row is a row of logits, not of the request table.
"""

from __future__ import annotations

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
"""The NumPy record type of a row's sampling options. Options with several values, such as lists of
tokens, are not in the record."""

LEAST_TOP_P = np.finfo(np.float32).tiny
"""Value that replaces a smaller `top_p`, such as 0. With it, only the most likely token can be
sampled."""

_values = attrgetter(*_COLUMNS)


def column_values(params: SamplingParams) -> tuple[Any, ...]:
    """Returns the options of `params` that have a single value, in the order of
    SAMPLING_COLUMNS."""
    values: tuple[Any, ...] = _values(params)
    return values


@dataclass(frozen=True, slots=True)
class PenalizedRows:
    """The rows of a batch that have penalties; arrays are [n_penalized]."""

    rows: NDArray[np.int64]  # in ascending order
    options: NDArray[np.void]  # SAMPLING_COLUMNS
    count_rows: NDArray[np.int64]
    counts: Tensor  # see `TokenCounts.tensor`

    def columns(self, uploads: Uploads) -> Penalties:
        """Returns the arguments for `Ops.sample`. The tensors are readable after `uploads` has been
        flushed."""
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
    """The sampling options of each row of a batch; arrays are [n_rows]."""

    options: NDArray[np.void]  # SAMPLING_COLUMNS
    positions: NDArray[np.int64]  # positions of the sampled tokens in their sequences
    banned: tuple[tuple[int, NDArray[np.int64]], ...]  # (row, ids of banned tokens)
    penalized: PenalizedRows | None = None  # None if no row has penalties
    rules: tuple[tuple[int, TokenRules], ...] = ()  # (row, rules of the row), in ascending order

    def columns(self, uploads: Uploads, vocab_size: int) -> SamplingColumns:
        """Returns the arguments for `Ops.sample`. The tensors are readable after `uploads` has been
        flushed.

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
        # The columns of an array of records are not contiguous; their copies are.
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
        """Returns the options that change logits, by name. An option that no row uses is left
        out."""
        columns = {
            "penalties": None if self.penalized is None else self.penalized.columns(uploads),
            "biases": bias_columns(self.rules, uploads),
            "allowed": mask_columns(self.rules, uploads),
        }
        return {name: column for name, column in columns.items() if column is not None}

    def _banned_pairs(self, vocab_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the banned tokens of a batch as two arrays of equal length: the row and the id of
        each banned token, sorted by row."""
        rows, ids = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for row, token_ids in sorted(self.banned, key=lambda pair: pair[0]):
            # Ids beyond the vocabulary have no logit, so they need not be banned.
            within = np.unique(token_ids[token_ids < vocab_size])
            if len(within) == vocab_size:
                raise ValueError(f"every token of row {row} is banned")
            rows.append(np.full(len(within), row))
            ids.append(within)
        return np.concatenate(rows), np.concatenate(ids)


def uniforms(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns a pseudorandom number in [0, 1), with 52 random bits, for each pair of a seed and a
    position.

    SplitMix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", 2014) hashes
    a counter: output n for the seed s is mix(s + n * gamma). Here the seed is mixed first, because
    otherwise two seeds that differ by a multiple of gamma would have overlapping sequences. A
    negative seed is used modulo 2^64.
    """
    counter = _mix(seeds.view(np.uint64)) + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA
    mantissa = (_mix(counter) >> np.uint64(12)).astype(np.float64)
    return mantissa * 2.0**-52


_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Applies the finalising step of SplitMix64 (Stafford's variant 13), a bijection of 64-bit
    numbers."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
