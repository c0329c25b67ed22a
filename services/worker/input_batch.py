"""From the diffs of a plan to the flat tensors of one iteration.

`IterationPlan` is what the engine master asks for, as plain records. `RequestTable` is what a rank
remembers of the requests it has been told about, by row: their blocks, how much of them is stored,
how they are sampled. `InputBatch` is one iteration's input, flattened: a token is a token,
whichever request it belongs to, and what attention and sampling must know beside it is prepared
here, once.

Everything is done in columns, for all spans at once. Knows no model and no wire format.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels import AttentionMetadata, Ops, upload
from services.worker.sampler import SamplingBatch

Ints = NDArray[np.int64]

# Rows are handed out densely, so one above this is a mistake and not a reason to allocate.
_MAX_ROWS = 1 << 16

_SAMPLING_COLUMNS = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float32),
        ("seed", np.uint64),
        ("min_tokens", np.int64),
    ]
)


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

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise PlanError(f"temperature {self.temperature} is not a finite number from 0")
        if not 0 < self.top_p <= 1:
            raise PlanError(f"top_p {self.top_p} is not in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise PlanError(f"min_p {self.min_p} is not in [0, 1]")
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

    Columns `rows` to `n_new_blocks` have one entry per span; `token_ids` and `new_block_ids` hold
    those of all spans, one after the other.
    """

    iteration: int
    released_rows: Sequence[int]
    admissions: Sequence[Admission]
    rows: Sequence[int]
    start_positions: Sequence[int]
    n_tokens: Sequence[int]
    sample: Sequence[bool]
    n_new_blocks: Sequence[int]
    token_ids: Sequence[int]
    new_block_ids: Sequence[int]


class RequestTable:
    """The requests that a rank knows, one row each; `apply` is the only thing that changes them."""

    def __init__(
        self, *, n_kv_blocks: int, block_size: int, vocab_size: int, max_model_len: int
    ) -> None:
        self._n_kv_blocks = n_kv_blocks
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._is_held = np.zeros(0, dtype=np.bool_)  # all columns [n_rows]
        self._n_prompt_tokens = np.zeros(0, dtype=np.int64)
        self._n_stored_tokens = np.zeros(0, dtype=np.int64)
        self._n_blocks = np.zeros(0, dtype=np.int64)
        self._block_ids = np.zeros((0, 16), dtype=np.int64)  # [n_rows, most blocks of any]
        self._sampling = np.zeros(0, dtype=_SAMPLING_COLUMNS)
        self._stop_token_ids: dict[int, Ints] = {}  # of rows that have min_tokens

    def apply(self, plan: IterationPlan) -> Spans:
        """Releases, admits, appends blocks and moves on; returns the plan's spans as columns.

        Raises PlanError, after which the table is not to be used again.
        """
        for row in plan.released_rows:
            self._release(row)
        for admission in plan.admissions:
            self._admit(admission)
        spans = Spans.of(plan)
        self._check(spans)
        self._append_blocks(spans.rows, spans.n_new_blocks, spans.new_block_ids)
        end_positions = spans.start_positions + spans.n_tokens
        room = self._n_blocks[spans.rows] * self._block_size
        _refuse(spans.rows, room < end_positions, "has too few blocks for its span")
        self._n_stored_tokens[spans.rows] = end_positions
        return spans

    def block_tables(self, rows: Ints) -> Ints:
        """The blocks of `rows` in order, [n_spans, most blocks of these]; the rest is padding."""
        return self._block_ids[rows, : self._n_blocks[rows].max()]

    def sampling(self, rows: Ints, positions: Ints) -> SamplingBatch:
        """How to sample the tokens of `rows` that will have `positions`."""
        columns = self._sampling[rows]
        n_generated = positions - self._n_prompt_tokens[rows]
        min_tokens = columns["min_tokens"]
        too_early = np.flatnonzero((n_generated < min_tokens) & (min_tokens > 0))
        return SamplingBatch(
            temperature=columns["temperature"],
            top_k=columns["top_k"],
            top_p=columns["top_p"],
            min_p=columns["min_p"],
            seed=columns["seed"],
            position=positions,
            forbidden=tuple((i, self._stop_token_ids[rows[i]]) for i in too_early.tolist()),
        )

    def _release(self, row: int) -> None:
        if not self._holds(row):
            raise PlanError(f"released row {row} is not held")
        self._is_held[row] = False
        self._stop_token_ids.pop(row, None)

    def _admit(self, admission: Admission) -> None:
        row = admission.row
        if self._holds(row):
            raise PlanError(f"admitted row {row} is held by another request")
        if not 0 <= row < _MAX_ROWS:
            raise PlanError(f"admitted row {row} is not below {_MAX_ROWS}")
        if row >= len(self._is_held):
            self._grow_rows(row + 1)
        sampling = admission.sampling
        self._is_held[row] = True
        self._n_prompt_tokens[row] = admission.n_prompt_tokens
        self._n_stored_tokens[row] = 0
        self._n_blocks[row] = 0
        self._sampling[row] = (
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.seed,
            sampling.min_tokens,
        )
        if sampling.min_tokens:
            self._stop_token_ids[row] = _column(sampling.stop_token_ids)

    def _holds(self, row: int) -> bool:
        return 0 <= row < len(self._is_held) and bool(self._is_held[row])

    def _check(self, spans: Spans) -> None:
        rows = spans.rows
        _refuse(rows, (rows < 0) | (rows >= len(self._is_held)), "is unknown")
        _refuse(rows, ~self._is_held[rows], "is unknown")
        if len(set(rows.tolist())) < len(rows):
            raise PlanError(f"a row has two spans: rows {rows.tolist()}")
        _refuse(rows, spans.n_tokens < 1, "has a span without tokens")
        n_stored = self._n_stored_tokens[rows]
        _refuse(
            rows,
            spans.start_positions != n_stored,
            "has a span that does not continue what is stored:",
            starts=spans.start_positions,
            stored=n_stored,
        )
        end_positions = spans.start_positions + spans.n_tokens
        _refuse(rows, end_positions > self._max_model_len, "grows longer than the model allows")
        _refuse_outside("token_ids", spans.token_ids, self._vocab_size)
        _refuse_outside("new_block_ids", spans.new_block_ids, self._n_kv_blocks)

    def _append_blocks(self, rows: Ints, n_new: Ints, block_ids: Ints) -> None:
        if not len(block_ids):
            return
        n_before = self._n_blocks[rows]
        n_after = n_before + n_new
        self._grow_width(int(n_after.max()))
        # Column of each new block: those of a row follow what the row has.
        first_of_row = np.cumsum(n_new) - n_new
        column = np.arange(len(block_ids)) + np.repeat(n_before - first_of_row, n_new)
        self._block_ids[np.repeat(rows, n_new), column] = block_ids
        self._n_blocks[rows] = n_after

    def _grow_rows(self, n_rows: int) -> None:
        n_more = max(n_rows, 2 * len(self._is_held)) - len(self._is_held)
        self._is_held = np.pad(self._is_held, (0, n_more))
        self._n_prompt_tokens = np.pad(self._n_prompt_tokens, (0, n_more))
        self._n_stored_tokens = np.pad(self._n_stored_tokens, (0, n_more))
        self._n_blocks = np.pad(self._n_blocks, (0, n_more))
        self._block_ids = np.pad(self._block_ids, ((0, n_more), (0, 0)))
        self._sampling = np.concatenate([self._sampling, np.zeros(n_more, _SAMPLING_COLUMNS)])

    def _grow_width(self, n_columns: int) -> None:
        width = self._block_ids.shape[1]
        if n_columns > width:
            n_more = max(n_columns, 2 * width) - width
            self._block_ids = np.pad(self._block_ids, ((0, 0), (0, n_more)))


