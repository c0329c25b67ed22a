"""What the engine master asks of a rank, as plain records and as columns.

An `IterationPlan` is what came over the wire, without its address. `Spans` are its columns as
arrays that fit together: everything after is done for all spans at once. Knows no table of
requests, and so not whether a plan makes sense.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class PlanError(ValueError):
    """A plan breaks the protocol; the message says where. Nothing after it can be trusted."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are chosen; meaning and ranges as in `sampling.proto`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    min_tokens: int
    stop_token_ids: Sequence[int]
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def has_penalty(self) -> bool:
        """Whether tokens that have occurred are less likely, or more, to occur again."""
        penalties = self.repetition_penalty, self.frequency_penalty, self.presence_penalty
        return penalties != (1, 0, 0)

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the most likely one, wherever it is."""
        return self.temperature == 0 and not self.min_tokens and not self.has_penalty

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise PlanError(f"temperature {self.temperature} is not a finite number from 0")
        if not 0 < self.top_p <= 1:
            raise PlanError(f"top_p {self.top_p} is not in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise PlanError(f"min_p {self.min_p} is not in [0, 1]")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= (penalty := getattr(self, name)) <= 2:
                raise PlanError(f"{name} {penalty} is not in [-2, 2]")
        if not 0.125 <= self.repetition_penalty <= 8:
            raise PlanError(f"repetition_penalty {self.repetition_penalty} is not in [0.125, 8]")
        if self.top_k < 0 or self.min_tokens < 0 or not 0 <= self.seed < 1 << 64:
            raise PlanError(
                f"top_k {self.top_k}, min_tokens {self.min_tokens} or seed {self.seed} is negative "
                "or too large"
            )


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that is new to the ranks, and the row it holds until it is released."""

    row: int
    n_prompt_tokens: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class IterationPlan:
    """What one iteration computes: `RunIterationsRequest` without its address.

    Columns `rows` to `token_on_rank` have one entry per span; `token_ids` and `new_block_ids` hold
    those of all spans, one after the other. A span with `token_on_rank` is one token, the one that
    was sampled last for the row, and has no entry in `token_ids`.
    """

    iteration: int
    released_rows: Sequence[int]
    admissions: Sequence[Admission]
    rows: Sequence[int]
    start_positions: Sequence[int]
    n_tokens: Sequence[int]
    sample: Sequence[bool]
    n_new_blocks: Sequence[int]
    token_on_rank: Sequence[bool]
    token_ids: Sequence[int]
    new_block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Spans:
    """A plan's columns as arrays of the right lengths."""

    rows: Ints  # [n_spans], as the next four
    start_positions: Ints
    n_tokens: Ints
    sample: NDArray[np.bool_]
    token_on_rank: NDArray[np.bool_]
    token_ids: Ints  # [n_tokens] less those that are on the rank
    new_block_ids: Ints  # [n_new_blocks]

    @classmethod
    def none(cls) -> Spans:
        """Of a batch that is all padding."""
        none, never = np.zeros(0, np.int64), np.zeros(0, np.bool_)
        return cls(none, none, none, never, never, none, none)

    @classmethod
    def of(cls, plan: IterationPlan) -> Spans:
        """The columns of `plan`; raises PlanError if they do not fit together."""
        n_spans = len(plan.rows)
        if not n_spans:
            raise PlanError("an iteration without spans")
        for name in ("start_positions", "n_tokens", "n_new_blocks", "sample", "token_on_rank"):
            if (n := len(getattr(plan, name))) != n_spans:
                raise PlanError(f"{name} has {n} entries for {n_spans} spans")
        n_sent = sum(plan.n_tokens) - sum(plan.token_on_rank)
        for total, parts, n_promised in (
            ("token_ids", "n_tokens", n_sent),
            ("new_block_ids", "n_new_blocks", sum(plan.n_new_blocks)),
        ):
            if (n := len(getattr(plan, total))) != n_promised:
                raise PlanError(f"{total} has {n} entries where {parts} adds up to {n_promised}")
        return cls(
            rows=column(plan.rows),
            start_positions=column(plan.start_positions),
            n_tokens=column(plan.n_tokens),
            sample=np.fromiter(plan.sample, np.bool_, n_spans),
            token_on_rank=np.fromiter(plan.token_on_rank, np.bool_, n_spans),
            token_ids=column(plan.token_ids),
            new_block_ids=column(plan.new_block_ids),
        )


def column(values: Sequence[int]) -> Ints:
    """`values` as an array."""
    return np.fromiter(values, np.int64, len(values))
