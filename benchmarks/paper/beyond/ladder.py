"""From FasterTransformer to Orca, one idea after the other, and each idea alone.

A rung of this ladder is a system that is tried with several batch sizes. The best size counts,
separately for the highest throughput and for the throughput at the latency in the paper's abstract,
as the paper does for FasterTransformer (section 6.2). All rungs before pipelining run on
FasterTransformer's engine, whose control messages go from GPU to GPU. Figure 9c implies the time
for these messages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.paper.beyond.loads import Load
from benchmarks.paper.beyond.setups import IterationLevel, RequestLevel, Setup
from benchmarks.paper.beyond.trials import Trial, highest, on_all_cores, within
from benchmarks.paper.faster_transformer import Kinder, Prompts
from benchmarks.paper.gpu_costs import Gpu

CONTROL_S = (0.64e-3, 0.24e-3)
"""Seconds for a control message over gRPC to the first stage, and for a message to each further
stage. Measured for this project's control plane: docs/performance.md, "control round trip"."""

SIZES = ((1, 1), (2, 1), (4, 4), (8, 4), (8, 8), (16, 8), (16, 16))
"""(Largest batch, microbatch) of FasterTransformer, in requests."""
MORE_SIZES = ((32, 16), (32, 32), (64, 32))
"""Further (largest batch, microbatch) sizes. They fit into memory only if requests allocate memory
for their own lengths."""
DELAYS_S = (1.0, 5.0, 20.0)
"""Delays, in seconds, for which a batch waits for more requests. One request alone takes about 5
s."""
N_CANDIDATES = 2
"""Number of sizes of a rung that are tried at the latency in the abstract: those with the highest
throughputs. The smallest size is tried too, since it has the lowest latency at a low load."""


@dataclass(frozen=True, slots=True)
class Rung:
    """A system with several batch sizes, on one engine."""

    name: str
    setups: tuple[Setup, ...]
    gpu: Gpu
    message_s: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Worth:
    """The results of a rung: the highest throughput and the throughput `within` the latency limit,
    in requests per second, each with the batch size that reaches it."""

    name: str
    highest: float
    highest_size: str
    within: float
    within_size: str


def _batches(kinder: Kinder, sizes: Sequence[tuple[int, int]] = SIZES) -> tuple[Setup, ...]:
    return tuple(RequestLevel(*size, kinder) for size in sizes)


def ladder(engines: Mapping[str, Gpu]) -> list[Rung]:
    """Returns the rungs from FasterTransformer to Orca. Each rung has the ideas of all rungs before
    it."""
    ft, orca = engines["ft"], engines["orca"]
    kinder = Kinder(is_continuous=True)
    padded = replace(kinder, prompts=Prompts.PADDED)
    own = replace(kinder, prompts=Prompts.OWN)
    leaving = replace(own, leaves=True)
    fitting = replace(leaving, allocates_own=True)
    return [
        Rung("FasterTransformer", _batches(Kinder()), ft),
        Rung("+ continuous delivery", _batches(kinder), ft),
        Rung("+ whole prompts, padded", _batches(padded), ft),
        Rung("+ no padding", _batches(own), ft),
        Rung("+ who has ended is not computed", _batches(leaving), ft),
        Rung("+ memory as needed", _batches(fitting, SIZES + MORE_SIZES), ft),
        Rung("iteration level, equal positions only", (IterationLevel(32, "cellular", 1),), ft),
        Rung("+ selective batching", (IterationLevel(32, "orca", 1),), ft),
        Rung("+ a batch in flight for each stage", (IterationLevel(32),), ft),
        Rung("+ control ahead", (IterationLevel(32),), replace(ft, sync_s=0.0)),
        Rung("Orca's engine: orca(32)", (IterationLevel(32),), orca),
    ]


