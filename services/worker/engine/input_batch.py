"""From the spans of a plan to the flat tensors of one iteration.

A token is a token, whichever request it belongs to, and what attention and sampling must know
beside it is prepared here, once. All arrays of an iteration travel to the device in one copy
(`kernels.upload`). Knows no model and no wire format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from kernels import AttentionPlan, Ops
from kernels.sampling_columns import ALL_GREEDY, SamplingColumns
from kernels.upload import Uploads
from services.worker.engine.last_tokens import Numbers
from services.worker.engine.plan import Ints, Spans
from services.worker.engine.request_table import RequestTable
from services.worker.engine.token_counts import NOT_COUNTED, CountedTokens

Batching = Literal["selective", "padded"]
"""How requests are put together; `padded` makes all spans of a batch as long as the longest."""


@dataclass(frozen=True, slots=True)
class InputBatch:
    """The flat input of one iteration on one stage."""

    token_ids: Tensor  # [n_tokens] int64
    positions: Tensor  # [n_tokens] int64
    slots: Tensor  # [n_tokens] int64, where each token's K and V are stored
    attention: AttentionPlan
    sampled_tokens: Tensor  # [n_sampled] int64, places in the batch whose next token is sampled
    sampled_rows: Numbers  # [n_sampled], rows of these
    sampling: SamplingColumns  # of these
    counted: CountedTokens | None  # of this batch, for penalties now and later
    n_spans: int  # less those of padding
    n_sampled: int
    shape: DecodeShape | None = None  # that it is padded to, if it is


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What the shapes of a batch of decodes depend on, if it is padded to that."""

    n_spans: int
    n_columns: int  # blocks of the longest sequence that there may be


