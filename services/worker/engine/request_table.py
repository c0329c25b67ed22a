"""A rank's table of the running requests, with one row for each request.

A row has the request's blocks in each K/V group, its number of stored tokens, its sampling options
and its last sampled token. The counts of its tokens, for penalties, are on the device. Plans change
rows in the order of iterations, and a plan that violates the protocol is refused here. The table
does not depend on the model or on the layout of batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.forms.adapter_rows import NO_ADAPTER, BatchAdapters
from services.common.errors import InvalidRequest
from services.common.pooling import Pooling
from services.common.sampling import SamplingParams
from services.worker.engine.bad_words import BadWordsMatcher
from services.worker.engine.constraints import Constraints, Grammars
from services.worker.engine.last_tokens import Numbers, last_tokens
from services.worker.engine.logprobs import LogprobRequests
from services.worker.engine.plan import Admission, Ints, IterationPlan, PlanError, Spans, column
from services.worker.engine.pooled_requests import PooledRequests
from services.worker.engine.sampler import (
    SAMPLING_COLUMNS,
    PenalizedRows,
    SamplingBatch,
    column_values,
)
from services.worker.engine.token_counts import NOT_COUNTED, CountedTokens, TokenCounts
from services.worker.engine.token_rules import TokenRules

_CPU = torch.device("cpu")

MAX_ROWS = 1 << 16
"""Row numbers of the table must be below this limit. The scheduler uses the lowest free rows, so a
higher number in a plan is an error."""


@dataclass(slots=True)
class _Held:
    """The numbers of tokens, K/V blocks and drafts that the rank has stored for one request."""

    n_tokens: int = 0
    n_blocks: int = 0
    has_last_token: bool = False  # the last span was sampled and had no drafts
    n_drafts: int = 0  # number of stored tokens that are drafts at the end of the last span

    def may_begin_at(self, start: int) -> bool:
        """Returns whether the next span may begin at `start`.

        The span must follow the stored tokens, or replace drafts at the end of the stored tokens.
        """
        return self.n_tokens - self.n_drafts <= start <= self.n_tokens


class RequestTable:
    """The running requests of a rank, with one row for each request. Plans and sampled tokens
    change the rows.

    With `keeps_tokens`, the table stores sampled tokens, so that plans can leave these tokens out.
    This is for a rank that both embeds and samples. With `counts_tokens`, the table counts the
    tokens of requests with penalties. This is for a rank that samples. With `has_states`, layers
    keep a state of each request. Drafts, and requests with stored tokens, are then refused.
    `adapters` are the digests of the adapters that requests may use, in order of the adapters'
    indices. Up to `max_loaded_adapters` adapters may be added later. `pooling` says how the rank
    makes vectors (embeddings or scores); None on a rank that makes none.
    """

    def __init__(
        self,
        *,
        n_kv_blocks: int,
        block_size: int,
        vocab_size: int,
        max_model_len: int,
        device: torch.device = _CPU,
        n_groups: int = 1,
        keeps_tokens: bool = True,
        counts_tokens: bool = True,
        has_states: bool = False,
        max_rows: int = MAX_ROWS,
        grammars: Grammars | None = None,
        adapters: Sequence[str] = (),
        max_loaded_adapters: int = 0,
        pooling: Pooling | None = None,
    ) -> None:
        self.max_model_len = max_model_len
        self._n_kv_blocks = n_kv_blocks
        self._block_size = block_size
        self._max_blocks = -(-max_model_len // block_size)  # of one row
        self._vocab_size = vocab_size
        self._has_states = has_states
        self._max_rows = max_rows
        self._held: dict[int, _Held] = {}  # by row
        self._not_greedy: set[int] = set()  # rows whose tokens are not just the argmax
        self._n_prompt_tokens = np.zeros(0, dtype=np.int64)  # [n_rows], as all columns
        # [n_groups, n_rows, n_columns], where n_columns is the largest number of blocks of a row
        self._block_ids = np.zeros((n_groups, 0, 16), dtype=np.int64)
        self._sampling = np.zeros(0, dtype=SAMPLING_COLUMNS)
        self._stop_token_ids: dict[int, Ints] = {}  # of rows with `min_tokens`
        self._rules: dict[int, TokenRules] = {}  # of rows with rules
        self.constraints = Constraints(grammars)
        self.logprobs = LogprobRequests(vocab_size=vocab_size)
        self.pooled = PooledRequests(pooling)
        self._count_rows = np.zeros(0, dtype=np.int64)  # row of the counts, or NOT_COUNTED
        self._counts_tokens = counts_tokens
        self._token_counts = TokenCounts(vocab_size, device)
        self._keeps_tokens = keeps_tokens
        self.last_tokens = last_tokens(device)
        self._adapter_places = {digest: index for index, digest in enumerate(adapters)}
        self._n_adapters = len(adapters) + max_loaded_adapters  # indices are below it
        self._adapters = np.zeros(0, dtype=np.int64)  # index of the row's adapter, or NO_ADAPTER

    def apply(self, plan: IterationPlan) -> Spans:
        """Releases and admits requests, appends blocks and advances rows, as the plan says. Returns
        the plan's spans as columns.

        Raises PlanError if the plan violates the protocol. The table must not be used after that.
        """
        for row in plan.released_rows:
            self._release(row)
        for admission in plan.admissions:
            self._admit(admission)
        spans = Spans.of(plan, n_groups=len(self._block_ids))
        self._refuse_outside(plan)
        self._move_on(plan, spans.new_block_ids)
        if spans.n_drafts is not None:
            self._note_drafts(spans, spans.n_drafts)
        if self._counts_tokens:
            self.logprobs.check(spans)
        if self.constraints:
            self._take_sent(plan)
        return spans

    def keep_tokens(self, rows: Numbers, tokens: Numbers) -> None:
        """Stores the tokens sampled for `rows`, both [n_sampled], so that later plans may leave
        these tokens out."""
        if self._keeps_tokens:
            self.last_tokens.keep(rows, tokens)

    def count(self, token_ids: Tensor, counted: CountedTokens) -> None:
        """Counts, for penalties, the tokens that `counted` selects from a batch. `token_ids`
        [n_tokens] are all tokens of the batch."""
        self._token_counts.add(token_ids, counted)

    def count_rows(self, rows: Ints) -> Ints | None:
        """Returns, for each of `rows`, its row in the token counts, or NOT_COUNTED if its tokens
        are not counted. Returns None if none of the rows is counted."""
        if not self._token_counts.n_reserved:
            return None
        count_rows = self._count_rows[rows]
        return count_rows if (count_rows != NOT_COUNTED).any() else None

    def n_prompt_tokens(self, rows: Ints) -> Ints:
        """Returns the lengths of the prompts of `rows`."""
        return self._n_prompt_tokens[rows]

    def add_adapter(self, digest: str, index: int) -> None:
        """Lets requests use the adapter with this digest. Batches refer to the adapter by `index`.
        Raises ValueError if the index is too large or in use."""
        if not 0 <= index < self._n_adapters or index in self._adapter_places.values():
            raise ValueError(f"an adapter cannot have the index {index}")
        self._adapter_places[digest] = index

    def drop_adapter(self, digest: str) -> None:
        """From now on, refuses new requests that use the adapter. No later batch may have tokens of
        earlier requests that use it."""
        del self._adapter_places[digest]

    def adapters(
        self, rows: Ints, span_of_token: Ints, sampled_tokens: Ints
    ) -> BatchAdapters | None:
        """Returns the adapters of the tokens of a batch, or None if no token has one.

        The batch has one span for each of `rows`, and then perhaps spans of padding, which have no
        adapter. `span_of_token` [n_tokens] has the index of each token's span, and `sampled_tokens`
        [n_sampled] are the indices of the sampled tokens.
        """
        if not self._adapter_places:
            return None
        adapters = self._adapters[rows]
        if span_of_token[-1] >= len(rows):
            n_padding = int(span_of_token[-1]) + 1 - len(rows)
            adapters = np.pad(adapters, (0, n_padding), constant_values=NO_ADAPTER)
        return BatchAdapters.of(adapters[span_of_token], sampled_tokens, self._n_adapters)

    def block_tables(self, rows: Ints) -> Ints:
        """Returns the blocks of `rows` in order, [n_groups, n_spans, n_columns].

        `n_columns` is the largest number of blocks of a row in `rows`. Shorter rows are padded.
        """
        return self._block_ids[:, rows, : max(self._n_blocks(rows))]

    def padded_block_tables(self, rows: Ints, n_columns: int, *, scratch: int) -> Ints:
        """Returns the first `n_columns` blocks of `rows`, [n_groups, n_spans, n_columns].

        Rows with fewer blocks are padded with the block `scratch`.
        """
        blocks = self._block_ids[:, rows, :n_columns]
        n_groups, n_spans, n_there = blocks.shape
        is_there = np.arange(n_there) < np.array(self._n_blocks(rows))[:, None]
        tables = np.full((n_groups, n_spans, n_columns), scratch)
        tables[:, :, :n_there] = np.where(is_there, blocks, scratch)
        return tables

    def _n_blocks(self, rows: Ints) -> list[int]:
        held = self._held
        return [held[row].n_blocks for row in rows.tolist()]

    def is_greedy(self, rows: Ints) -> bool:
        """Returns whether, for all `rows`, the next token is simply the argmax of the logits."""
        return self._not_greedy.isdisjoint(rows.tolist())

    def sampling(self, rows: Ints, positions: Ints) -> SamplingBatch:
        """Returns the sampling options for the next tokens of `rows`, which will be at
        `positions`."""
        columns = self._sampling[rows]
        n_generated = positions - self._n_prompt_tokens[rows]
        min_tokens = columns["min_tokens"]
        too_early = np.flatnonzero((n_generated < min_tokens) & (min_tokens > 0))
        return SamplingBatch(
            options=columns,
            positions=positions,
            banned=tuple((i, self._stop_token_ids[rows[i]]) for i in too_early.tolist()),
            penalized=self._penalized(rows),
            rules=self._rules_of(rows),
        )

    def _rules_of(self, rows: Ints) -> tuple[tuple[int, TokenRules], ...]:
        if not self._rules:
            return ()
        found = ((i, self._rules.get(row)) for i, row in enumerate(rows.tolist()))
        return tuple((i, rules) for i, rules in found if rules is not None)

    def _penalized(self, rows: Ints) -> PenalizedRows | None:
        count_rows = self.count_rows(rows)
        if count_rows is None:
            return None
        places = np.flatnonzero(count_rows != NOT_COUNTED)
        return PenalizedRows(
            rows=places,
            options=self._sampling[rows[places]],
            count_rows=count_rows[places],
            counts=self._token_counts.tensor,
        )

    def _release(self, row: int) -> None:
        if row not in self._held:
            raise PlanError(f"released row {row} is not held")
        del self._held[row]
        self._not_greedy.discard(row)
        if self._count_rows[row] != NOT_COUNTED:
            self._token_counts.release(int(self._count_rows[row]))
        self._stop_token_ids.pop(row, None)
        self._rules.pop(row, None)
        self.constraints.release(row)
        self.logprobs.release(row)
        self.pooled.release(row)

    def _admit(self, admission: Admission) -> None:
        self._refuse_row(admission)
        row, sampling = admission.row, admission.sampling
        _refuse_sampling(row, sampling, vocab_size=self._vocab_size)
        if row >= len(self._n_prompt_tokens):
            self._grow_rows(row + 1)
        stored = admission.stored_token_ids
        _refuse_outside("stored_token_ids", stored, self._vocab_size)
        self._held[row] = _Held(n_tokens=len(stored))
        if not sampling.is_greedy or admission.grammar_digest:
            self._not_greedy.add(row)
        self._n_prompt_tokens[row] = admission.n_prompt_tokens
        self._adapters[row] = self._adapter_places.get(admission.adapter, NO_ADAPTER)
        self._sampling[row] = column_values(sampling)
        self._count_rows[row] = NOT_COUNTED
        if sampling.has_penalty and self._counts_tokens:
            self._count_rows[row] = self._token_counts.reserve()
            self._token_counts.add_stored(
                int(self._count_rows[row]), stored, n_prompt=admission.n_prompt_tokens
            )
        if admission.grammar_digest and self._counts_tokens:
            self.constraints.admit(
                row, admission.grammar_digest, n_prompt_tokens=admission.n_prompt_tokens
            )
            self.constraints.take_sent(row, 0, stored)
        elif sampling.bad_words and self._counts_tokens:
            self.constraints.hold(
                row,
                BadWordsMatcher(sampling, vocab_size=self._vocab_size),
                n_prompt_tokens=admission.n_prompt_tokens,
            )
            self.constraints.take_sent(row, 0, stored)
        if self._counts_tokens:
            self.logprobs.admit(admission)
            self.pooled.admit(admission)
        if rules := TokenRules.of(sampling, vocab_size=self._vocab_size):
            self._rules[row] = rules
        if sampling.min_tokens:
            self._stop_token_ids[row] = column(sampling.stop_token_ids)

    def _refuse_row(self, admission: Admission) -> None:
        row = admission.row
        if row in self._held:
            raise PlanError(f"admitted row {row} is held by another request")
        if not 0 <= row < self._max_rows:
            raise PlanError(f"admitted row {row} is not below {self._max_rows}")
        if self._has_states and admission.stored_token_ids:
            raise PlanError(f"admitted row {row} has stored tokens, and no state after them")
        if admission.adapter and admission.adapter not in self._adapter_places:
            raise PlanError(f"admitted row {row} has an unknown adapter {admission.adapter[:64]}")

    def _refuse_outside(self, plan: IterationPlan) -> None:
        if len(set(plan.rows)) < len(plan.rows):
            raise PlanError(f"a row has two spans: rows {list(plan.rows)}")
        _refuse_outside("token_ids", plan.token_ids, self._vocab_size)
        _refuse_outside("new_block_ids", plan.new_block_ids, self._n_kv_blocks)

    def _move_on(self, plan: IterationPlan, new_block_ids: Ints) -> None:
        # A Python loop: for few spans and cold caches it is faster than a few NumPy calls.
        n_taken = 0
        for row, start, n_tokens, n_new, is_sampled, is_left_out in zip(
            plan.rows,
            plan.start_positions,
            plan.n_tokens,
            plan.n_new_blocks,
            plan.sample,
            plan.token_on_rank,
            strict=True,
        ):
            held, end = self._held.get(row), start + n_tokens
            if held is None:
                raise PlanError(f"row {row} is unknown")
            if n_tokens < 1:
                raise PlanError(f"row {row} has a span without tokens")
            if not held.may_begin_at(start):
                raise PlanError(
                    f"row {row} has a span that does not continue what is stored: starts {start}, "
                    f"stored {held.n_tokens}"
                )
            if end > self.max_model_len:
                raise PlanError(f"row {row} grows longer than the model allows")
            if is_left_out and n_tokens != 1:
                raise PlanError(f"row {row} leaves out more than a token")
            if is_left_out and not (self._keeps_tokens and held.has_last_token):
                raise PlanError(f"row {row} leaves out a token that is not on the rank")
            if n_new:
                n_all = n_new * len(self._block_ids)
                self._append_blocks(row, held, new_block_ids[n_taken : n_taken + n_all])
                n_taken += n_all
            if end > held.n_blocks * self._block_size:
                raise PlanError(f"row {row} has too few blocks for its span")
            held.n_tokens, held.n_drafts, held.has_last_token = end, 0, is_sampled

    def _note_drafts(self, spans: Spans, n_drafts: Ints) -> None:
        for place in np.flatnonzero(n_drafts).tolist():
            row, n = int(spans.rows[place]), int(n_drafts[place])
            if n >= spans.n_tokens[place] or not spans.sample[place]:
                raise PlanError(f"row {row} has {n} drafts, and nothing to verify them")
            if self._has_states:
                raise PlanError(f"row {row} has drafts, which states cannot take back")
            is_counted = self._count_rows[row] != NOT_COUNTED
            if is_counted or row in self.constraints or self.logprobs.are_of_sampled(row):
                raise PlanError(f"row {row} has drafts, and options that do not allow them")
            held = self._held[row]
            held.n_drafts, held.has_last_token = n, False

    def _take_sent(self, plan: IterationPlan) -> None:
        end = 0
        for row, start, n_tokens, is_left_out in zip(
            plan.rows, plan.start_positions, plan.n_tokens, plan.token_on_rank, strict=True
        ):
            if not is_left_out:
                end += n_tokens
                self.constraints.take_sent(row, start, plan.token_ids[end - n_tokens : end])

    def _append_blocks(self, row: int, held: _Held, block_ids: Ints) -> None:
        n_groups = len(self._block_ids)
        n_before, n_after = held.n_blocks, held.n_blocks + len(block_ids) // n_groups
        if n_after > self._max_blocks:
            raise PlanError(f"row {row} has {n_after} blocks; the longest sequence needs fewer")
        self._grow_width(n_after)
        self._block_ids[:, row, n_before:n_after] = block_ids.reshape(n_groups, -1)
        held.n_blocks = n_after

    def _grow_rows(self, n_rows: int) -> None:
        n_before = len(self._n_prompt_tokens)
        n_more = max(n_rows, 2 * n_before) - n_before
        self._n_prompt_tokens = np.pad(self._n_prompt_tokens, (0, n_more))
        self.last_tokens.grow(n_before + n_more)
        self._block_ids = np.pad(self._block_ids, ((0, 0), (0, n_more), (0, 0)))
        self._count_rows = np.pad(self._count_rows, (0, n_more))
        self._adapters = np.pad(self._adapters, (0, n_more))
        self._sampling = np.concatenate([self._sampling, np.zeros(n_more, SAMPLING_COLUMNS)])

    def _grow_width(self, n_columns: int) -> None:
        width = self._block_ids.shape[2]
        if n_columns > width:
            n_more = max(n_columns, 2 * width) - width
            self._block_ids = np.pad(self._block_ids, ((0, 0), (0, 0), (0, n_more)))


def _refuse_sampling(row: int, sampling: SamplingParams, *, vocab_size: int) -> None:
    """Raises PlanError for options that the scheduler would have refused.

    A token id below 0 would address memory before the logits of the row. The number of stop tokens
    is not checked, because they may include the model's end tokens, whose number has no limit.
    """
    own = frozenset(sampling.stop_token_ids)
    try:
        sampling.check(own_stop_token_ids=own)
        sampling.check_vocabulary(vocab_size, own_stop_token_ids=own)
    except InvalidRequest as error:
        raise PlanError(f"admitted row {row}: {error}") from error
    if any(token_id < 0 for token_id in sampling.stop_token_ids):
        raise PlanError(f"admitted row {row}: stop_token_ids are below 0")


def _refuse_outside(name: str, ids: Sequence[int], limit: int) -> None:
    if ids and (min(ids) < 0 or max(ids) >= limit):
        wrong = [i for i in ids if not 0 <= i < limit]
        raise PlanError(f"{name} {wrong[:8]} are not in [0, {limit})")
