"""How the attention of one mixed batch is cut into a few calls.

A batch is a row of spans. A span of one token is a decode; a longer one that starts its sequence is
a prompt; a longer one with history is a chunk. Spans of a kind are packed into groups that one
padded call computes. Their gather indices and masks are the same in every layer, so they are made
here, once per iteration.

Two things bound a group. Its keys must fit in the processor's cache, because they are gathered from
their blocks and read again at once: for 32 decodes of 1,024 tokens (8 K/V heads of 64, float32) one
call took five times as long as 32. And its padding must cost less than a call. So short contexts
share a call, and long ones have a call each, which is then long enough not to mind.

A layer with a sliding window has groups of its own, made from the same batch, of which blocks that
lie wholly before the window are left out. Layers with the same window share them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.upload import Uploads, upload

Ints = NDArray[np.int64]

# Gathered keys of a group, in bytes; the values need as much again. Of 0.25 to 4 MiB, 1 and 2 MiB
# were the fastest over three models, four batch shapes and two element types on a server core.
_MAX_KEY_BYTES = 1 << 20

# Query-key pairs of padding that a group may compute: about what one more call costs.
_MAX_PADDING = 512


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """What a layer's attention computes beside the plain formula."""

    window: int | None = None  # keys that a query sees, its own among them; None: all before it
    scale: float | None = None  # factor of the scores; None: 1 / sqrt(head_dim)
    soft_cap: float | None = None  # c: scores s become c * tanh(s / c); None: they stay


@dataclass(frozen=True, slots=True)
class Decodes:
    """Spans of one token; each attends to what is stored of its sequence, or its window of it."""

    tokens: Tensor | None  # [n_spans] their places in the batch; None: the whole batch, in order
    blocks: Tensor  # [n_spans * blocks per span] block ids, padded with any valid id
    n_keys: int  # gathered for the longest span
    mask: Tensor | None  # [n_spans, 1, 1, n_keys] added to the scores; None: all are seen


@dataclass(frozen=True, slots=True)
class Prompts:
    """Spans that start their sequences: a span has as many keys as queries."""

    tokens: Tensor  # [n_spans, n_queries] places in the batch, padded with the span's last
    kept: Tensor  # [tokens of the spans] places in the flattened [n_spans * n_queries]
    places: Tensor  # [tokens of the spans] where these lie in the batch
    blocks: Tensor  # as in Decodes
    n_keys: int  # n_queries
    mask: Tensor | None  # [1, 1, n_queries, n_queries]; None: every query sees all before it


@dataclass(frozen=True, slots=True)
class Chunks:
    """Spans of several tokens that go on with a sequence; their keys are gathered from storage."""

    tokens: Tensor  # as in Prompts
    kept: Tensor
    places: Tensor
    blocks: Tensor
    n_keys: int
    mask: Tensor  # [n_spans, 1, n_queries, n_keys]


@dataclass(frozen=True, slots=True)
class AttentionGroups:
    """The groups of one batch; together they hold each of its tokens once."""

    decodes: tuple[Decodes, ...]
    prompts: tuple[Prompts, ...]
    chunks: tuple[Chunks, ...]
    windowed: Mapping[int, AttentionGroups] = field(default_factory=dict)  # by window

    def of(self, window: int | None) -> AttentionGroups:
        """The groups for layers of that window, which must have been planned."""
        return self if window is None else self.windowed[window]