def added_alone(engines: Mapping[str, Gpu]) -> list[Rung]:
    """Returns variants of FasterTransformer, each with one of Orca's ideas added."""
    ft = engines["ft"]
    two = Kinder(n_batches=2)
    return [
        Rung("continuous delivery", _batches(Kinder(is_continuous=True)), ft),
        Rung("selective batching", _batches(Kinder(prompts=Prompts.OWN)), ft),
        Rung("iteration level", (IterationLevel(32, "cellular", 1),), ft),
        Rung("pipelining without microbatches", _batches(two, ((1, 1), (4, 4), (8, 8))), ft),
        Rung("control ahead", _batches(Kinder()), replace(ft, sync_s=0.0)),
        *(
            Rung(
                f"a delay of {delay_s:g} s",
                _batches(Kinder(max_delay_s=delay_s), ((4, 4), (8, 8), (16, 16))),
                ft,
            )
            for delay_s in DELAYS_S
        ),
    ]


def removed_alone(engines: Mapping[str, Gpu]) -> list[Rung]:
    """Returns variants of Orca with batches of up to 32 requests, each with one of Orca's ideas
    left out."""
    ft, orca = engines["ft"], engines["orca"]
    batches = Kinder(Prompts.OWN, is_continuous=True, leaves=True, allocates_own=True, n_batches=2)
    return [
        Rung("iteration level", _batches(batches, ((16, 16), (32, 32))), orca),
        Rung("selective batching", (IterationLevel(32, "cellular"),), orca),
        Rung("pipelining", (IterationLevel(32, "orca", 1),), orca),
        Rung("pipelining, twice the batch", (IterationLevel(64, "orca", 1),), orca),
        Rung("control ahead", (IterationLevel(32),), replace(orca, sync_s=ft.sync_s)),
        Rung("control ahead, at gRPC's price", (IterationLevel(32),), orca, CONTROL_S),
    ]


def measure(rungs: Sequence[Rung], load: Load) -> list[Worth]:
    """Runs all rungs under a load and returns the result of each."""
    trials = [
        [Trial(setup, rung.gpu, load, message_s=rung.message_s) for setup in rung.setups]
        for rung in rungs
    ]
    tops = iter(on_all_cores(highest, [trial for one in trials for trial in one]))
    tried = []
    for one in trials:
        by_top = sorted(((next(tops), trial) for trial in one), key=_first, reverse=True)
        tried.append([by_top[0], *(pair for pair in by_top[1:] if _is_tried(pair, by_top))])
    founds = iter(on_all_cores(within, [trial for one in tried for _, trial in one]))
    result = []
    for rung, candidates in zip(rungs, tried, strict=True):
        found = max(((next(founds), trial) for _, trial in candidates), key=_first)
        top, at_top = candidates[0]
        result.append(Worth(rung.name, top, at_top.setup.size, found[0], found[1].setup.size))
    return result


def microbatches(engines: Mapping[str, Gpu], load: Load) -> list[dict[str, Any]]:
    """Returns the highest throughput of FasterTransformer for each pair of largest batch and
    microbatch, up to 16."""
    sizes = [(n, m) for n in (1, 2, 4, 8, 16) for m in (1, 2, 4, 8, 16) if m <= n]
    trials = [Trial(RequestLevel(*size), engines["ft"], load) for size in sizes]
    return [
        {"max_batch_size": n, "microbatch_size": m, "highest": round(top, 4)}
        for (n, m), top in zip(sizes, on_all_cores(highest, trials), strict=True)
    ]


def _first(pair: tuple[float, Trial]) -> float:
    return pair[0]


def _is_tried(pair: tuple[float, Trial], by_top: Sequence[tuple[float, Trial]]) -> bool:
    """Returns whether the throughput within the latency limit is computed for a batch size. It is
    computed for the `N_CANDIDATES` sizes with the highest throughputs without a limit, and for the
    smallest size."""
    smallest = min((trial for _, trial in by_top), key=lambda trial: trial.setup.max_batch_size)
    return pair in by_top[:N_CANDIDATES] or pair[1] is smallest
