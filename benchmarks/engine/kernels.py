"""Compares native operations of a stage with PyTorch's, on the shapes of a small Llama.

    python -m benchmarks.engine.kernels [--dtype bfloat16] [--only attention] [--whole]

The model has 12 query heads and 4 K/V heads of 64 elements, a hidden size of 768, an inner size of
2,048, a vocabulary of 32,000 tokens and 12 layers. Each layer has its own K/V storage. An operation
is called for one layer after the other, so that keys and values come from memory rather than from a
cache, as in a model. Other tensors are shared by all layers, as activations are in a model. The two
versions of an operation take turns; a time is the median over all rounds. Bytes are counted for
what must be read and written once; arithmetic operations are counted for attention, over the keys
that each query attends to.

`--whole` computes the attention of a whole workload instead: the 64 requests of
`benchmarks.serving.serve`, all at once, in the batches that a scheduler with 512 tokens per
iteration makes of the workload.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks import cpu_use, machine
from benchmarks.workload import mixed_lengths
from kernels import TORCH, AttentionForm, Ops, native_ops
from kernels.upload import uploads_for

N_LAYERS = 12
N_HEADS = 12
N_KV_HEADS = 4
HEAD_DIM = 64
HIDDEN = 768
INNER = 2048
VOCAB = 32000
BLOCK_SIZE = 16
MAX_BATCH_TOKENS = 512

Span = tuple[int, int]  # tokens stored before, tokens in the batch

# The mixed batch occurs in the workload.
BATCHES: dict[str, Sequence[Span]] = {
    "prompts of 32": [(0, 32)] * 16,
    "prompts of 277 and 235": [(0, 277), (0, 235)],
    "prompt of 512": [(0, 512)],
    "chunk of 512 after 1024": [(1024, 512)],
    "64 decodes of about 310": [(32 + 556 * i // 64, 1) for i in range(64)],
    "decode of 4000": [(4000, 1)],
    "40 decodes, prompts of 300 and 172": [
        *((32 + 14 * i, 1) for i in range(40)),
        (0, 300),
        (0, 172),
    ],
}


@dataclass(frozen=True)
class Case:
    """An operation on one shape: a function that runs the operation for a layer, and the least
    bytes and arithmetic operations of one call."""

    name: str
    call: Callable[[Ops, int], object]  # for a layer
    n_bytes: int = 0
    n_operations: int = 0


class Storage:
    """Random keys and values of every layer, and the numbers of all blocks in random order."""

    def __init__(self, n_blocks: int, dtype: torch.dtype) -> None:
        shape = (n_blocks, BLOCK_SIZE, N_KV_HEADS, HEAD_DIM)
        self.layers = [
            (torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(N_LAYERS)
        ]
        self.free = np.random.default_rng(0).permutation(n_blocks)

    def table(self, n_tokens: Sequence[int]) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """Returns a block table for sequences of the given lengths in tokens, [n_sequences, blocks
        of the longest]. Unused entries are 0."""
        n_blocks = [-(-n // BLOCK_SIZE) for n in n_tokens]
        table = np.zeros((len(n_blocks), max(n_blocks)), np.int64)
        used = 0
        for row, n in zip(table, n_blocks, strict=True):
            row[:n] = self.free[used : used + n]
            used += n
        return table


def attention_operations(spans: Sequence[Span]) -> int:
    """Returns the number of arithmetic operations of attention's two matrix products. Each product
    needs a multiplication and an addition per (query, key) pair and per element of each head."""
    n_pairs = sum(n * start + n * (n + 1) // 2 for start, n in spans)
    return 4 * N_HEADS * HEAD_DIM * n_pairs


def attention_bytes(spans: Sequence[Span], dtype: torch.dtype) -> int:
    """Returns the bytes of keys, values, queries and results, each counted once."""
    n_elements = sum(
        2 * (start + n) * N_KV_HEADS * HEAD_DIM + 2 * n * N_HEADS * HEAD_DIM for start, n in spans
    )
    return n_elements * dtype.itemsize


def attention_case(name: str, spans: Sequence[Span], storage: Storage, dtype: torch.dtype) -> Case:
    """Returns a case that runs attention over one batch. The attention plan is made once for all
    layers and is not timed."""
    table = storage.table([start + n for start, n in spans])
    starts, counts = np.array(spans, np.int64).T.copy()
    q = torch.randn(int(counts.sum()), N_HEADS, HEAD_DIM).to(dtype)
    key_cache = storage.layers[0][0]
    plans = {
        id(ops): ops.plan_attention(
            starts,
            counts,
            block_tables=table,
            key_caches=[key_cache],
            n_heads=N_HEADS,
            uploads=uploads_for(key_cache.device),
        )
        for ops in (TORCH, native_ops())
        if ops is not None
    }

    def call(ops: Ops, layer: int) -> object:
        return ops.attention(q, *storage.layers[layer], plans[id(ops)], AttentionForm())

    return Case(
        f"attention, {name}",
        call,
        n_bytes=attention_bytes(spans, dtype),
        n_operations=attention_operations(spans),
    )


def token_cases(n: int, storage: Storage, dtype: torch.dtype) -> Iterator[Case]:
    """Yields a case for each operation that treats every token separately, over `n` tokens."""
    size = dtype.itemsize
    heads = N_HEADS + 2 * N_KV_HEADS

    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    x, gate_up, qkv = tensor(n, HIDDEN), tensor(n, 2 * INNER), tensor(n, heads * HEAD_DIM)
    weight, bias = torch.randn(2, HIDDEN).to(dtype)
    cos, sin = torch.randn(2, n, 1, HEAD_DIM).to(dtype)
    slots = torch.randperm(len(storage.free) * BLOCK_SIZE)[:n]
    logits = torch.randn(n, VOCAB)

    yield Case(
        f"rms_norm, {n} tokens",
        lambda ops, i: ops.rms_norm(x, weight, 1e-5),
        n_bytes=2 * n * HIDDEN * size,
    )
    yield Case(
        f"layer_norm, {n} tokens",
        lambda ops, i: ops.layer_norm(x, weight, bias, 1e-5),
        n_bytes=2 * n * HIDDEN * size,
    )
    yield Case(
        f"rotary_write_kv, {n} tokens",
        lambda ops, i: ops.rotary_write_kv(qkv, cos, sin, *storage.layers[i], slots, N_HEADS),
        n_bytes=2 * n * heads * HEAD_DIM * size,
    )
    yield Case(
        f"silu_and_mul, {n} tokens",
        lambda ops, i: ops.silu_and_mul(gate_up),
        n_bytes=3 * n * INNER * size,
    )
    yield Case(
        f"gelu_and_mul, {n} tokens",
        lambda ops, i: ops.gelu_and_mul(gate_up),
        n_bytes=3 * n * INNER * size,
    )
    if n <= 64:
        yield Case(
            f"greedy, {n} rows of float32",
            lambda ops, i: ops.greedy(logits),
            n_bytes=n * VOCAB * 4,
        )


def seconds_per_layer(call: Callable[[int], object]) -> float:
    """Calls `call` once with the index of each layer, and returns the mean seconds per call."""
    start = time.perf_counter()
    for layer in range(N_LAYERS):
        call(layer)
    return (time.perf_counter() - start) / N_LAYERS


def measure(case: Case, versions: Sequence[Ops], budget_s: float) -> list[float]:
    """Returns the median seconds per layer of each version. The versions take turns."""
    calls = [partial(case.call, ops) for ops in versions]
    round_s = sum(map(seconds_per_layer, calls)) * N_LAYERS  # the first, which warms up
    n_rounds = max(5, int(budget_s / round_s))
    times = [list(map(seconds_per_layer, calls)) for _ in range(n_rounds)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def report(case: Case, native_s: float, torch_s: float) -> None:
    """Prints the times of one case and their ratio on one line."""
    rates = f"{case.n_bytes / native_s / 1e9:8.1f} GB/s"
    if case.n_operations:
        rates += f" {case.n_operations / native_s / 1e9:7.1f} GFLOP/s"
    print(
        f"{case.name:<48} {1e6 * native_s:9.1f} us {1e6 * torch_s:10.1f} us "
        f"{torch_s / native_s:6.2f} x {rates}",
        flush=True,
    )


def workload_batches() -> Iterator[Sequence[Span]]:
    """Yields the spans of each batch for 64 requests that start together. Decodes come first; a
    prompt that does not fit into the rest of a batch is split."""
    lengths = mixed_lengths(64, seed=0)
    stored = [0] * len(lengths)
    while True:
        spans: list[Span] = []
        room = MAX_BATCH_TOKENS
        # First the requests that decode, then prompts in order.
        order = sorted(range(len(lengths)), key=lambda i: stored[i] < lengths[i].n_prompt)
        for i in order:
            # The last token that is sampled is not stored.
            n_left = lengths[i].n_tokens - 1 - stored[i]
            n_prompt_left = lengths[i].n_prompt - stored[i]
            n = min(room, n_prompt_left) if n_prompt_left > 0 else min(1, n_left)
            if n > 0:
                spans.append((stored[i], n))
                stored[i] += n
                room -= n
        if not spans:
            return
        yield spans


def whole_workload(storage: Storage, dtype: torch.dtype, versions: Sequence[Ops]) -> None:
    """Prints, for each version, the seconds and the rate of attention over the whole workload. The
    time to make attention plans is included."""
    batches = list(workload_batches())
    n_operations = N_LAYERS * sum(map(attention_operations, batches))
    totals = [0.0] * len(versions)
    for spans in batches:
        table = storage.table([start + n for start, n in spans])
        starts, counts = np.array(spans, np.int64).T.copy()
        q = torch.randn(int(counts.sum()), N_HEADS, HEAD_DIM).to(dtype)
        for version, ops in enumerate(versions):
            start = time.perf_counter()
            key_cache = storage.layers[0][0]
            plan = ops.plan_attention(
                starts,
                counts,
                block_tables=table,
                key_caches=[key_cache],
                n_heads=N_HEADS,
                uploads=uploads_for(key_cache.device),
            )
            for keys, values in storage.layers:
                ops.attention(q, keys, values, plan, AttentionForm())
            totals[version] += time.perf_counter() - start
    for name, total_s in zip(("native", "torch"), totals, strict=False):
        print(
            f"attention of the whole workload, {name}: {total_s:.3f} s in {len(batches)} batches, "
            f"{n_operations / total_s / 1e9:.0f} GFLOP/s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose names hold TEXT")
    parser.add_argument("--whole", action="store_true", help="only the attention of a workload")
    parser.add_argument("--native", action="store_true", help="leave PyTorch's version out")
    parser.add_argument("--budget-s", type=float, default=1.0, help="for each case")
    arguments = parser.parse_args()
    native = native_ops()
    if native is None:
        raise SystemExit("there are no native kernels: python -m kernels.build")
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    versions = [native] if arguments.native else [native, TORCH]
    storage = Storage(4096, dtype)
    print(f"{arguments.dtype}, {torch.get_num_threads()} threads, {machine.cpu_name()}")
    with cpu_use.watch() as use:
        if arguments.whole:
            whole_workload(storage, dtype, versions)
        else:
            print(f"{'':<48} {'native':>12} {'torch':>13} {'gain':>8} {'native rate':>13}")
            cases = [attention_case(name, spans, storage, dtype) for name, spans in BATCHES.items()]
            cases += [case for n in (512, 64) for case in token_cases(n, storage, dtype)]
            for case in cases:
                if arguments.only in case.name:
                    native_s, *others = measure(case, versions, arguments.budget_s)
                    report(case, native_s, others[0] if others else native_s)
    print(f"cores used: {use.own_cpus:.2f} by this, {use.other_cpus:.2f} by others")


if __name__ == "__main__":
    main()
