"""`python -m benchmarks.paper.beyond`: comparisons in virtual time that the paper does not have."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.paper.__main__ import IMAGES, RESULTS
from benchmarks.paper.beyond import defaults, drawing, elsewhere, ladder
from benchmarks.paper.beyond.limits import shortest_s
from benchmarks.paper.beyond.loads import Load
from benchmarks.paper.beyond.setups import IterationLevel
from benchmarks.paper.beyond.trials import Trial
from benchmarks.paper.fit import ALL_PAIRS, NO_PAIRS, fit
from benchmarks.paper.gpu_costs import Gpu
from benchmarks.paper.models import MODELS
from simulator.outcome import percentile
from simulator.workload import mixed_lengths

LONGER = 5
BOUNDED_BATCHES = (32, 256)
OVERLOAD = 1.2
"""Rate of arrivals at which orders of admission are compared, as a multiple of the highest
throughput of Orca with batches of up to 32 requests."""


def limits(gpu: Gpu, load: Load) -> dict[str, Any]:
    """Returns upper bounds on the throughput in requests per second, by the largest batch size.
    Also returns, for an overloaded system, the latencies in ms per token if requests are admitted
    in the order of arrival, and if the shortest ones are admitted first."""
    n_requests = len(load.lengths)
    bounds = {
        str(size): n_requests / shortest_s(load.lengths, MODELS["175B"], gpu, max_batch_size=size)
        for size in BOUNDED_BATCHES
    }
    rate = OVERLOAD * Trial(IterationLevel(), gpu, load).highest()
    latencies = {}
    for order in ("fcfs", "shortest"):
        outcome = Trial(IterationLevel(order=order), gpu, load).outcome(rate)
        per_token_ms = [1e3 * one.normalised_s for one in outcome.requests]
        latencies[order] = {
            "median": percentile(per_token_ms, 50),
            "p99": percentile(per_token_ms, 99),
        }
    return {"bounds": bounds, "overload": latencies}


def measure(n_requests: int, seed: int) -> dict[str, Any]:
    """Returns the results of all comparisons, as a dictionary for JSON."""
    engines = fit(ALL_PAIRS)
    load = Load(mixed_lengths(n_requests, seed=seed), seed=seed)
    # A system that serves hundreds of requests at a time needs a trace with more requests.
    many = Load(mixed_lengths(LONGER * n_requests, seed=seed), seed=seed)
    return {
        "ladder": ladder.measure(ladder.ladder(engines), load),
        "added alone": ladder.measure(ladder.added_alone(engines), load),
        "removed alone": ladder.measure(ladder.removed_alone(engines), load),
        "microbatches": ladder.microbatches(engines, load),
        "limits": limits(engines["orca"], many),
        "defaults": defaults.measure(engines["orca"], many),
        "traces": elsewhere.measure(fit(NO_PAIRS), n_requests, seed),
        "13B": elsewhere.thirteen(engines),
    }


def lines_of(found: Mapping[str, Any]) -> Iterator[str]:
    """Yields the results as lines of text to print."""
    for part, values in found.items():
        yield f"{part}"
        for line in _lines(values):
            yield f"  {line}"


def _lines(value: Any) -> Iterator[str]:
    match value:
        case dict():
            for name, inner in value.items():
                if isinstance(inner, dict | list):
                    yield f"{name}"
                    yield from (f"  {line}" for line in _lines(inner))
                else:
                    yield f"{name}: {_short(inner)}"
        case list():
            for inner in value:
                row = inner if isinstance(inner, dict) else dataclasses.asdict(inner)
                yield ", ".join(f"{name} {_short(each)}" for name, each in row.items())


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    """Converts a dataclass into a dictionary for JSON."""
    return dataclasses.asdict(value)


def main() -> None:
    """Parses the command line, runs all comparisons, prints the results, and writes the record and
    the plots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300, help="in each trace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=RESULTS.with_name("paper_beyond.json"), help="record, JSON"
    )
    parser.add_argument("--images", type=Path, default=IMAGES, help="folder for the plots")
    options = parser.parse_args()

    about = machine.describe()  # first, since written files would make the working tree differ
    found = measure(options.requests, options.seed)
    sys.stdout.writelines(f"{line}\n" for line in lines_of(found))
    bounds = {
        f"bound, batches of {size}": bound for size, bound in found["limits"]["bounds"].items()
    }
    drawing.ladder(options.images / "paper_ladder.png", found["ladder"], bounds)
    traces = found["traces"]
    drawing.elsewhere(options.images / "paper_traces.png", traces["systems"], traces["bound"])
    record = {**about, "found": found}
    options.out.write_text(json.dumps(record, indent=1, default=_plain) + "\n")


if __name__ == "__main__":
    main()
