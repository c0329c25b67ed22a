"""How a batch of rows is sampled: what the host decides of it.

`SamplingBatch` is what a rank knows of the rows; `columns` lays it out for the operation that
chooses the tokens (`kernels.sample`), which nothing on the host waits for. A row's draw is a hash
of (seed, position) and nothing else: a request gets the same tokens alone or in any batch, on any
number of stages, before and after a recovery.

Knows no requests: a row is a row of logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels.sampling_columns import ALL_GREEDY, Penalties, SamplingColumns
from kernels.upload import Uploads


class NonFiniteLogits(ArithmeticError):
    """A model's output is not a number; nothing can be sampled from it."""


@dataclass(frozen=True, slots=True)
class PenalizedRows:
    """The rows of a batch that have penalties; columns are [n_penalized]."""

    rows: NDArray[np.int64]  # in order
    repetition: NDArray[np.float32]  # ranges as in `SamplingParams`, as the next two
    frequency: NDArray[np.float32]
    presence: NDArray[np.float32]
    count_rows: NDArray[np.int64]
    counts: Tensor  # see `TokenCounts.tensor`

    def columns(self, uploads: Uploads) -> Penalties:
        """The same for the operation, readable when `uploads` has been flushed."""
        return Penalties(
            rows=uploads.add(self.rows),
            repetition=uploads.add(self.repetition),
            frequency=uploads.add(self.frequency),
            presence=uploads.add(self.presence),
            count_rows=uploads.add(self.count_rows),
            counts=self.counts,
        )


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
    penalized: PenalizedRows | None = None  # if there are any

    def columns(self, uploads: Uploads, vocab_size: int) -> SamplingColumns:
        """The same for the operation, readable when `uploads` has been flushed.

        Raises ValueError if every token of a row is forbidden.
        """
        is_drawn = self.temperature > 0
        any_drawn = bool(is_drawn.any())
        penalties = None if self.penalized is None else self.penalized.columns(uploads)
        if not any_drawn and not self.forbidden:
            return ALL_GREEDY if penalties is None else replace(ALL_GREEDY, penalties=penalties)
        rows, ids = self._forbidden_pairs(vocab_size)
        is_limited = ((self.top_k > 0) & (self.top_k < vocab_size)) | (self.top_p < 1)
        # Columns of a table of records have gaps; copies have none.
        return SamplingColumns(
            temperature=uploads.add(self.temperature.copy()),
            top_k=uploads.add(self.top_k.copy()),
            top_p=uploads.add(self.top_p.copy()),
            min_p=uploads.add(self.min_p.copy()),
            uniform=uploads.add(uniforms(self.seed, self.position)),
            forbidden_rows=uploads.add(rows),
            forbidden_ids=uploads.add(ids),
            any_drawn=any_drawn,
            any_limited=bool((is_drawn & is_limited).any()),
            any_min_p=bool((is_drawn & (self.min_p > 0)).any()),
            penalties=penalties,
        )

    def _forbidden_pairs(self, vocab_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(rows, ids) of the same length, by row."""
        rows, ids = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for row, token_ids in sorted(self.forbidden, key=lambda pair: pair[0]):
            # The model cannot make an id beyond its vocabulary, so there is nothing to forbid.
            within = np.unique(token_ids[token_ids < vocab_size])
            if len(within) == vocab_size:
                raise ValueError(f"every token of row {row} is forbidden")
            rows.append(np.full(len(within), row))
            ids.append(within)
        return np.concatenate(rows), np.concatenate(ids)


def refuse_non_finite(token_ids: Sequence[int]) -> None:
    """Raises NonFiniteLogits if there is a row of logits that no token could be chosen from."""
    rows = [row for row, token_id in enumerate(token_ids) if token_id < 0]
    if rows:
        raise NonFiniteLogits(f"logits of rows {rows} of {len(token_ids)} are not finite")


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