def plan_attention(
    start_positions: Ints,
    n_tokens: Ints,
    *,
    block_tables: Ints,
    key_cache: Tensor,
    n_heads: int,
    windows: Sequence[int | None] = (None,),
    uploads: Uploads,
    has_fixed_shape: bool = False,
) -> AttentionGroups:
    """Packs the spans of a batch, once for each of the different `windows` of a model's layers.

    `start_positions` and `n_tokens` are [n_spans]; `block_tables` [n_spans, any width] holds the
    blocks of each span's sequence in order, the rest being any valid ids; `key_cache` is one
    layer's keys [n_blocks, block_size, n_kv_heads, head_dim], of which only the form matters.

    Other implementations also go by what is not needed here: `n_heads`, the query heads of this
    rank; `uploads`, which their tensors are added to and which is flushed before `attention` reads
    them; and `has_fixed_shape`, the promise that every span is one token, for which the shapes of
    all tensors are to depend on the form of `block_tables` only.
    """
    longest = int((start_positions + n_tokens).max())

    def groups(window: int | None) -> AttentionGroups:
        return _Planner(start_positions, n_tokens, block_tables, key_cache, window).plan()

    # A window that no sequence of the batch outgrows is no window.
    cutting = {window for window in windows if window is not None and window < longest}
    plain = groups(None) if len(cutting) < len(set(windows)) else AttentionGroups((), (), ())
    by_window = {window: groups(window) for window in cutting}
    return AttentionGroups(
        plain.decodes,
        plain.prompts,
        plain.chunks,
        {window: by_window.get(window, plain) for window in windows if window is not None},
    )


class _Planner:
    """The columns of one batch as layers of one window see them, and what groups are made of.

    A span's keys are counted from the first block that it sees anything of.
    """

    def __init__(
        self,
        starts: Ints,
        n_tokens: Ints,
        block_tables: Ints,
        key_cache: Tensor,
        window: int | None,
    ) -> None:
        self._block_size = key_cache.shape[1]
        self._window = window
        self._first_blocks: Ints = np.zeros_like(starts)
        if window is not None:
            self._first_blocks = np.maximum(starts - window + 1, 0) // self._block_size
        self._starts: Ints = starts - self._first_blocks * self._block_size
        self._n_tokens = n_tokens
        self._n_keys: Ints = self._starts + n_tokens
        self._first_tokens: Ints = np.cumsum(n_tokens) - n_tokens
        self._block_tables = block_tables
        self._key_positions = torch.arange(int(self._n_keys.max()), device=key_cache.device)
        self._dtype = key_cache.dtype
        self._device = key_cache.device
        key_bytes = key_cache[0, 0].numel() * key_cache.element_size()
        self._max_keys = _MAX_KEY_BYTES // key_bytes

    def plan(self) -> AttentionGroups:
        is_decode = self._n_tokens == 1
        is_prompt = ~is_decode & (self._starts == 0) & (self._first_blocks == 0)
        is_chunk = ~is_decode & ~is_prompt
        return AttentionGroups(
            decodes=tuple(map(self.decodes, self.pack(np.flatnonzero(is_decode)))),
            prompts=tuple(map(self.prompts, self.pack(np.flatnonzero(is_prompt)))),
            chunks=tuple(map(self.chunks, self.pack(np.flatnonzero(is_chunk)))),
        )

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
        if int(n_keys.min()) < longest or self._cuts(longest):
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
        longest = tokens.shape[1]
        mask = None
        if self._cuts(longest):
            mask = self._mask(np.arange(longest)[None, None, :, None], longest)
        return Prompts(
            tokens=tokens,
            kept=kept,
            places=places,
            blocks=self._blocks(spans, longest),
            n_keys=longest,
            mask=mask,
        )

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
        if self._window is None:
            return self._tensor(self._block_tables[spans, :n_blocks].ravel())
        columns = self._first_blocks[spans, None] + np.arange(n_blocks)
        columns = np.minimum(columns, self._block_tables.shape[1] - 1)  # padding: any valid id
        return self._tensor(self._block_tables[spans[:, None], columns].ravel())

    def _cuts(self, n_keys: int) -> bool:
        """Whether the last of `n_keys` queries does not see the first key."""
        return self._window is not None and self._window < n_keys

    def _mask(self, positions: Ints, n_keys: int) -> Tensor:
        """0 where a query at `positions` [n_spans, 1, n_queries, 1] may look, else -inf."""
        queries, keys = self._tensor(positions), self._key_positions[:n_keys]
        is_hidden = keys > queries
        if self._window is not None:
            is_hidden |= keys <= queries - self._window
        mask = torch.zeros(is_hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(is_hidden, -torch.inf)

    def _tensor(self, values: Ints) -> Tensor:
        return upload(values, self._device)
