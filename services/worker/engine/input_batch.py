"""The flat tensors of one iteration, laid out from the spans of its plan.

Most operations treat all tokens alike, whatever their requests (selective batching, OSDI'22 section
3.2). The additional inputs that attention and sampling need are prepared here, once for all layers.
All arrays of an iteration are copied to the device in one transfer (`kernels.upload`). This module
does not depend on the model or on the wire format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kernels import AttentionPlan, Ops, StateSpans
from kernels.forms.adapter_rows import BatchAdapters
from kernels.forms.sampling_columns import ALL_GREEDY, SamplingColumns
from kernels.upload import Uploads
from services.worker.engine.constraints import ConstrainedRows
from services.worker.engine.counted_tokens import counted_tokens
from services.worker.engine.last_tokens import Numbers
from services.worker.engine.logprobs import WantedLogprobs
from services.worker.engine.plan import Ints, Spans, ranges
from services.worker.engine.pooled_requests import WantedStates
from services.worker.engine.recurrent_state import RecurrentState
from services.worker.engine.request_table import RequestTable
from services.worker.engine.token_counts import CountedTokens
from services.worker.models.stage import GroupPlan


@dataclass(frozen=True, slots=True)
class InputBatch:
    """The flat input of one iteration on one stage."""

    token_ids: Tensor  # [n_tokens] int64
    positions: Tensor  # [n_tokens] int64
    kv: Sequence[GroupPlan]  # for each K/V group
    states: StateSpans | None  # None if no layer keeps a state of each request
    sampled_tokens: Tensor  # [n_sampled] int64, indices of tokens after which one is sampled
    sampled_rows: Numbers  # [n_sampled], rows of the sampled tokens in the request table
    sampling: SamplingColumns  # [n_sampled] each
    counted: CountedTokens | None  # tokens of this batch that penalties count
    constrained: ConstrainedRows | None  # sampled rows that follow a grammar
    logprobs: WantedLogprobs | None  # log-probabilities that requests ask for
    n_spans: int  # without spans of padding
    n_sampled: int
    shape: DecodeShape | None = None  # the shape to which decodes are padded for a graph
    adapters: BatchAdapters | None = None  # None: no token has an adapter
    pooled: WantedStates | None = None  # tokens whose states become vectors


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """The padded size of a batch of decodes. This size determines the shapes of all tensors of the
    batch."""

    n_spans: int
    n_columns: int  # largest number of blocks of a sequence


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """The indices of a batch's tokens in the batch, their positions in their sequences and their
    slots in the K/V storage."""

    starts: Ints  # [n_spans], position of each span's first token
    widths: Ints  # [n_spans], number of tokens of each span, padding included
    block_tables: Ints  # [n_groups, n_spans, n_columns]
    first_tokens: Ints  # [n_spans], index in the batch of each span's first token
    span_of_token: Ints  # [n_tokens], index of the token's span
    positions: Ints  # [n_tokens], position of the token in its sequence
    slots: Ints  # [n_groups, n_tokens], slot of the token's key and value


class BatchBuilder:
    """Builds the batches of a stage on its device, from the stage's table of requests.

    Benchmarks override `build` and `n_tokens` to build batches as other engines do.
    """

    def __init__(
        self,
        table: RequestTable,
        *,
        ops: Ops,
        key_caches: Sequence[Tensor],
        n_heads: int,
        uploads: Uploads,
        windows: Sequence[Sequence[int | None]] = ((None,),),
        is_causal: bool = True,
        states: RecurrentState | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """Builds batches of the requests of `table`.

        `key_caches` are keys [n_blocks, block_size, n_kv_heads, head_dim] of the first layer with
        each number and size of K/V heads. `n_kv_heads` is 0 if no layer stores keys. `n_heads` is
        this rank's number of query heads. `windows` are the windows of the stage's layers in each
        K/V group, and `is_causal` says whether tokens attend only to earlier ones. `states` are the
        recurrent states of requests, if any. `vocab_size` is None on stages that do not sample.

        The keys and values of padding are stored in the last block, which no request may have.
        """
        self._table = table
        self._ops = ops
        self._key_caches = key_caches
        self._n_heads = n_heads
        self._uploads = uploads
        self._windows = windows
        self._is_causal = is_causal
        self._states = states
        self._vocab_size = vocab_size
        n_blocks, self._block_size = key_caches[0].shape[:2]
        self._scratch = n_blocks - 1

    def build(self, spans: Spans) -> InputBatch:
        """Returns the batch of `spans` of any lengths. Call it after `RequestTable.apply`."""
        block_tables = self._table.block_tables(spans.rows)
        return self._batch(spans, self._layout(spans.start_positions, spans.n_tokens, block_tables))

    def n_tokens(self, lengths: Sequence[int]) -> int:
        """Returns how many tokens `build` puts into the batch of spans of the given lengths."""
        return sum(lengths)

    def build_decodes(self, spans: Spans, shape: DecodeShape) -> InputBatch:
        """Returns the batch of `spans` of one token each, padded to `shape`. Each padding span is
        one token at position 0, whose key and value are stored in the last block.

        For equal shapes and one buffer (`Uploads.aim`), layers read tensors at equal addresses.
        """
        n = len(spans.rows)
        starts = np.zeros(shape.n_spans, np.int64)
        starts[:n] = spans.start_positions
        tables = np.full((len(self._windows), shape.n_spans, shape.n_columns), self._scratch)
        tables[:, :n] = self._table.padded_block_tables(
            spans.rows, shape.n_columns, scratch=self._scratch
        )
        return self._batch(spans, self._layout(starts, np.ones_like(starts), tables), shape=shape)

    def _layout(self, starts: Ints, widths: Ints, block_tables: Ints) -> TokenLayout:
        """Returns the layout of spans of `widths` tokens that begin at the positions `starts`."""
        first_tokens, span_of_token, positions = _places(starts, widths)
        blocks = block_tables[:, span_of_token, positions // self._block_size]
        slots = blocks * self._block_size + positions % self._block_size
        return TokenLayout(
            starts, widths, block_tables, first_tokens, span_of_token, positions, slots
        )

    def _batch(
        self, spans: Spans, layout: TokenLayout, *, shape: DecodeShape | None = None
    ) -> InputBatch:
        """Returns the batch of `spans` and queues its upload. With a `shape`, `layout` also has
        spans of padding, after `spans`."""
        add = self._uploads.add
        numbers = self._table.last_tokens.numbers
        first_tokens = layout.first_tokens[: len(spans.rows)]
        sampled = spans.sampled()
        sampled_tokens = (first_tokens + spans.n_tokens - 1)[sampled.spans] - sampled.back
        # The inputs of layers come first, so that their addresses depend only on the shape.
        token_ids = add(_sent_tokens(spans, first_tokens, n_tokens=len(layout.positions)))
        batch = InputBatch(
            token_ids=token_ids,
            positions=add(layout.positions),
            kv=[
                GroupPlan(
                    add(np.ascontiguousarray(slots)),
                    self._attention(layout, tables, windows, has_fixed_shape=shape is not None),
                )
                for slots, tables, windows in zip(
                    layout.slots, layout.block_tables, self._windows, strict=True
                )
            ],
            states=self._state_spans(spans.rows, layout),
            sampled_tokens=add(sampled_tokens),
            sampled_rows=numbers(sampled.rows, self._uploads),
            sampling=self._sampling(sampled.rows, sampled.positions),
            counted=counted_tokens(self._table, spans, first_tokens, self._uploads),
            constrained=self._table.constraints.rows_of(sampled.rows, sampled.positions),
            logprobs=self._table.logprobs.wanted(spans, first_tokens, self._uploads),
            n_spans=len(spans.rows),
            n_sampled=len(sampled.rows),
            shape=shape,
            adapters=self._table.adapters(spans.rows, layout.span_of_token, sampled_tokens),
            pooled=self._table.pooled.wanted(spans, first_tokens, self._uploads),
        )
        left_out = spans.token_on_rank
        if not left_out.any():
            self._uploads.flush()
            return batch
        places = numbers(first_tokens[left_out], self._uploads)
        rows = numbers(spans.rows[left_out], self._uploads)
        self._uploads.flush()
        self._table.last_tokens.put(token_ids, places, rows)
        return batch

    def _attention(
        self,
        layout: TokenLayout,
        block_tables: Ints,
        windows: Sequence[int | None],
        *,
        has_fixed_shape: bool,
    ) -> AttentionPlan:
        if not self._key_caches[0].shape[2]:
            return AttentionPlan()  # no layer attends
        return self._ops.plan_attention(
            layout.starts,
            layout.widths,
            block_tables=block_tables,
            key_caches=self._key_caches,
            n_heads=self._n_heads,
            windows=windows,
            is_causal=self._is_causal,
            uploads=self._uploads,
            has_fixed_shape=has_fixed_shape,
        )

    def _state_spans(self, rows: Ints, layout: TokenLayout) -> StateSpans | None:
        if self._states is None:
            return None
        add = self._uploads.add
        return StateSpans(
            add(layout.first_tokens),
            add(layout.widths),
            add(self._states.places(rows, len(layout.widths))),
            add(layout.starts),
        )

    def _sampling(self, rows: Ints, positions: Ints) -> SamplingColumns:
        """Returns the arguments of `Ops.sample` for the next tokens of `rows`, at `positions`."""
        if self._vocab_size is None or self._table.is_greedy(rows):
            return ALL_GREEDY
        return self._table.sampling(rows, positions).columns(self._uploads, self._vocab_size)


def _places(starts: Ints, widths: Ints) -> tuple[Ints, Ints, Ints]:
    """Returns the index in the batch of each span's first token [n_spans] and, for each token, the
    index of its span [n_tokens] and its position in the sequence [n_tokens]."""
    n_spans, n_tokens = len(widths), sum(widths.tolist())
    if n_tokens == n_spans:
        places = np.arange(n_spans)
        return places, places, starts
    first_tokens = np.cumsum(widths) - widths
    span_of_token = np.repeat(np.arange(n_spans), widths)
    positions: Ints = np.arange(n_tokens) + (starts - first_tokens)[span_of_token]
    return first_tokens, span_of_token, positions


def _sent_tokens(spans: Spans, first_tokens: Ints, *, n_tokens: int) -> Ints:
    """Returns the tokens of a batch [n_tokens] that the plan contains, and 0 for padding and for
    tokens that the plan leaves out. Spans begin at the indices `first_tokens` of the batch."""
    if len(spans.token_ids) == n_tokens:
        return spans.token_ids
    n_sent = np.where(spans.token_on_rank, 0, spans.n_tokens)
    flat = np.zeros(n_tokens, dtype=np.int64)
    flat[ranges(first_tokens, n_sent)] = spans.token_ids
    return flat
