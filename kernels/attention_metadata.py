"""How the attention of one mixed batch is cut into a few calls.

A batch is a row of spans. A span of one token is a decode; a longer one that starts its sequence is
a prompt; a longer one with history is a chunk. Spans of a kind are packed into groups that one
padded call computes. Their gather indices and masks are the same in every layer, so they are made
here, once per iteration.

Two things bound a group. Its keys must fit in the processor's cache, because they are gathered from
their blocks and read again at once: for 32 decodes of 1,024 tokens (8 K/V heads of 64, float32) one
call took five times as long as 32. And its padding must cost less than a call. So short contexts
share a call, and long ones have a call each, which is then long enough not to mind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]

# Gathered keys of a group, in bytes; the values need as much again. Of 0.25 to 4 MiB, 1 and 2 MiB
# were the fastest over three models, four batch shapes and two element types on a server core.
_MAX_KEY_BYTES = 1 << 20

# Query-key pairs of padding that a group may compute: about what one more call costs.
_MAX_PADDING = 512


@dataclass(frozen=True, slots=True)
class Decodes:
    """Spans of one token; each attends to all that is stored of its sequence."""

    tokens: Tensor | None  # [n_spans] their places in the batch; None: the whole batch, in order
    blocks: Tensor  # [n_spans * blocks per span] block ids, padded with any valid id
    n_keys: int  # of the longest span
    mask: Tensor | None  # [n_spans, 1, 1, n_keys] added to the scores; None: no padding


@dataclass(frozen=True, slots=True)
class Prompts:
    """Spans that start their sequences: all their keys are in the batch itself."""

    tokens: Tensor  # [n_spans, n_queries] places in the batch, padded with the span's last
    kept: Tensor  # [tokens of the spans] places in the flattened [n_spans * n_queries]
    places: Tensor  # [tokens of the spans] where these lie in the batch


@dataclass(frozen=True, slots=True)
class Chunks:
    """Spans of several tokens that go on with a sequence; their keys are gathered from storage."""

    tokens: Tensor  # as in Prompts
    kept: Tensor
    places: Tensor
    blocks: Tensor  # as in Decodes
    n_keys: int
    mask: Tensor  # [n_spans, 1, n_queries, n_keys]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The groups of one batch; together they hold each of its tokens once."""

    decodes: tuple[Decodes, ...]
    prompts: tuple[Prompts, ...]
    chunks: tuple[Chunks, ...]


def plan_attention(
    start_positions: Ints, n_tokens: Ints, *, block_tables: Ints, key_cache: Tensor
) -> AttentionMetadata:
    """Packs the spans of a batch.

    `start_positions` and `n_tokens` are [n_spans]; `block_tables` [n_spans, any width] holds the
    blocks of each span's sequence in order, the rest being any valid ids; `key_cache` is one
    layer's keys [n_blocks, block_size, n_kv_heads, head_dim], of which only the form matters.
    """
    planner = _Planner(start_positions, n_tokens, block_tables, key_cache)
    is_decode = n_tokens == 1
    is_prompt = ~is_decode & (start_positions == 0)
    return AttentionMetadata(
        decodes=tuple(map(planner.decodes, planner.pack(np.flatnonzero(is_decode)))),
        prompts=tuple(map(planner.prompts, planner.pack(np.flatnonzero(is_prompt)))),
        chunks=tuple(map(planner.chunks, planner.pack(np.flatnonzero(~is_decode & ~is_prompt)))),
    )


class _Planner:
    """The columns of one batch, and what groups are made of."""

    def __init__(self, starts: Ints, n_tokens: Ints, block_tables: Ints, key_cache: Tensor) -> None:
        self._starts = starts
        self._n_tokens = n_tokens
        self._n_keys: Ints = starts + n_tokens
        self._first_tokens: Ints = np.cumsum(n_tokens) - n_tokens
        self._block_tables = block_tables
        self._key_positions = torch.arange(int(self._n_keys.max()), device=key_cache.device)
        self._block_size = key_cache.shape[1]
        self._dtype = key_cache.dtype
        self._device = key_cache.device
        key_bytes = key_cache[0, 0].numel() * key_cache.element_size()
        self._max_keys = _MAX_KEY_BYTES // key_bytes

    def pack(self, spans: Ints) -> Iterator[Ints]:
        """Cuts `spans` into groups, longest first, by the two bounds; each in the batch's order."""
        if not len(spans):
            return
        order = spans[np.argsort(-self._n_keys[spans], kind="stable")]
        n_keys = self._n_keys[order].tolist()
        n_queries = self._n_tokens[order].tolist()
        begin = 0
        most_queries = n_pairs = 0
        for i in range(len(order)):
            most_queries = max(most_queries, n_queries[i])
            n_pairs += n_queries[i] * n_keys[i]
            n_padded_keys = (i + 1 - begin) * n_keys[begin]
            n_padding = n_padded_keys * most_queries - n_pairs
            if i > begin and (n_padded_keys > self._max_keys or n_padding > _MAX_PADDING):
                yield np.sort(order[begin:i])
                begin, most_queries, n_pairs = i, n_queries[i], n_queries[i] * n_keys[i]
        yield np.sort(order[begin:])

    def decodes(self, spans: Ints) -> Decodes:
        n_keys = self._n_keys[spans]
        longest = int(n_keys.max())
        mask = None
        if int(n_keys.min()) < longest:
            mask = self._mask((n_keys - 1)[:, None, None, None], longest)
        is_whole_batch = len(spans) == len(self._starts)
        return Decodes(
            tokens=None if is_whole_batch else self._tensor(self._first_tokens[spans]),
            blocks=self._blocks(spans, longest),
            n_keys=longest,
            mask=mask,
        )

    def prompts(self, spans: Ints) -> Prompts:
        tokens, kept, places, _ = self._padded_queries(spans)
        return Prompts(tokens=tokens, kept=kept, places=places)

    def chunks(self, spans: Ints) -> Chunks:
        tokens, kept, places, offsets = self._padded_queries(spans)
        longest = int(self._n_keys[spans].max())
        positions = self._starts[spans, None] + offsets  # [n_spans, n_queries]
        return Chunks(
            tokens=tokens,
            kept=kept,
            places=places,
            blocks=self._blocks(spans, longest),
            n_keys=longest,
            mask=self._mask(positions[:, None, :, None], longest),
        )

    def _padded_queries(self, spans: Ints) -> tuple[Tensor, Tensor, Tensor, Ints]:
        n_queries = self._n_tokens[spans]
        column = np.arange(n_queries.max())
        offsets = np.minimum(column, n_queries[:, None] - 1)  # [n_spans, n_queries]
        tokens = self._first_tokens[spans, None] + offsets
        kept = np.flatnonzero(column < n_queries[:, None])
        places = tokens.ravel()[kept]
        return self._tensor(tokens), self._tensor(kept), self._tensor(places), offsets

    def _blocks(self, spans: Ints, n_keys: int) -> Tensor:
        n_blocks = -(-n_keys // self._block_size)
        return self._tensor(self._block_tables[spans, :n_blocks].ravel())

    def _mask(self, positions: Ints, n_keys: int) -> Tensor:
        """0 where a query at `positions` [n_spans, 1, n_queries, 1] may look, else -inf."""
        is_future = self._key_positions[:n_keys] > self._tensor(positions)
        mask = torch.zeros(is_future.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(is_future, -torch.inf)

    def _tensor(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self._device)
