"""All operations of a model but attention and plain matrix products: embedding, norms, rotary
embedding with K/V, gates, sampling, experts.

Bytes are counted for what must be read and written once: for sampling the row of logits, for
experts the matrices of all experts that some token chose.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.bench import OURS, Bench, Case, Version
from benchmarks.gpu.int8_products import int8_cases
from benchmarks.gpu.shapes import BLOCK_SIZE
from kernels import TORCH, HeadNorms, Ops
from kernels.forms.sampling_columns import SamplingColumns
from kernels.upload import uploads_for
from services.common.sampling import SamplingParams
from services.worker.engine.sampler import SAMPLING_COLUMNS, SamplingBatch, column_values

EPS = 1e-5

N_RANKS = 4
"""Number of ranks that share the embedding table; the benchmark measures one of these ranks."""


def measure(bench: Bench) -> None:
    """Measures the operations and writes a row for each operation, number of tokens and version."""
    scale = bench.scale
    for n in scale.token_counts:
        for case in token_cases(bench, n):
            bench.measure(case)
        for case in int8_cases(bench, n):
            bench.measure(case)
        bench.release()
    for n in scale.expert_tokens:
        bench.measure(expert_case(bench, n))
    bench.release()
    for n in scale.sampled_rows:
        for case in sampling_cases(bench, n):
            bench.measure(case)


def token_cases(bench: Bench, n: int) -> Iterator[Case]:
    """Yields a case for the embedding, and one for each operation between the matrix products of a
    layer, over `n` tokens."""
    shape, size = bench.scale.model, bench.dtype.itemsize
    table = torch.empty(
        (shape.vocab_size // N_RANKS, shape.hidden), dtype=bench.dtype, device=bench.device
    ).normal_()
    generator = torch.Generator().manual_seed(n)
    token_ids = torch.randint(shape.vocab_size, (n,), generator=generator)
    n_found = int(((token_ids >= len(table)) & (token_ids < 2 * len(table))).sum())
    tokens = token_ids.to(bench.device)
    yield _case(
        bench,
        f"embedding, {n} tokens, {n_found} of which are this rank's",
        lambda ops: [partial(ops.embedding, table, tokens, len(table))],
        n_bytes=(n + n_found) * shape.hidden * size,
    )

    (weight,) = torch.ones(1, shape.hidden, dtype=bench.dtype, device=bench.device)
    rows = _tensors(bench, n, shape.hidden)
    yield _case(
        bench,
        f"rms_norm, {n} tokens",
        lambda ops: [partial(ops.rms_norm, x, weight, EPS) for x in rows],
        n_bytes=2 * n * shape.hidden * size,
    )

    gate_up = _tensors(bench, n, 2 * shape.inner)
    yield _case(
        bench,
        f"silu_and_mul, {n} tokens",
        lambda ops: [partial(ops.silu_and_mul, x) for x in gate_up],
        n_bytes=3 * n * shape.inner * size,
    )
    yield from _rotary_cases(bench, n)


def _tensors(bench: Bench, *sizes: int) -> list[Tensor]:
    """Returns random tensors of shape `sizes`, one for each set of inputs."""
    n_sets = bench.n_sets(int(np.prod(sizes)) * bench.dtype.itemsize)
    stacked = torch.empty((n_sets, *sizes), dtype=bench.dtype, device=bench.device).normal_()
    return list(stacked)


def _rotary_cases(bench: Bench, n: int) -> Iterator[Case]:
    shape, size = bench.scale.model, bench.dtype.itemsize
    n_qkv_heads = shape.n_heads + 2 * shape.n_kv_heads
    qkv = _tensors(bench, n, n_qkv_heads * shape.head_dim)
    half = torch.randn(n, 1, shape.head_dim // 2, device=bench.device)
    angles = torch.cat((-half, half), -1)  # as `Ops.rotary` has them
    cos, sin = angles.cos().to(bench.dtype), angles.sin().to(bench.dtype)
    n_slots = -(-n // BLOCK_SIZE) * BLOCK_SIZE
    keys, values = torch.empty(
        (2, n_slots // BLOCK_SIZE, BLOCK_SIZE, shape.n_kv_heads, shape.head_dim),
        dtype=bench.dtype,
        device=bench.device,
    ).normal_()
    slots = torch.randperm(n_slots)[:n].to(bench.device)
    kept = [each.clone() for each in (qkv[0], keys, values)]  # before any version has changed them
    q_norm, k_norm = torch.ones(2, shape.head_dim, dtype=bench.dtype, device=bench.device)
    for norms, suffix in ((None, ""), (HeadNorms(q_norm, k_norm, EPS), ", heads normalised")):
        others = cos, sin, keys, values, slots, shape.n_heads, norms
        yield _case(
            bench,
            f"rotary_write_kv, {n} tokens{suffix}",
            partial(_rotary_calls, qkv, others),
            # Cosines and sines count by one half of their elements, since the other half repeats
            # the angles.
            n_bytes=(2 * n_qkv_heads + 1) * n * shape.head_dim * size,
            check=partial(_turned_and_stored, kept, others),
        )


def _rotary_calls(
    qkv: Sequence[Tensor], others: tuple[Any, ...], ops: Ops
) -> list[Callable[[], Tensor]]:
    return [partial(ops.rotary_write_kv, x, *others) for x in qkv]


def _turned_and_stored(inputs: Sequence[Tensor], others: tuple[Any, ...], ops: Ops) -> Tensor:
    """Runs `rotary_write_kv` on copies of qkv, keys and values. Returns the rotated queries and the
    stored keys and values in one flat tensor. The inputs are copied because the operation changes
    them."""
    qkv, keys, values = [each.clone() for each in inputs]
    cos, sin, _, _, slots, n_heads, norms = others
    q = ops.rotary_write_kv(qkv, cos, sin, keys, values, slots, n_heads, norms)
    return torch.cat([each.flatten() for each in (q, keys, values)])


def expert_case(bench: Bench, n: int) -> Case:
    """Returns a case of one layer's experts over `n` tokens. Each token chooses its experts at
    random."""
    mixture, size, device = bench.scale.mixture, bench.dtype.itemsize, bench.device
    hidden, inner, n_chosen = mixture.hidden, mixture.inner, mixture.n_chosen
    generator = torch.Generator().manual_seed(n)
    scores = torch.rand(n, mixture.n_experts, generator=generator)
    chosen = scores.topk(n_chosen).indices
    n_used = len(set(chosen.flatten().tolist()))
    gate_up = torch.empty(
        (mixture.n_experts, 2 * inner, hidden), dtype=bench.dtype, device=device
    ).normal_(std=hidden**-0.5)
    down = torch.empty((mixture.n_experts, hidden, inner), dtype=bench.dtype, device=device)
    down.normal_(std=inner**-0.5)
    x = torch.empty((n, hidden), dtype=bench.dtype, device=device).normal_()
    experts = chosen.to(device)
    weights = torch.full((n, n_chosen), 1 / n_chosen, dtype=bench.dtype, device=device)
    return _case(
        bench,
        f"expert_mlp, {n} tokens, {n_used} of {mixture.n_experts} experts",
        lambda ops: [partial(ops.expert_mlp, x, gate_up, down, experts, weights)],
        n_bytes=(3 * n_used * hidden * inner + 2 * n * hidden) * size,
        n_flops=6 * n * n_chosen * hidden * inner,
        is_torch_capturable=False,  # it waits for the counts of the experts
    )


def sampling_cases(bench: Bench, n: int) -> Iterator[Case]:
    """Yields a case for each operation that chooses tokens from `n` rows of logits."""
    vocab_size, size = bench.scale.model.vocab_size, bench.dtype.itemsize
    n_bytes = n * vocab_size * size
    n_sets = bench.n_sets(n_bytes)
    logits = list(
        torch.empty((n_sets, n, vocab_size), dtype=bench.dtype, device=bench.device).normal_(std=4)
    )
    yield _case(
        bench,
        f"greedy, {n} rows",
        lambda ops: [partial(ops.greedy, rows) for rows in logits],
        n_bytes=n_bytes,
    )
    sampled = SamplingParams(temperature=0.8)
    greedy = SamplingParams(temperature=0)
    batches = {
        "all greedy": [greedy] * n,
        "temperature": [sampled] * n,
        "top_p 0.95": [replace(sampled, top_p=0.95)] * n,
        "top_k 50 and top_p 0.95": [replace(sampled, top_k=50, top_p=0.95)] * n,
        "half of them greedy": [sampled if row % 2 else greedy for row in range(n)],
    }
    for name, params in batches.items():
        yield _case(
            bench,
            f"sample, {n} rows, {name}",
            partial(_sample_calls, logits, columns_of(bench, params)),
            n_bytes=n_bytes,
            is_torch_capturable=False,  # its host reads which rows are settled
            max_different_share=0.01,
        )


def _sample_calls(
    logits: Sequence[Tensor], columns: SamplingColumns, ops: Ops
) -> list[Callable[[], Tensor]]:
    return [partial(ops.sample, rows, columns) for rows in logits]


def columns_of(bench: Bench, params: Sequence[SamplingParams]) -> SamplingColumns:
    """Returns the sampling columns for a batch with one row per element of `params`. Each row has
    its own seed."""
    rows = [column_values(replace(item, seed=row)) for row, item in enumerate(params)]
    batch = SamplingBatch(
        options=np.array(rows, SAMPLING_COLUMNS),
        positions=np.full(len(rows), 100),
        banned=(),
    )
    uploads = uploads_for(bench.device)
    columns = batch.columns(uploads, bench.scale.model.vocab_size)
    uploads.flush()
    return columns


def _case(
    bench: Bench,
    name: str,
    calls: Callable[[Ops], Sequence[Callable[[], Tensor]]],
    *,
    n_bytes: int,
    n_flops: int = 0,
    is_torch_capturable: bool = True,
    check: Callable[[Ops], Tensor] | None = None,
    max_different_share: float = 0.0,
) -> Case:
    """Returns a case with two versions over the same inputs, ours and PyTorch's; only one version
    if ours is PyTorch's."""

    def version(ops: Ops) -> Version:
        return Version(
            calls(ops),
            is_capturable=ops is not TORCH or is_torch_capturable,
            check=None if check is None else partial(check, ops),
        )

    versions = {OURS: partial(version, bench.ops)}
    if bench.ops is not TORCH:
        versions["torch"] = partial(version, TORCH)
    return Case(
        name,
        n_bytes=n_bytes,
        n_flops=n_flops,
        versions=versions,
        max_different_share=max_different_share,
    )
