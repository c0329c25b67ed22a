"""The effect of this project's defaults, and of optimistic admission, on the paper's schedule.

Each setting is compared with `orca(32)` or with one other setting, for the paper's lengths and the
model 175B:

- *chunks* of prompts: their effect on the times between tokens, at a rate that all settings can
  serve;
- *optimistic admission*: its effect on the throughput if clients do not know the lengths of outputs
  and set `max_tokens` to the whole context, with batches so large that memory is the limit;
- *the prefix cache*: its effect on the throughput if the first half of each prompt is one of a few
  texts;
- *the fair order*: its effect on the latency of a small client in overload, if a large client sends
  ten times as many requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.paper.beyond.loads import Load, TwoClients
from benchmarks.paper.beyond.setups import IterationLevel
from benchmarks.paper.beyond.trials import Trial, highest, on_all_cores
from benchmarks.paper.gpu_costs import Gpu
from simulator.outcome import percentile
from simulator.workload import Lengths

PACE_PART = 0.8
"""Rate of arrivals at which times between tokens are compared, as a share of the highest throughput
of Orca with batches of up to 32 requests."""
CHUNKS = (512, 256, 128)
CONTEXTS = (640, 2048)
"""Sequence lengths in tokens that clients set: the longest request of the paper's trace, and the
context of the paper's models."""
LARGE_BATCH = 256
"""Largest number of requests in an iteration, so large that K/V memory is the limit."""
N_BEGINNINGS = 10
SMALL_PART, TIMES = 0.12, 10
"""The small client's rate of arrivals as a share of the highest throughput, and the ratio of the
large client's rate to the small client's. Both rates together are 1.32 of the highest
throughput."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The highest throughput of a setup, and its times between tokens in ms."""

    name: str
    highest: float
    """Highest throughput in requests per second."""
    p99_gap_ms: float
    longest_gap_ms: float
    p99_first_token_ms: float
    median_per_token_ms: float


def pace(name: str, trial: Trial, rate: float) -> Pace:
    """Returns the highest throughput of a setup, and its times between tokens at `rate` requests
    per second."""
    outcome = trial.outcome(rate)
    return Pace(
        name,
        trial.highest(),
        1e3 * outcome.p99_gap_s,
        1e3 * max(outcome.gaps_s),
        1e3 * outcome.p99_ttft_s,
        1e3 * outcome.median_normalised_s,
    )


def chunks(gpu: Gpu, load: Load) -> list[Pace]:
    """Returns the times between tokens if prompts are computed whole, and for each size of
    chunks."""
    whole = IterationLevel()
    setups = {"whole prompts": whole} | {
        f"at most {n} tokens": replace(whole, policy="chunked", max_batch_tokens=n) for n in CHUNKS
    }
    trials = [Trial(setup, gpu, load) for setup in setups.values()]
    rate = PACE_PART * trials[0].highest()
    return on_all_cores(pace, list(setups), trials, [rate] * len(trials))


def memory(gpu: Gpu, load: Load) -> list[dict[str, Any]]:
    """Returns the highest throughput of each kind of admission, for each sequence length that
    clients set. The last row is for clients that know the lengths of their outputs."""
    large = IterationLevel(LARGE_BATCH, "chunked")
    rows: list[tuple[str, int | None, Trial]] = []
    for context in CONTEXTS:
        unknown = replace(load, context=context)
        rows.append(("reserves what is asked for", context, Trial(large, gpu, unknown)))
        lent = replace(large, is_optimistic=True)
        rows.append(("optimistic", context, Trial(lent, gpu, unknown)))
    rows.append(("knows lengths", None, Trial(large, gpu, load)))
    founds = on_all_cores(admitted, [trial for _, _, trial in rows])
    return [
        {"admission": name, "max_sequence_len": context, **found}
        for (name, context, _), found in zip(rows, founds, strict=True)
    ]


def admitted(trial: Trial) -> dict[str, float]:
    """Returns the highest throughput in requests per second, and the mean number of requests in an
    iteration."""
    return {
        "highest": round(trial.highest(), 3),
        "mean_batch_size": round(trial.outcome(None).mean_batch_size, 1),
    }


def prefixes(gpu: Gpu, load: Load) -> dict[str, float]:
    """Returns the highest throughputs with and without a prefix cache, and their ratio. The first
    half of each prompt is the beginning of one of `N_BEGINNINGS` texts."""
    shared = replace(load, n_beginnings=N_BEGINNINGS)
    setups = [IterationLevel(32, "chunked", has_prefix_cache=has) for has in (False, True)]
    trials = [Trial(setup, gpu, shared) for setup in setups]
    without, with_cache = on_all_cores(highest, trials)
    return {"without": without, "with": with_cache, "ratio": with_cache / without}


def fairness(gpu: Gpu, lengths: Sequence[Lengths]) -> dict[str, float]:
    """Returns the p99 of the small client's latency in ms per token in three cases: alone, and
    together with the large client in the `fcfs` and in the `fair` order."""
    clients = TwoClients(tuple(lengths), TIMES)
    fcfs = Trial(IterationLevel(32, "chunked"), gpu, Load(clients.lengths))
    fair = replace(fcfs, setup=IterationLevel(32, "chunked", order="fair"))
    rate = SMALL_PART * fcfs.highest()
    ways = {"alone": (fcfs, False), "fcfs": (fcfs, True), "fair": (fair, True)}
    found = on_all_cores(
        small_p99_ms,
        [trial for trial, _ in ways.values()],
        [clients] * len(ways),
        [rate] * len(ways),
        [both for _, both in ways.values()],
    )
    return dict(zip(ways, found, strict=True))


def small_p99_ms(trial: Trial, clients: TwoClients, rate: float, both: bool) -> float:
    """Returns the p99 of the small client's latency in ms per token. With `both`, the large client
    sends requests too."""
    outcome = trial.serve(clients.arrivals(rate, both=both))
    return 1e3 * percentile(
        [one.normalised_s for one in outcome.requests if one.account == "small"], 99
    )


def measure(gpu: Gpu, load: Load) -> Mapping[str, Any]:
    """Returns the results of all comparisons of this module."""
    return {
        "chunks": chunks(gpu, load),
        "memory": memory(gpu, load),
        "prefixes": prefixes(gpu, load),
        "fairness": fairness(gpu, load.lengths),
    }
