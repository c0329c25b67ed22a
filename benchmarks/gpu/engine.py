"""Iterations of a whole model on the runner of a rank: decodes at a context, and whole prompts.

The floor of an iteration is the larger of two times: reading all matrices, keys and values at the
measured bandwidth, and computing all products at the measured rate. `seconds` is the time from the
plan to the tokens on the host. `prepare_s` is the part of it before the first launch, in which the
host prepares the batch. `queued_s` is the time of an iteration if the next iteration is launched
before this one ends, as a rank does when the next plan has arrived. `busy_s`, where kernels were
profiled, is the time during which at least one kernel ran.

The first tokens that are sampled with CUDA graphs must equal those sampled without them. The
compared batches have sizes for which graphs are recorded, and begin with equal keys and values, so
that both runners compute the same numbers in the same order.

The last rows are decodes with int8 weights, where the matrices of the layers have one byte per
element.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.attention import n_pairs_of
from benchmarks.gpu.bench import GRAPHS, INT8, OURS, Bench, Row
from benchmarks.gpu.runners import (
    Launched,
    Steps,
    StepTimes,
    n_kv_blocks,
    random_model,
    runner_of,
    versions_of,
)
from benchmarks.gpu.shapes import BLOCK_SIZE
from kernels.packing.linear import can_compute

N_COMPARED = 4
"""Number of iterations whose sampled tokens are compared with and without CUDA graphs."""
N_WARM_UPS = 3
MAX_STEPS = 24
STEP_BUDGET_S = 0.4
N_QUEUED = 10
N_PROFILED = 4
N_MORE = N_WARM_UPS + MAX_STEPS + N_QUEUED + N_PROFILED
"""Number of further tokens, after its context, for which each request has K/V memory."""
N_KERNELS = 12
"""Number of kernels that a profile lists: those with the largest total time."""
NO_MEMORY: Row = {"skipped": "not enough memory for keys and values"}

Tokens = dict[tuple[int, int], list[list[int]]]
"""Sampled tokens by (batch size, context in tokens): a list for each of the first iterations."""


@torch.inference_mode()  # as a rank does
def measure(bench: Bench) -> None:
    """Measures iterations and writes a row for each decode batch and each prompt length."""
    scale = bench.scale
    model = random_model(bench)
    largest = max(scale.step_batches) * (max(scale.step_contexts) + N_MORE)
    n_blocks = n_kv_blocks(bench, -(-largest // BLOCK_SIZE) + max(scale.step_batches))
    versions = versions_of(bench)
    tokens: Tokens = {}
    for version in versions:
        is_first = version == versions[0]
        _measure_version(
            bench,
            version,
            Steps(runner_of(model, n_blocks, has_graphs=version == GRAPHS), n_blocks=n_blocks),
            tokens=tokens if len(versions) > 1 else None,
            decodes=list(_grid(bench)) if is_first else scale.eager_steps,
            prompts=scale.prompts if is_first else (),
        )
        bench.release()  # the next runner needs the same memory
    del model
    if can_compute("int8", bench.device):
        _measure_int8(bench, n_blocks, has_graphs=GRAPHS in versions)


def _measure_int8(bench: Bench, n_blocks: int, *, has_graphs: bool) -> None:
    model = random_model(bench, "int8")
    steps = Steps(runner_of(model, n_blocks, has_graphs=has_graphs), n_blocks=n_blocks)
    for batch, context in bench.scale.int8_steps:
        work = partial(_decode, bench, steps, batch, context, layer_itemsize=1)
        bench.attempt(f"decode {batch} of {context}", INT8, work)


def _measure_version(
    bench: Bench,
    version: str,
    steps: Steps,
    *,
    tokens: Tokens | None,
    decodes: Sequence[tuple[int, int]],
    prompts: Sequence[int],
) -> None:
    if tokens is not None:  # before anything else has stored keys and values
        for batch, context in bench.scale.eager_steps:
            work = partial(compare, tokens, steps, batch, context)
            bench.attempt(f"tokens of decode {batch} of {context}", version, work)
    for batch, context in decodes:
        work = partial(_decode, bench, steps, batch, context)
        bench.attempt(f"decode {batch} of {context}", version, work)
    for n in prompts:
        bench.attempt(f"prompt {n}", OURS, partial(_prefill, bench, steps, n))


def _grid(bench: Bench) -> Iterator[tuple[int, int]]:
    for context in bench.scale.step_contexts:
        for batch in bench.scale.step_batches:
            yield batch, context


def compare(tokens: Tokens, steps: Steps, batch: int, context: int) -> Row:
    """Samples the first tokens of a batch. The first version that runs a batch stores its tokens in
    `tokens`; the next version compares its tokens with the stored ones. Returns a row with the
    result.

    Raises:
        ArithmeticError: there are logits that are not finite.
    """
    if not steps.admit(batch, context=context, n_more=N_MORE):
        return NO_MEMORY
    sampled = [steps.decode().wait()[0] for _ in range(N_COMPARED)]
    if any(-1 in each for each in sampled):
        raise ArithmeticError("logits are not finite")
    row: Row = {"batch_size": batch, "n_iterations": N_COMPARED}
    if (batch, context) in tokens:
        row["tokens_equal"] = sampled == tokens[batch, context]
    tokens.setdefault((batch, context), sampled)
    return row


def _decode(
    bench: Bench, steps: Steps, batch: int, context: int, *, layer_itemsize: int | None = None
) -> Row:
    shape, size = bench.scale.model, bench.dtype.itemsize
    if not steps.admit(batch, context=context, n_more=N_MORE):
        return NO_MEMORY
    times = _repeat(steps.decode)
    n_keys = batch * (context + 1)
    row = _row(times) | {
        "queued_s": _queued(steps.decode),
        "batch": batch,
        "context": context,
        "n_bytes": shape.iteration_bytes(n_keys, size, layer_itemsize=layer_itemsize),
        "n_flops": shape.iteration_flops(batch, batch, n_keys),
        "tokens_per_s": batch / statistics.median(each.total_s for each in times),
    }
    if (batch, context) in bench.scale.profiled_steps:
        row |= _profiled(bench, steps.decode, row["seconds"])
    return row


def _prefill(bench: Bench, steps: Steps, n_tokens: int) -> Row:
    shape, size = bench.scale.model, bench.dtype.itemsize
    times = _repeat(lambda: steps.prefill(n_tokens))
    row = _row(times) | {
        "n_tokens": n_tokens,
        "n_bytes": shape.iteration_bytes(n_tokens, size),
        "n_flops": shape.iteration_flops(n_tokens, 1, n_pairs_of([(0, n_tokens)])),
        "tokens_per_s": n_tokens / statistics.median(each.total_s for each in times),
    }
    return row | _profiled(bench, lambda: steps.prefill(n_tokens), row["seconds"])


def _repeat(launch: Callable[[], Launched]) -> list[StepTimes]:
    """Returns the times of iterations that are launched one at a time: each ends before the
    next."""
    for _ in range(N_WARM_UPS):
        launch().wait()
    times: list[StepTimes] = []
    end = time.perf_counter() + STEP_BUDGET_S
    while len(times) < 3 or (len(times) < MAX_STEPS and time.perf_counter() < end):
        times.append(launch().wait()[1])
    return times


def _queued(launch: Callable[[], Launched]) -> float:
    """Returns the mean seconds per iteration if each is launched before the previous one has
    ended."""
    start = time.perf_counter()
    ahead = launch()
    for _ in range(N_QUEUED - 1):
        ahead, done = launch(), ahead
        done.wait()
    ahead.wait()
    return (time.perf_counter() - start) / N_QUEUED


def _row(times: list[StepTimes]) -> Row:
    return {
        "seconds": statistics.median(each.total_s for each in times),
        "prepare_s": statistics.median(each.prepare_s for each in times),
        "launch_s": statistics.median(each.launch_s for each in times),
        "wait_s": statistics.median(each.wait_s for each in times),
        "n_steps": len(times),
    }


def _profiled(bench: Bench, launch: Callable[[], Launched], step_s: float) -> Row:
    """Profiles `N_PROFILED` iterations and returns their time by kernel; an empty row on a CPU.
    `step_s` is the seconds of an iteration without the profiler, which slows down the host but not
    the kernels."""
    if bench.device.type != "cuda":
        return {}
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as record:
            for _ in range(N_PROFILED):
                launch().wait()
            torch.cuda.synchronize(bench.device)
        events = record.events() or ()
    except (AssertionError, RuntimeError) as error:  # errors of the profiler
        return {"not_profiled": f"{type(error).__name__}: {error}"}
    return profile_of([event for event in events if event.device_type.name == "CUDA"], step_s)


def profile_of(events: Sequence[Any], step_s: float) -> Row:
    """Returns a row with the seconds per iteration of each kernel, and of all kernels together. If
    no kernel was recorded, the row says so."""
    if not events:
        return {"not_profiled": "no kernel was seen"}
    spans: list[tuple[float, float]] = []
    by_kernel: dict[str, list[float]] = defaultdict(list)
    for event in events:
        begin, end = event.time_range.start, event.time_range.end  # microseconds
        spans.append((begin, end))
        by_kernel[event.name].append((end - begin) / 1e6)
    busy_s = covered(spans) / 1e6 / N_PROFILED
    most = sorted(by_kernel.items(), key=lambda item: -sum(item[1]))[:N_KERNELS]
    return {
        "busy_s": busy_s,
        "outside_kernels": 1 - busy_s / step_s,
        "n_launches": sum(map(len, by_kernel.values())) / N_PROFILED,
        "kernels": [
            {
                "name": name[:96],
                "n": len(spent) / N_PROFILED,
                "seconds": sum(spent) / N_PROFILED,
            }
            for name, spent in most
        ],
    }


def covered(spans: list[tuple[float, float]]) -> float:
    """Returns the total length of the union of intervals."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered
