"""The plan of one iteration, as a plain record and as columns.

An `IterationPlan` has the contents of a `RunIterationsRequest`. `Spans` are its columns as arrays
of matching lengths, so that later code computes all spans at once. This module checks only the
lengths; `request_table` checks whether a plan fits the requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.common.sampling import SamplingParams

Ints = NDArray[np.int64]


class PlanError(ValueError):
    """A plan violates the protocol; the error's message says how. Later plans must not be run."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that is new on the ranks. The request keeps its row in the request table until a
    plan releases the row."""

    row: int
    n_prompt_tokens: int
    sampling: SamplingParams
    n_logprobs: int | None = None  # alternatives for each sampled token; None: no log-probabilities
    # Alternatives for each token of the prompt but the first; None: no log-probabilities.
    n_prompt_logprobs: int | None = None
    stored_token_ids: Sequence[int] = ()  # tokens before the first span, in blocks stored before
    grammar_digest: bytes = b""  # names a compiled grammar; empty if the output follows none
    adapter: str = ""  # digest of the request's adapter; empty if the request uses none
    wants_vector: bool = False  # whether the request ends with its prompt, whose vector it gets


@dataclass(frozen=True, slots=True)
class IterationPlan:
    """The work of one iteration: a `RunIterationsRequest` without pipeline, epoch and trace.

    The columns `rows` to `token_on_rank` have one entry per span. `token_ids` has the tokens of all
    spans in order. `new_block_ids` has the new blocks of all spans in order, and for each span the
    blocks of each K/V group in turn. If `token_on_rank` is true, the span's only token is the last
    token that was sampled for its row, and `token_ids` does not contain it. `next_token_ids` has
    the token after each span that ends within a prompt whose log-probabilities are to be computed.
    `n_drafts` has, for each span, the number of tokens at the span's end that are drafts; it is
    empty if there are no drafts.
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
    next_token_ids: Sequence[int] = ()
    n_drafts: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Spans:
    """The columns of a plan as arrays, with one element for each span."""

    rows: Ints  # [n_spans], like the next four
    start_positions: Ints
    n_tokens: Ints
    sample: NDArray[np.bool_]
    token_on_rank: NDArray[np.bool_]
    token_ids: Ints  # without tokens that are on the rank
    new_block_ids: Ints  # [n_new_blocks * n_groups]
    next_token_ids: Ints  # see `IterationPlan`
    n_drafts: Ints | None = None  # [n_spans]; None if no span has drafts

    @classmethod
    def none(cls) -> Spans:
        """Returns empty columns, for a batch that consists of padding."""
        none, never = np.zeros(0, np.int64), np.zeros(0, np.bool_)
        return cls(none, none, none, never, never, none, none, none)

    @classmethod
    def of(cls, plan: IterationPlan, *, n_groups: int = 1) -> Spans:
        """Returns the columns of `plan`, with blocks for each of `n_groups` K/V groups. Raises
        PlanError if the lengths of the columns do not match."""
        n_spans = len(plan.rows)
        if not n_spans:
            raise PlanError("an iteration without spans")
        for name in ("start_positions", "n_tokens", "n_new_blocks", "sample", "token_on_rank"):
            if (n := len(getattr(plan, name))) != n_spans:
                raise PlanError(f"{name} has {n} entries for {n_spans} spans")
        if len(plan.n_drafts) not in (0, n_spans):
            raise PlanError(f"n_drafts has {len(plan.n_drafts)} entries for {n_spans} spans")
        n_sent = sum(plan.n_tokens) - sum(plan.token_on_rank)
        for total, parts, n_promised in (
            ("token_ids", "n_tokens", n_sent),
            ("new_block_ids", "n_new_blocks", sum(plan.n_new_blocks) * n_groups),
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
            next_token_ids=column(plan.next_token_ids),
            n_drafts=column(plan.n_drafts) if plan.n_drafts else None,
        )

    def sampled(self) -> Sampled:
        """Returns the tokens that must be sampled: one for each span with `sample`, and one for
        each draft of such a span."""
        rows, last = self.rows[self.sample], np.flatnonzero(self.sample)
        positions = (self.start_positions + self.n_tokens)[self.sample]
        if self.n_drafts is None:
            return Sampled(rows, last, np.zeros_like(rows), positions)
        n_drafts = self.n_drafts[self.sample]
        spans = np.repeat(np.arange(len(rows)), 1 + n_drafts)
        n_before = np.cumsum(1 + n_drafts) - (1 + n_drafts)
        back = n_drafts[spans] - (np.arange(len(spans)) - n_before[spans])
        return Sampled(rows[spans], last[spans], back, positions[spans] - back)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens that are sampled after the spans of a batch, in order; arrays are [n_sampled]."""

    rows: Ints
    spans: Ints  # indices of spans in the plan
    back: Ints  # number of tokens of the span after the token whose next token is sampled
    positions: Ints  # positions of the sampled tokens in their sequences


def column(values: Sequence[int]) -> Ints:
    """Returns `values` as an array."""
    return np.fromiter(values, np.int64, len(values))


def ranges(firsts: Ints, lengths: Ints) -> Ints:
    """Returns the concatenated ranges of numbers `firsts[i]` to `firsts[i] + lengths[i] - 1`, for
    each i in order."""
    n_before = np.cumsum(lengths) - lengths
    numbers: Ints = np.arange(lengths.sum()) + np.repeat(firsts - n_before, lengths)
    return numbers
