"""`python -m benchmarks.paper`: fits Figure 9, predicts Figures 10 and 11, and draws them."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.machine import ROOT
from benchmarks.paper import drawing
from benchmarks.paper.fit import ALL_PAIRS, NO_PAIRS, errors, fit, rms
from benchmarks.paper.gpu_costs import Gpu
from benchmarks.paper.published import (
    FIGURE_10,
    HEADLINE_MS_PER_TOKEN,
    HEADLINE_PER_S,
    Point,
)
from benchmarks.paper.sweep import Run, latency_at, run_all, throughput_at
from simulator.workload import Lengths, equal_lengths, mixed_lengths

IMAGES = ROOT / "docs" / "images"
RESULTS = ROOT / "benchmarks" / "results" / "paper.json"

SYSTEMS_10 = {
    "orca(32)": (0.14, 0.4, 0.8, 1.5, 2.5, 4.0, 5.0, 6.0, 6.5, 7.0, 8.0, 10.0),
    "orca(16)": (0.14, 0.4, 0.8, 1.5, 2.5, 4.0, 4.5, 5.0, 6.0),
    "orca(8)": (0.14, 0.4, 0.8, 1.5, 2.0, 2.5, 3.0, 3.5, 4.5),
    "orca(1)": (0.14, 0.25, 0.4, 0.45, 0.5, 0.55, 0.6, 0.8),
    "ft(1,1)": (0.05, 0.085, 0.12, 0.15, 0.18, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7),
    "ft(8,8)": (0.05, 0.085, 0.12, 0.15, 0.18, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7),
    "cellular(32)": (0.14, 0.25, 0.4, 0.5, 0.6, 0.8, 1.2),
}
"""Arrival rates in requests per second for each system of Figure 10, and for BatchMaker's system
(`cellular`). The rates of each system go from almost idle to overloaded."""

SYSTEMS_11 = ("orca(32)", "orca(8)", "orca(1)", "ft(1,1)", "ft(8,4)", "ft(8,8)", "ft(16,8)")
N_RATES_11 = 14
"""Number of arrival rates at which each of `SYSTEMS_11`, the systems of Figure 11, is run."""

HOMOGENEOUS = ((32, 32), (256, 256))
"""(Prompt tokens, output tokens) of all requests in each part of Figure 11."""


def figure_10(lengths: tuple[Lengths, ...], engines: dict[str, Gpu]) -> dict[str, Any]:
    """Returns the points (throughput, latency) of Figure 10 by model and system."""
    runs = [
        Run(model, system, rate, lengths)
        for model in FIGURE_10
        for system, rates in SYSTEMS_10.items()
        for rate in rates
    ]
    # By Algorithm 1, one stage has one batch in flight. The paper's points look like two batches.
    runs += [
        Run("101B", "orca(32)", rate, lengths, n_in_flight=2) for rate in SYSTEMS_10["orca(32)"]
    ]
    curves: dict[str, dict[str, list[Point]]] = {model: {} for model in FIGURE_10}
    for one, point in zip(runs, run_all(runs, engines), strict=True):
        name = one.system if one.n_in_flight is None else f"{one.system}, two in flight"
        curves[one.model].setdefault(name, []).append(point)
    return curves


def compare(curves: Mapping[str, Mapping[str, Sequence[Point]]]) -> list[dict[str, Any]]:
    """Returns each point of the paper with two predictions, each divided by the paper's value: the
    throughput at the point's latency, and the latency at the point's throughput."""
    return [
        {
            "model": model,
            "system": system,
            "paper": point,
            "throughput": _part(throughput_at(curves[model][system], point[1]), point[0]),
            "latency": _part(latency_at(curves[model][system], point[0]), point[1]),
        }
        for model, systems in FIGURE_10.items()
        for system, points in systems.items()
        for point in points
    ]


def headline(curves: Mapping[str, Sequence[Point]]) -> dict[str, float]:
    """Returns the throughputs of Orca and FasterTransformer for 175B at the latency in the paper's
    abstract, and their ratio."""
    found = {
        system: throughput_at(curves[system], HEADLINE_MS_PER_TOKEN) or 0.0
        for system in HEADLINE_PER_S
    }
    orca, ft = found.values()
    return {**found, "ratio": orca / ft if ft else float("inf")}


def figure_11(engines: dict[str, Gpu], n_requests: int) -> dict[str, dict[str, list[Point]]]:
    """Returns the points of Figure 11, for 175B, by the lengths of the requests and the system.
    Latencies are of whole requests, in ms."""
    runs = []
    for n_prompt, n_output in HOMOGENEOUS:
        lengths = equal_lengths(n_requests, n_prompt=n_prompt, n_output=n_output)
        top = 60.0 if n_output == 32 else 6.0
        runs += [
            Run("175B", system, top * 2.0 ** (-step / 1.6), lengths)
            for system in SYSTEMS_11
            for step in reversed(range(N_RATES_11))
        ]
    curves: dict[str, dict[str, list[Point]]] = {}
    for one, (throughput, per_token_ms) in zip(runs, run_all(runs, engines), strict=True):
        n_output = one.lengths[0].n_output
        part = f"{one.lengths[0].n_prompt} and {n_output} tokens"
        points = curves.setdefault(part, {}).setdefault(one.system, [])
        points.append((throughput, n_output * per_token_ms))
    return curves


def _part(found: float | None, reported: float) -> float | None:
    return None if found is None else round(found / reported, 3)


def main() -> None:
    """Parses the command line, predicts the figures with both fits, and writes the record and the
    plots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=700, help="in each trace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="file for the figures, JSON")
    parser.add_argument("--images", type=Path, default=IMAGES, help="folder for the plots")
    options = parser.parse_args()

    about = machine.describe()  # first, since written files would make the working tree differ
    variants = {
        kind: predict(fit(kind), options.requests, options.seed) for kind in (NO_PAIRS, ALL_PAIRS)
    }
    for name, found in variants.items():
        print(f"{name}\n" + "\n".join(lines_of(found)))
    drawing.figure_10(
        options.images / "paper_figure_10.png",
        {name: found["figure_10"] for name, found in variants.items()},
    )
    drawing.figure_11(options.images / "paper_figure_11.png", variants[ALL_PAIRS]["figure_11"])
    record = {**about, "variants": variants}
    options.out.write_text(json.dumps(record, indent=1) + "\n")