@dataclass(frozen=True, slots=True)
class Spans:
    """A plan's columns as arrays of the right lengths."""

    rows: Ints  # [n_spans], as the next four
    start_positions: Ints
    n_tokens: Ints
    sample: NDArray[np.bool_]
    n_new_blocks: Ints
    token_ids: Ints  # [n_tokens]
    new_block_ids: Ints  # [n_new_blocks]

    @classmethod
    def of(cls, plan: IterationPlan) -> Spans:
        """The columns of `plan`; raises PlanError if they do not fit together."""
        spans = cls(
            rows=_column(plan.rows),
            start_positions=_column(plan.start_positions),
            n_tokens=_column(plan.n_tokens),
            sample=np.fromiter(plan.sample, np.bool_, len(plan.sample)),
            n_new_blocks=_column(plan.n_new_blocks),
            token_ids=_column(plan.token_ids),
            new_block_ids=_column(plan.new_block_ids),
        )
        n_spans = len(spans.rows)
        if not n_spans:
            raise PlanError("an iteration without spans")
        for name in ("start_positions", "n_tokens", "sample", "n_new_blocks"):
            n = len(getattr(spans, name))
            if n != n_spans:
                raise PlanError(f"{name} has {n} entries for {n_spans} spans")
        for total, parts in (("token_ids", "n_tokens"), ("new_block_ids", "n_new_blocks")):
            n, n_promised = len(getattr(spans, total)), int(getattr(spans, parts).sum())
            if n != n_promised:
                raise PlanError(f"{total} has {n} entries where {parts} adds up to {n_promised}")
        return spans


@dataclass(frozen=True, slots=True)
class InputBatch:
    """The flat input of one iteration on one stage."""

    iteration: int
    token_ids: Tensor  # [n_tokens] int64
    positions: Tensor  # [n_tokens] int64
    slots: Tensor  # [n_tokens] int64, where each token's K and V are stored
    attention: AttentionMetadata
    sampled_tokens: Tensor  # [n_sampled] int64, places in the batch whose next token is sampled
    sampling: SamplingBatch  # of these

    @classmethod
    def build(
        cls,
        plan: IterationPlan,
        table: RequestTable,
        *,
        ops: Ops,
        key_cache: Tensor,
        windows: Sequence[int | None] = (None,),
    ) -> InputBatch:
        """Applies `plan` to `table` and lays out its batch on the device of `key_cache`.

        `key_cache` is the keys of any layer, [n_blocks, block_size, n_kv_heads, head_dim];
        `windows` are those of the stage's layers.
        """
        spans = table.apply(plan)
        block_size = key_cache.shape[1]
        device = key_cache.device
        block_tables = table.block_tables(spans.rows)  # [n_spans, most blocks]
        ends = np.cumsum(spans.n_tokens)
        span_of_token = np.repeat(np.arange(len(ends)), spans.n_tokens)
        offsets = spans.start_positions - (ends - spans.n_tokens)
        positions = np.arange(ends[-1]) + offsets[span_of_token]
        blocks = block_tables[span_of_token, positions // block_size]
        slots = blocks * block_size + positions % block_size
        next_positions = spans.start_positions + spans.n_tokens
        return cls(
            iteration=plan.iteration,
            token_ids=upload(spans.token_ids, device),
            positions=upload(positions, device),
            slots=upload(slots, device),
            attention=ops.plan_attention(
                spans.start_positions,
                spans.n_tokens,
                block_tables=block_tables,
                key_cache=key_cache,
                windows=windows,
            ),
            sampled_tokens=upload(ends[spans.sample] - 1, device),
            sampling=table.sampling(spans.rows[spans.sample], next_positions[spans.sample]),
        )


def _column(values: Sequence[int]) -> Ints:
    return np.fromiter(values, np.int64, len(values))


def _refuse(rows: Ints, is_wrong: NDArray[np.bool_], what: str, **details: Ints) -> None:
    if is_wrong.any():
        i = int(is_wrong.argmax())
        shown = ", ".join(f"{name} {values[i]}" for name, values in details.items())
        raise PlanError(f"row {rows[i]} {what} {shown}".rstrip())


def _refuse_outside(name: str, ids: Ints, limit: int) -> None:
    if len(ids) and (ids.min() < 0 or ids.max() >= limit):
        wrong = ids[(ids < 0) | (ids >= limit)]
        raise PlanError(f"{name} {wrong[:8].tolist()} are not in [0, {limit})")
