"""Attention over paged keys and values: decodes, prompts, chunks and mixed batches.

Bytes are counted for queries, results, and all keys and values that a query attends to, each once.
Arithmetic operations are counted for each pair of a query and a key that the query attends to. The
version `sdpa` is PyTorch's own attention, over keys and values that are contiguous for each
request; no engine that shares memory among requests stores keys and values like that. The version
`torch` is PyTorch's implementation of our operation, over the same blocks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.bench import OURS, Bench, Case, Version
from benchmarks.gpu.shapes import BLOCK_SIZE, ModelShape
from kernels import TORCH, AttentionForm, AttentionPlan, Ops
from kernels.upload import uploads_for

Span = tuple[int, int]  # tokens stored before, tokens in the batch
FORM = AttentionForm()


def measure(bench: Bench) -> None:
    """Measures attention and writes a row for each batch and version."""
    for case in cases(bench):
        bench.measure(case)
        bench.release()


def cases(bench: Bench) -> Iterator[Case]:
    """Yields the cases one after the other. Each is made only when it is needed, so that only one
    case at a time uses memory."""
    scale = bench.scale
    for context in scale.attention_contexts:
        for batch in scale.attention_batches:
            spans = ((context - 1, 1),) * batch
            yield _case(bench, f"decode {batch} of {context}", spans)
    for n in scale.prompts:
        yield _case(bench, f"prompt {n}", ((0, n),))
    for start, n in scale.chunks:
        yield _case(bench, f"chunk of {n} after {start}", ((start, n),))
    for name, spans in scale.mixed_batches.items():
        yield _case(bench, name, spans)


def n_bytes_of(spans: Sequence[Span], shape: ModelShape, itemsize: int) -> int:
    """Returns the least number of bytes that one layer's attention reads and writes."""
    n_keys = sum(start + n for start, n in spans)
    n_tokens = sum(n for _, n in spans)
    n_elements = 2 * n_keys * shape.n_kv_heads + 2 * n_tokens * shape.n_heads
    return n_elements * shape.head_dim * itemsize


def n_pairs_of(spans: Sequence[Span]) -> int:
    """Returns the number of (query, key) pairs of causal attention: each token attends to all
    tokens up to and including itself."""
    return sum(n * start + n * (n + 1) // 2 for start, n in spans)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Queries, and the block tables of their sequences' keys and values."""

    q: Tensor  # [n_tokens, n_heads, head_dim]
    block_tables: np.ndarray[tuple[int, int], np.dtype[np.int64]]  # [n_spans, most blocks]


class Batch:
    """A batch over one layer's K/V storage, with several sets of inputs. No two sets share a block,
    so that the device's cache does not help."""

    def __init__(self, bench: Bench, spans: Sequence[Span]) -> None:
        shape = bench.scale.model
        self._bench = bench
        self._shape = shape
        self._spans = spans
        self._n_blocks = [-(-(start + n) // BLOCK_SIZE) for start, n in spans]
        self.n_bytes = n_bytes_of(spans, shape, bench.dtype.itemsize)
        n_sets = bench.n_sets(self.n_bytes)
        n_stored = n_sets * sum(self._n_blocks)
        generator = np.random.default_rng(0)
        places = generator.permutation(n_stored)
        cache = (2, n_stored, BLOCK_SIZE, shape.n_kv_heads, shape.head_dim)
        kv = torch.empty(cache, dtype=bench.dtype, device=bench.device).normal_()
        self.keys, self.values = kv
        self.inputs = [self._inputs(mine) for mine in np.split(places, n_sets)]

    def _inputs(self, places: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Inputs:
        table = np.zeros((len(self._spans), max(self._n_blocks)), np.int64)
        for row, mine in zip(table, np.split(places, np.cumsum(self._n_blocks)[:-1]), strict=True):
            row[: len(mine)] = mine
        n_tokens = sum(n for _, n in self._spans)
        heads = (n_tokens, self._shape.n_heads, self._shape.head_dim)
        q = torch.empty(heads, dtype=self._bench.dtype, device=self._bench.device).normal_()
        return Inputs(q, table)

    def paged(self, ops: Ops, *, has_fixed_shape: bool = False) -> Version:
        """Returns the version that runs `ops.attention` over paged keys and values. The attention
        plan is made once for all layers and is not timed."""
        starts, counts = np.array(self._spans, np.int64).T.copy()
        uploads = uploads_for(self._bench.device)

        def plan(inputs: Inputs) -> AttentionPlan:
            return ops.plan_attention(
                starts,
                counts,
                block_tables=inputs.block_tables,
                key_caches=[self.keys],
                n_heads=self._shape.n_heads,
                uploads=uploads,
                has_fixed_shape=has_fixed_shape,
            )

        plans = [plan(inputs) for inputs in self.inputs]
        uploads.flush()
        return Version(
            [
                partial(ops.attention, inputs.q, self.keys, self.values, plan, FORM)
                for inputs, plan in zip(self.inputs, plans, strict=True)
            ]
        )

    def in_rows(self) -> Version:
        """Returns the version that runs PyTorch's own attention over contiguous keys and values of
        each request. All spans must be equal."""
        start, n = self._spans[0]
        n_spans, shape = len(self._spans), self._shape
        device = self._bench.device

        def gathered(cache: Tensor, inputs: Inputs) -> Tensor:
            table = torch.from_numpy(inputs.block_tables).to(device)
            rows = cache[table].flatten(1, 2)[:, : start + n]  # [n_spans, n_keys, n_kv_heads, dim]
            return rows.transpose(1, 2).contiguous()

        def call(inputs: Inputs) -> partial[Tensor]:
            q = inputs.q.view(n_spans, n, shape.n_heads, shape.head_dim).transpose(1, 2)
            keys, values = gathered(self.keys, inputs), gathered(self.values, inputs)
            return partial(_sdpa, q.contiguous(), keys, values)

        return Version([call(inputs) for inputs in self.inputs])


def _sdpa(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Returns PyTorch's attention over [n_spans, heads, n_tokens, head_dim]. The mask is causal.
    For a single token there is no mask: the token attends to all keys."""
    is_causal = q.shape[2] > 1
    attended = F.scaled_dot_product_attention(q, keys, values, is_causal=is_causal, enable_gqa=True)
    return attended.transpose(1, 2)  # [n_spans, n_tokens, n_heads, head_dim]


def _case(bench: Bench, name: str, spans: Sequence[Span]) -> Case:
    shape = bench.scale.model
    batch = Batch(bench, spans)
    versions: dict[str, Callable[[], Version]] = {OURS: partial(batch.paged, bench.ops)}
    if all(n == 1 for _, n in spans):
        versions[f"{OURS}, as in a graph"] = partial(batch.paged, bench.ops, has_fixed_shape=True)
    if len(set(spans)) == 1 and (spans[0][0] == 0 or spans[0][1] == 1):
        versions["sdpa"] = batch.in_rows
    if bench.ops is not TORCH:
        versions["torch"] = partial(batch.paged, TORCH)
    return Case(
        name,
        n_bytes=batch.n_bytes,
        n_flops=4 * shape.n_heads * shape.head_dim * n_pairs_of(spans),
        versions=versions,
    )