def predict(engines: dict[str, Gpu], n_requests: int, seed: int) -> dict[str, Any]:
    """Returns the predictions for Figures 9 to 11, and their ratios to the paper's points."""
    residuals = errors(engines)
    curves = figure_10(mixed_lengths(n_requests, seed=seed), engines)
    return {
        "engines": {name: asdict(gpu) for name, gpu in engines.items()},
        "figure_9": residuals,
        "figure_9_rms": rms([error for _, error in residuals]),
        "figure_10": curves,
        "compared": compare(curves),
        "headline": headline(curves["175B"]),
        "figure_11": figure_11(engines, n_requests // 3),
    }


def lines_of(found: Mapping[str, Any]) -> list[str]:
    """Returns the predictions as lines of text to print."""
    lines = [f"  Figure 9: {100 * found['figure_9_rms']:.1f} % RMS"]
    for row in found["compared"]:
        throughput, latency_ms = row["paper"]
        lines.append(
            f"  {row['model']} {row['system']:>9} {throughput:6.3f}/s {latency_ms:6.1f} ms: "
            f"throughput {row['throughput']} x, latency {row['latency']} x"
        )
    at = f"{HEADLINE_MS_PER_TOKEN:g} ms per token"
    return [*lines, f"  175B at {at}: {found['headline']}"]


if __name__ == "__main__":
    main()
