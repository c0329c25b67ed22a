"""The systems on published production traces, and with the model of Table 1 for which the paper has
no figure of throughput.

Latencies per token are not comparable between traces, since outputs may be short and prompts long.
So the latency limit on each trace is a multiple of the latency of `orca(32)` for one request at a
time. The multiple is chosen so that the limit on the paper's trace is the paper's, 190 ms.

Prompts are up to fifty times as long as the prompts in Figure 9. The engines have the costs of the
fit in which attention of prompts takes no time. In the other fit, attention takes a time that grows
with the square of the length, as in a kernel without matrix units. No engine would use such a
kernel for long prompts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.paper.beyond.limits import shortest_s
from benchmarks.paper.beyond.loads import Load
from benchmarks.paper.beyond.setups import IterationLevel, RequestLevel, Setup
from benchmarks.paper.beyond.trials import Trial, on_all_cores
from benchmarks.paper.faster_transformer import Kinder, Prompts
from benchmarks.paper.fit import SUMS_S, batch_s
from benchmarks.paper.gpu_costs import Gpu, GpuCosts
from benchmarks.paper.models import MODELS
from benchmarks.paper.published import BATCH_SIZES
from simulator.published_traces import PUBLISHED

CONTEXT = 8192
"""Context of the model in tokens, which is assumed to be large enough for the traces.
FasterTransformer allocates K/V memory for this length for each request."""
ALONE_PER_S = 1e-3
"""Rate of arrivals, in requests per second, so low that requests never run at the same time."""
LIMIT_OF_ALONE = 3.5
"""The latency limit, as a multiple of the median latency per token of a request that runs alone. In
the paper, these two are 190 ms and 55 ms."""
MAX_SEQUENCE_LEN = 2048
"""Length of sequences, in tokens, for which FasterTransformer allocates K/V memory in Figure 9."""

KIND = Kinder(Prompts.OWN, is_continuous=True, leaves=True)
"""A FasterTransformer without padding that returns each token after its iteration and stops
computing requests that have ended."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The results of a system on a trace: the highest throughput, and the throughput `within` the
    latency limit, both in requests per second."""

    trace: str
    system: str
    highest: float
    within: float
    p99_gap_ms: float
    """99th percentile of the time between tokens in ms, if all requests arrive at once."""


@dataclass(frozen=True, slots=True)
class System:
    """A setup and the engine that it runs on."""

    setup: Setup
    engine: str
    knows: bool = True
    """Whether clients know the lengths of their outputs, as in the paper's trace. Otherwise clients
    set the largest length that the context allows. FasterTransformer always allocates memory for
    the whole context."""


SYSTEMS: Mapping[str, System] = {
    "ft(1,1)": System(RequestLevel(1, 1, max_sequence_len=CONTEXT), "ft"),
    "kinder(4,4)": System(RequestLevel(4, 4, KIND, max_sequence_len=CONTEXT), "ft"),
    "orca(32)": System(IterationLevel(), "orca"),
    "orca(32), lengths unknown": System(IterationLevel(), "orca", knows=False),
    "chunked(32), optimistic, unknown": System(
        IterationLevel(32, "chunked", is_optimistic=True), "orca", knows=False
    ),
}
"""Systems by name. With this context, FasterTransformer has memory for six requests, but is fastest
with batches of one: a batch first computes as many tokens of each prompt as the shortest prompt
has, and then computes the rest of longer prompts one token at a time."""


def measure(engines: Mapping[str, Gpu], n_requests: int, seed: int) -> dict[str, Any]:
    """Returns the results of all systems on all traces, and for each trace the upper bound on the
    throughput in requests per second."""
    loads = {
        name: Load(trace.lengths(n_requests, seed=seed), trace.variation, seed=seed)
        for name, trace in PUBLISHED.items()
    }
    cases = [(trace, system) for trace in loads for system in SYSTEMS]
    trials = [_trial(SYSTEMS[system], engines, loads[trace]) for trace, system in cases]
    traces, systems = zip(*cases, strict=True)
    alone = [replace(trial, setup=IterationLevel(), gpu=engines["orca"]) for trial in trials]
    rows = on_all_cores(elsewhere, list(traces), list(systems), trials, alone)
    bounds = {
        name: n_requests
        / shortest_s(load.lengths, MODELS["175B"], engines["orca"], max_batch_size=32)
        for name, load in loads.items()
    }
    return {"systems": rows, "bound": bounds}


def _trial(system: System, engines: Mapping[str, Gpu], load: Load) -> Trial:
    known = load if system.knows else replace(load, context=CONTEXT)
    return Trial(system.setup, engines[system.engine], known)


def elsewhere(trace: str, system: str, trial: Trial, alone: Trial) -> Elsewhere:
    """Returns the results of a system on a trace. The latency limit is `LIMIT_OF_ALONE` times the
    latency of the trial `alone` at a very low rate."""
    limit_s = LIMIT_OF_ALONE * alone.outcome(ALONE_PER_S).median_normalised_s
    return Elsewhere(
        trace,
        system,
        trial.highest(),
        trial.within(limit_s),
        1e3 * trial.outcome(None).p99_gap_s,
    )


def thirteen(engines: Mapping[str, Gpu]) -> list[dict[str, Any]]:
    """Returns the predicted time in ms of each batch of Figure 9a, whose model is 13B. No number
    could be read from that figure. A time is None if memory is too small."""
    model = MODELS["13B"]
    # 13B runs on one GPU, so there are no sums over GPUs.
    one_gpu = {name: replace(gpu, layer_s=gpu.layer_s - SUMS_S) for name, gpu in engines.items()}
    return [
        {
            "engine": engine,
            "n_prompt": n_prompt,
            "ms": [
                round(1e3 * batch_s(GpuCosts(model, gpu), size, n_prompt))
                if engine == "orca" or size * MAX_SEQUENCE_LEN <= model.n_slots
                else None
                for size in BATCH_SIZES
            ],
        }
        for engine, gpu in one_gpu.items()
        for n_prompt in (32, 128)
    ]
