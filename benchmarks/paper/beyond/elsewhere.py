"""The systems on other lengths: those of published traces of production, and the model of Table 1
that has no figure of throughput.

Latencies per token are not comparable where outputs are short and prompts are long. So the limit
is what the paper's 190 ms are to its own trace: a multiple of what orca(32) takes for one request
after the other.

Prompts are up to fifty times as long as any in Figure 9. So the engines are those of the fit in
which attention of prompts takes no time: the other would have it grow with the square, from a
kernel without matrix units that nobody would use for such prompts.
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
"""Tokens of a sequence that the model is taken to hold, as the traces need it; FasterTransformer
has memory for so many for each request."""
ALONE_PER_S = 1e-3
"""A rate so low that requests never run at the same time."""
LIMIT_OF_ALONE = 3.5
"""The limit of latency divided by the median latency per token of a request that runs alone: in the
paper 190 ms and 55 ms."""
MAX_SEQUENCE_LEN = 2048
"""Tokens for which FasterTransformer has memory in Figure 9."""

KIND = Kinder(Prompts.OWN, is_continuous=True, leaves=True)
"""No padding, continuous delivery, and completed requests are not computed."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A system on a trace: throughputs in requests a second."""

    trace: str
    system: str
    highest: float
    within: float
    p99_gap_ms: float
    """99th percentile of the time between tokens, if all requests arrive at once."""


@dataclass(frozen=True, slots=True)
class System:
    """A setup on its engine."""

    setup: Setup
    engine: str
    knows: bool = True
    """Whether clients know how long outputs will be, as in the paper's trace, or name the context.
    FasterTransformer allocates for the context in any case."""


SYSTEMS: Mapping[str, System] = {
    "ft(1,1)": System(RequestLevel(1, 1, max_sequence_len=CONTEXT), "ft"),
    "kinder(4,4)": System(RequestLevel(4, 4, KIND, max_sequence_len=CONTEXT), "ft"),
    "orca(32)": System(IterationLevel(), "orca"),
    "orca(32), lengths unknown": System(IterationLevel(), "orca", knows=False),
    "chunked(32), optimistic, unknown": System(
        IterationLevel(32, "chunked", is_optimistic=True), "orca", knows=False
    ),
}
"""Systems by name. With this context FasterTransformer has memory for six requests, and is fastest
with one: a batch takes the tokens one by one by which its longest prompt exceeds its shortest."""


def measure(engines: Mapping[str, Gpu], n_requests: int, seed: int) -> dict[str, Any]:
    """Returns the systems on all traces, and the bound on each."""
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
    """Returns the results of a system on a trace. `alone` is the trial whose latency at a low rate
    sets the limit."""
    limit_s = LIMIT_OF_ALONE * alone.outcome(ALONE_PER_S).median_normalised_s
    return Elsewhere(
        trace,
        system,
        trial.highest(),
        trial.within(limit_s),
        1e3 * trial.outcome(None).p99_gap_s,
    )


def thirteen(engines: Mapping[str, Gpu]) -> list[dict[str, Any]]:
    """Returns the times of batches of 13B in ms as in Figure 9a, of which no number could be read;
    None where there is no memory."""
    model = MODELS["13B"]
    # Nothing is added up over GPUs.
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
