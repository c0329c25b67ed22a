"""From the diffs of a plan to the flat tensors of one iteration.

`IterationPlan` is what the engine master asks for, as plain records. `RequestTable` is what a rank
remembers of the requests it has been told about, by row: their blocks, how much of them is stored,
how they are sampled, and the token that was sampled last. `InputBatch` is one iteration's input,
flattened: a token is a token, whichever request it belongs to, and what attention and sampling must
know beside it is prepared here, once.

Everything is done in columns, for all spans at once. Knows no model and no wire format.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import AttentionMetadata, Ops, upload
from services.worker.sampler import SamplingBatch

Ints = NDArray[np.int64]

_CPU = torch.device("cpu")

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


class RequestTable:
    """The requests that a rank knows, one row each; plans change them, and what is sampled.

    A rank that both embeds and samples `keeps_tokens`, so that a plan can leave them out.
    """

    def __init__(
        self,
        *,
        n_kv_blocks: int,
        block_size: int,
        vocab_size: int,
        max_model_len: int,
        device: torch.device = _CPU,
        keeps_tokens: bool = True,
    ) -> None:
        self.max_model_len = max_model_len
        self._n_kv_blocks = n_kv_blocks
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._is_held = np.zeros(0, dtype=np.bool_)  # all columns [n_rows]
        self._n_prompt_tokens = np.zeros(0, dtype=np.int64)
        self._n_stored_tokens = np.zeros(0, dtype=np.int64)
        self._has_last_token = np.zeros(0, dtype=np.bool_)  # the last span was sampled
        self._n_blocks = np.zeros(0, dtype=np.int64)
        self._block_ids = np.zeros((0, 16), dtype=np.int64)  # [n_rows, most blocks of any]
        self._sampling = np.zeros(0, dtype=_SAMPLING_COLUMNS)
        self._stop_token_ids: dict[int, Ints] = {}  # of rows that have min_tokens
        self._keeps_tokens = keeps_tokens
        self._last_tokens = torch.zeros(0, dtype=torch.int64, device=device)  # [n_rows]

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
        self._has_last_token[spans.rows] = spans.sample
        return spans

    def keep_tokens(self, rows: Tensor, token_ids: Tensor) -> None:
        """Keeps what was sampled for `rows` [n_sampled], for plans that leave it out; both int64,
        on the table's device, which is not waited for."""
        if self._keeps_tokens:
            self._last_tokens.index_copy_(0, rows, token_ids)

    def last_tokens(self, rows: Ints) -> Tensor:
        """The tokens that were sampled last for `rows`, int64 on the table's device."""
        return self._last_tokens.index_select(0, upload(rows, self._last_tokens.device))

    def block_tables(self, rows: Ints) -> Ints:
        """The blocks of `rows` in order, [n_spans, most blocks of these]; the rest is padding."""
        return self._block_ids[rows, : self._n_blocks[rows].max()]

    def padded_block_tables(self, rows: Ints, n_positions: int, *, scratch: int) -> Ints:
        """The same for `n_positions` positions of each row, [n_spans, blocks of so many]; those
        that a row does not have are `scratch`."""
        self._grow_width(-(-n_positions // self._block_size))
        column = np.arange(-(-n_positions // self._block_size))
        blocks = self._block_ids[rows, : len(column)]
        return np.where(column < self._n_blocks[rows, None], blocks, scratch)

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
        self._has_last_token[row] = False
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
        _refuse(rows, end_positions > self.max_model_len, "grows longer than the model allows")
        _refuse(rows, spans.token_on_rank & (spans.n_tokens != 1), "leaves out more than a token")
        is_kept = self._has_last_token[rows] & self._keeps_tokens
        _refuse(rows, spans.token_on_rank & ~is_kept, "leaves out a token that is not on the rank")
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
        self._has_last_token = np.pad(self._has_last_token, (0, n_more))
        self._last_tokens = torch.nn.functional.pad(self._last_tokens, (0, n_more))
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

    rows: Ints  # [n_spans], as the next five
    start_positions: Ints
    n_tokens: Ints
    sample: NDArray[np.bool_]
    n_new_blocks: Ints
    token_on_rank: NDArray[np.bool_]
    token_ids: Ints  # [n_tokens] less those that are on the rank
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
            token_on_rank=np.fromiter(plan.token_on_rank, np.bool_, len(plan.token_on_rank)),
            token_ids=_column(plan.token_ids),
            new_block_ids=_column(plan.new_block_ids),
        )
        n_spans = len(spans.rows)
        if not n_spans:
            raise PlanError("an iteration without spans")
        for name in ("start_positions", "n_tokens", "sample", "n_new_blocks", "token_on_rank"):
            n = len(getattr(spans, name))
            if n != n_spans:
                raise PlanError(f"{name} has {n} entries for {n_spans} spans")
        n_sent = int(spans.n_tokens.sum()) - int(spans.token_on_rank.sum())
        for total, parts, n_promised in (
            ("token_ids", "n_tokens", n_sent),
            ("new_block_ids", "n_new_blocks", int(spans.n_new_blocks.sum())),
        ):
            n = len(getattr(spans, total))
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
    sampled_rows: Tensor  # [n_sampled] int64, rows of these
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
        is_padded: bool = False,
    ) -> InputBatch:
        """Applies `plan` to `table` and lays out its batch on the device of `key_cache`.

        `key_cache` is the keys of any layer, [n_blocks, block_size, n_kv_heads, head_dim];
        `windows` are those of the stage's layers.

        A batch that `is_padded` is not selective: every span gets the length of the longest, as
        where all operations want equal shapes, and what is computed for padding is dropped. It
        stores the keys and values of padding in the last block of the cache, which the table must
        not have. For benchmarks, to show what selective batching saves.
        """
        spans = table.apply(plan)
        block_size = key_cache.shape[1]
        device = key_cache.device
        next_positions = spans.start_positions + spans.n_tokens
        if is_padded:
            widths = np.full_like(spans.n_tokens, spans.n_tokens.max())
            block_tables = table.padded_block_tables(
                spans.rows, int((spans.start_positions + widths).max()), scratch=len(key_cache) - 1
            )
        else:
            widths = spans.n_tokens
            block_tables = table.block_tables(spans.rows)  # [n_spans, most blocks]
        ends = np.cumsum(widths)
        span_of_token = np.repeat(np.arange(len(ends)), widths)
        offsets = spans.start_positions - (ends - widths)
        positions = np.arange(ends[-1]) + offsets[span_of_token]
        blocks = block_tables[span_of_token, positions // block_size]
        if is_padded:
            is_padding = positions >= next_positions[span_of_token]
            blocks[is_padding] = len(key_cache) - 1
        slots = blocks * block_size + positions % block_size
        starts = ends - widths
        is_sampled = spans.sample
        sampled_rows = spans.rows[is_sampled]
        return cls(
            iteration=plan.iteration,
            token_ids=_tokens(spans, table, starts, n_tokens=int(ends[-1]), device=device),
            positions=upload(np.minimum(positions, table.max_model_len - 1), device),
            slots=upload(slots, device),
            attention=ops.plan_attention(
                spans.start_positions,
                widths,
                block_tables=block_tables,
                key_cache=key_cache,
                windows=windows,
            ),
            sampled_tokens=upload((starts + spans.n_tokens - 1)[is_sampled], device),
            sampled_rows=upload(sampled_rows, device),
            sampling=table.sampling(sampled_rows, next_positions[is_sampled]),
        )


def n_batch_tokens(n_tokens: Sequence[int], *, is_padded: bool) -> int:
    """Tokens of a batch of spans that are so long, padding included."""
    return len(n_tokens) * max(n_tokens) if is_padded else sum(n_tokens)


def _tokens(
    spans: Spans, table: RequestTable, starts: Ints, *, n_tokens: int, device: torch.device
) -> Tensor:
    """The tokens of a batch, [n_tokens]; spans begin at `starts`, and padding is token 0."""
    is_left_out = spans.token_on_rank
    if len(spans.token_ids) == n_tokens:
        return upload(spans.token_ids, device)
    if len(is_left_out) == n_tokens and is_left_out.all():
        return table.last_tokens(spans.rows)
    n_sent = np.where(is_left_out, 0, spans.n_tokens)
    first_of_span = np.cumsum(n_sent) - n_sent
    places = np.arange(len(spans.token_ids)) + np.repeat(starts - first_of_span, n_sent)
    flat = np.zeros(n_tokens, dtype=np.int64)
    flat[places] = spans.token_ids
    tokens = upload(flat, device)
    if is_left_out.any():
        last = table.last_tokens(spans.rows[is_left_out])
        tokens.index_copy_(0, upload(starts[is_left_out], device), last)
    return tokens


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