class BatchBuilder:
    """Lays out the batches of a stage, on its device, from what its table knows of requests."""

    def __init__(
        self,
        table: RequestTable,
        *,
        ops: Ops,
        key_cache: Tensor,
        n_heads: int,
        uploads: Uploads,
        windows: Sequence[int | None] = (None,),
        vocab_size: int | None = None,
    ) -> None:
        """`key_cache` is the keys of any layer, [n_blocks, block_size, n_kv_heads, head_dim];
        `n_heads` are this rank's, and `windows` those of the stage's layers. `vocab_size` is that
        of the logits that are sampled, if any are on this stage.

        Batches with padding store the keys and values of padding in the last block of the cache,
        which the table must not have.
        """
        self._table = table
        self._ops = ops
        self._key_cache = key_cache
        self._n_heads = n_heads
        self._uploads = uploads
        self._windows = windows
        self._vocab_size = vocab_size
        self._scratch = len(key_cache) - 1
        self._block_size = key_cache.shape[1]

    def build(self, spans: Spans) -> InputBatch:
        """The batch of `spans`, which the table has applied; every span has its own length."""
        return self._lay_out(
            spans, spans.start_positions, spans.n_tokens, self._table.block_tables(spans.rows)
        )

    def build_padded(self, spans: Spans) -> InputBatch:
        """The same with every span as long as the longest, as where all operations want equal
        shapes; what is computed for padding is dropped. It shows what selective batching saves."""
        widths = np.full_like(spans.n_tokens, spans.n_tokens.max())
        end = int((spans.start_positions + widths).max())
        tables = self._table.padded_block_tables(
            spans.rows, -(-end // self._block_size), scratch=self._scratch
        )
        return self._lay_out(spans, spans.start_positions, widths, tables, is_padded=True)

    def build_decodes(self, spans: Spans, shape: DecodeShape) -> InputBatch:
        """The same of spans of one token each, and spans at position 0 of a sequence in the last
        block where there are fewer than `shape` says.

        The tensors that layers read have the same addresses whenever the shape and what the uploads
        are aimed at are the same.
        """
        n = len(spans.rows)
        starts = np.zeros(shape.n_spans, np.int64)
        starts[:n] = spans.start_positions
        tables = np.full((shape.n_spans, shape.n_columns), self._scratch)
        tables[:n] = self._table.padded_block_tables(
            spans.rows, shape.n_columns, scratch=self._scratch
        )
        return self._lay_out(spans, starts, np.ones_like(starts), tables, shape=shape)

    def _lay_out(
        self,
        spans: Spans,
        starts: Ints,
        widths: Ints,
        block_tables: Ints,
        *,
        is_padded: bool = False,
        shape: DecodeShape | None = None,
    ) -> InputBatch:
        """`starts` and `widths` are those of `spans`, the latter with padding if it `is_padded`,
        and of further spans if there is a `shape`."""
        add, block_size = self._uploads.add, self._block_size
        numbers = self._table.last_tokens.numbers
        next_positions = spans.start_positions + spans.n_tokens
        first_tokens, span_of_token, positions = _places(starts, widths)
        blocks = block_tables[span_of_token, positions // block_size]
        slots = blocks * block_size + positions % block_size
        if is_padded:
            is_padding = positions >= next_positions[span_of_token]
            slots[is_padding] = self._scratch * block_size + positions[is_padding] % block_size
            positions = np.minimum(positions, self._table.max_model_len - 1)
        first_tokens = first_tokens[: len(spans.rows)]
        sampled_rows = spans.rows[spans.sample]
        # What layers read comes first, so that its places depend on nothing but the shape.
        token_ids = add(_sent_tokens(spans, first_tokens, n_tokens=len(positions)))
        batch = InputBatch(
            token_ids=token_ids,
            positions=add(positions),
            slots=add(slots),
            attention=self._ops.plan_attention(
                starts,
                widths,
                block_tables=block_tables,
                key_cache=self._key_cache,
                n_heads=self._n_heads,
                windows=self._windows,
                uploads=self._uploads,
                has_fixed_shape=shape is not None,
            ),
            sampled_tokens=add((first_tokens + spans.n_tokens - 1)[spans.sample]),
            sampled_rows=numbers(sampled_rows, self._uploads),
            sampling=self._sampling(sampled_rows, next_positions[spans.sample]),
            counted=self._counted(spans, first_tokens),
            n_spans=len(spans.rows),
            n_sampled=len(sampled_rows),
            shape=shape,
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

    def _sampling(self, rows: Ints, positions: Ints) -> SamplingColumns:
        """How to sample the tokens of `rows` that will have `positions`."""
        if self._vocab_size is None or self._table.is_greedy(rows):
            return ALL_GREEDY
        return self._table.sampling(rows, positions).columns(self._uploads, self._vocab_size)

    def _counted(self, spans: Spans, first_tokens: Ints) -> CountedTokens | None:
        count_rows = self._table.count_rows(spans.rows)
        if count_rows is None:
            return None
        counted = np.flatnonzero(count_rows != NOT_COUNTED)
        n_tokens = spans.n_tokens[counted]
        n_prompt = self._table.n_prompt_tokens(spans.rows[counted]) - spans.start_positions[counted]
        n_prompt = np.clip(n_prompt, 0, n_tokens)
        firsts, count_rows = first_tokens[counted], count_rows[counted]
        return CountedTokens(
            prompt_tokens=self._uploads.add(_ranges(firsts, n_prompt)),
            prompt_rows=self._uploads.add(np.repeat(count_rows, n_prompt)),
            generated_tokens=self._uploads.add(_ranges(firsts + n_prompt, n_tokens - n_prompt)),
            generated_rows=self._uploads.add(np.repeat(count_rows, n_tokens - n_prompt)),
        )


def n_batch_tokens(n_tokens: Sequence[int], *, is_padded: bool) -> int:
    """Tokens of a batch of spans that are so long, padding included."""
    return len(n_tokens) * max(n_tokens) if is_padded else sum(n_tokens)


def _places(starts: Ints, widths: Ints) -> tuple[Ints, Ints, Ints]:
    """Where in the batch spans begin [n_spans], and of each token its span and its position in the
    sequence [n_tokens]."""
    n_spans, n_tokens = len(widths), sum(widths.tolist())
    if n_tokens == n_spans:
        places = np.arange(n_spans)
        return places, places, starts
    first_tokens = np.cumsum(widths) - widths
    span_of_token = np.repeat(np.arange(n_spans), widths)
    positions: Ints = np.arange(n_tokens) + (starts - first_tokens)[span_of_token]
    return first_tokens, span_of_token, positions


def _sent_tokens(spans: Spans, first_tokens: Ints, *, n_tokens: int) -> Ints:
    """The tokens of a batch [n_tokens] that came with the plan, and 0 for padding and for those
    that are on the rank; spans begin at `first_tokens`."""
    if len(spans.token_ids) == n_tokens:
        return spans.token_ids
    n_sent = np.where(spans.token_on_rank, 0, spans.n_tokens)
    flat = np.zeros(n_tokens, dtype=np.int64)
    flat[_ranges(first_tokens, n_sent)] = spans.token_ids
    return flat


def _ranges(firsts: Ints, lengths: Ints) -> Ints:
    """`lengths[i]` numbers from `firsts[i]`, for each i in turn."""
    n_before = np.cumsum(lengths) - lengths
    numbers: Ints = np.arange(lengths.sum()) + np.repeat(firsts - n_before, lengths)
    return numbers
