"""What a rank remembers of the requests that it has been told about, by row.

Their blocks, how much of them is stored, how they are sampled, and on the device the token that was
sampled last and how often each has occurred. Plans change it, in the order of iterations; what a
plan may not say is refused here. Knows no model and no layout of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.worker.plan import Admission, Ints, IterationPlan, PlanError, Spans, column
from services.worker.sampler import PenalizedRows, SamplingBatch
from services.worker.token_counts import NOT_COUNTED, CountedTokens, TokenCounts

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
        ("repetition_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("presence_penalty", np.float32),
    ]
)


class RequestTable:
    """The requests that a rank knows, one row each; plans change them, and what is sampled.

    A rank that both embeds and samples `keeps_tokens`, so that a plan can leave them out. One that
    samples `counts_tokens` of the requests that have penalties.
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
        counts_tokens: bool = True,
    ) -> None:
        self.max_model_len = max_model_len
        self._n_kv_blocks = n_kv_blocks
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._held: set[int] = set()  # rows
        self._not_greedy: set[int] = set()  # of these, those that take more than the likeliest
        self._n_prompt_tokens = np.zeros(0, dtype=np.int64)  # all columns [n_rows]
        self._n_stored_tokens = np.zeros(0, dtype=np.int64)
        self._has_last_token = np.zeros(0, dtype=np.bool_)  # the last span was sampled
        self._n_blocks = np.zeros(0, dtype=np.int64)
        self._block_ids = np.zeros((0, 16), dtype=np.int64)  # [n_rows, most blocks of any]
        self._sampling = np.zeros(0, dtype=_SAMPLING_COLUMNS)
        self._stop_token_ids: dict[int, Ints] = {}  # of rows that have min_tokens
        self._count_rows = np.zeros(0, dtype=np.int64)  # where tokens are counted, or NOT_COUNTED
        self._counts_tokens = counts_tokens
        self._token_counts = TokenCounts(vocab_size, device)
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
        self._n_stored_tokens[spans.rows] = spans.start_positions + spans.n_tokens
        self._has_last_token[spans.rows] = spans.sample
        return spans

    def keep_tokens(self, rows: Tensor, token_ids: Tensor) -> None:
        """Keeps what was sampled for `rows` [n_sampled], for plans that leave it out.

        Both are int64, on the table's device, which is not waited for.
        """
        if self._keeps_tokens:
            self._last_tokens.index_copy_(0, rows, token_ids)

    def last_tokens(self, rows: Tensor) -> Tensor:
        """The tokens that were sampled last for `rows`; both int64 on the table's device.

        -1, which says that nothing could be sampled, becomes a token: it may be looked up before
        it is refused.
        """
        return self._last_tokens.index_select(0, rows).clamp_(min=0)

    def count(self, token_ids: Tensor, counted: CountedTokens) -> None:
        """Counts tokens of a batch `token_ids` [n_tokens], for penalties from now on."""
        self._token_counts.add(token_ids, counted)

    def count_rows(self, rows: Ints) -> Ints | None:
        """Where the tokens of `rows` are counted, or NOT_COUNTED; None if no row's are."""
        if not self._token_counts.n_reserved:
            return None
        count_rows = self._count_rows[rows]
        return count_rows if (count_rows != NOT_COUNTED).any() else None

    def n_prompt_tokens(self, rows: Ints) -> Ints:
        """Tokens of the prompts of `rows`."""
        return self._n_prompt_tokens[rows]

    def block_tables(self, rows: Ints) -> Ints:
        """The blocks of `rows` in order, [n_spans, most blocks of these]; the rest is padding."""
        return self._block_ids[:, : max(self._n_blocks[rows].tolist())][rows]

    def padded_block_tables(self, rows: Ints, n_columns: int, *, scratch: int) -> Ints:
        """The first `n_columns` blocks of `rows`, [n_spans, n_columns]; those that a row does not
        have are `scratch`."""
        blocks = self._block_ids[rows, :n_columns]
        is_there = np.arange(blocks.shape[1]) < self._n_blocks[rows, None]
        tables = np.full((len(rows), n_columns), scratch)
        tables[:, : blocks.shape[1]] = np.where(is_there, blocks, scratch)
        return tables

    def is_greedy(self, rows: Ints) -> bool:
        """Whether the token of each of `rows` is the most likely one."""
        return self._not_greedy.isdisjoint(rows.tolist())

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
            penalized=self._penalized(rows),
        )

    def _penalized(self, rows: Ints) -> PenalizedRows | None:
        count_rows = self.count_rows(rows)
        if count_rows is None:
            return None
        places = np.flatnonzero(count_rows != NOT_COUNTED)
        columns = self._sampling[rows[places]]
        return PenalizedRows(
            rows=places,
            repetition=columns["repetition_penalty"].copy(),
            frequency=columns["frequency_penalty"].copy(),
            presence=columns["presence_penalty"].copy(),
            count_rows=count_rows[places],
            counts=self._token_counts.tensor,
        )

    def _release(self, row: int) -> None:
        if row not in self._held:
            raise PlanError(f"released row {row} is not held")
        self._held.remove(row)
        self._not_greedy.discard(row)
        if self._count_rows[row] != NOT_COUNTED:
            self._token_counts.release(int(self._count_rows[row]))
        self._stop_token_ids.pop(row, None)

    def _admit(self, admission: Admission) -> None:
        row = admission.row
        if row in self._held:
            raise PlanError(f"admitted row {row} is held by another request")
        if not 0 <= row < _MAX_ROWS:
            raise PlanError(f"admitted row {row} is not below {_MAX_ROWS}")
        if row >= len(self._n_blocks):
            self._grow_rows(row + 1)
        sampling = admission.sampling
        self._held.add(row)
        if not sampling.is_greedy:
            self._not_greedy.add(row)
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
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
        )
        self._count_rows[row] = NOT_COUNTED
        if sampling.has_penalty and self._counts_tokens:
            self._count_rows[row] = self._token_counts.reserve()
        if sampling.min_tokens:
            self._stop_token_ids[row] = column(sampling.stop_token_ids)

    def _check(self, spans: Spans) -> None:
        rows = spans.rows.tolist()
        if unknown := set(rows) - self._held:
            raise PlanError(f"row {min(unknown)} is unknown")
        if len(set(rows)) < len(rows):
            raise PlanError(f"a row has two spans: rows {rows}")
        # Numbers one by one: after weights have gone through the caches, a loop over a few spans
        # costs less than a few calls for all.
        for row, start, n_tokens, n_new, is_left_out, n_stored, n_blocks in zip(
            rows,
            spans.start_positions.tolist(),
            spans.n_tokens.tolist(),
            spans.n_new_blocks.tolist(),
            spans.token_on_rank.tolist(),
            self._n_stored_tokens[spans.rows].tolist(),
            self._n_blocks[spans.rows].tolist(),
            strict=True,
        ):
            if n_tokens < 1:
                raise PlanError(f"row {row} has a span without tokens")
            if start != n_stored:
                raise PlanError(
                    f"row {row} has a span that does not continue what is stored: starts {start}, "
                    f"stored {n_stored}"
                )
            if start + n_tokens > self.max_model_len:
                raise PlanError(f"row {row} grows longer than the model allows")
            if start + n_tokens > (n_blocks + n_new) * self._block_size:
                raise PlanError(f"row {row} has too few blocks for its span")
            if is_left_out and n_tokens != 1:
                raise PlanError(f"row {row} leaves out more than a token")
            if is_left_out and not (self._keeps_tokens and self._has_last_token[row]):
                raise PlanError(f"row {row} leaves out a token that is not on the rank")
        _refuse_outside("token_ids", spans.token_ids.tolist(), self._vocab_size)
        _refuse_outside("new_block_ids", spans.new_block_ids.tolist(), self._n_kv_blocks)

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
        n_more = max(n_rows, 2 * len(self._n_blocks)) - len(self._n_blocks)
        self._n_prompt_tokens = np.pad(self._n_prompt_tokens, (0, n_more))
        self._n_stored_tokens = np.pad(self._n_stored_tokens, (0, n_more))
        self._has_last_token = np.pad(self._has_last_token, (0, n_more))
        self._last_tokens = torch.nn.functional.pad(self._last_tokens, (0, n_more))
        self._n_blocks = np.pad(self._n_blocks, (0, n_more))
        self._block_ids = np.pad(self._block_ids, ((0, n_more), (0, 0)))
        self._count_rows = np.pad(self._count_rows, (0, n_more))
        self._sampling = np.concatenate([self._sampling, np.zeros(n_more, _SAMPLING_COLUMNS)])

    def _grow_width(self, n_columns: int) -> None:
        width = self._block_ids.shape[1]
        if n_columns > width:
            n_more = max(n_columns, 2 * width) - width
            self._block_ids = np.pad(self._block_ids, ((0, 0), (0, n_more)))


def _refuse_outside(name: str, ids: Sequence[int], limit: int) -> None:
    if ids and (min(ids) < 0 or max(ids) >= limit):
        wrong = [i for i in ids if not 0 <= i < limit]
        raise PlanError(f"{name} {wrong[:8]} are not in [0, {limit})")
