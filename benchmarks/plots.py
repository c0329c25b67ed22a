"""Plots of measurements: latency over throughput, and rankings of settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

MARKERS = "os^Dvp*X"


@dataclass(frozen=True, slots=True)
class Point:
    """The results of one run that a plot shows."""

    requests_per_s: float
    median_s: float
    """Median normalised latency of the run, in seconds per token."""


def draw_latency(
    path: Path, lines: Mapping[str, Sequence[Point]], *, title: str, bound_s: float | None = None
) -> None:
    """Draws median normalised latency over throughput, as the paper does, with a line for each
    name."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for index, (name, points) in enumerate(lines.items()):
        axes.plot(
            [point.requests_per_s for point in points],
            [1e3 * point.median_s for point in points],
            marker=MARKERS[index % len(MARKERS)],
            label=name,
        )
    if bound_s is not None:
        axes.axhline(1e3 * bound_s, color="grey", linestyle=":", linewidth=1)
    axes.set_yscale("log")
    axes.set_xlim(left=0)
    axes.set_xlabel("throughput (requests/s)")
    axes.set_ylabel("median normalised latency (ms/token)")
    axes.set_title(title, fontsize=10)
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


@dataclass(frozen=True, slots=True)
class Ranking:
    """The values that one subject reaches with many settings, and with a few settings that have
    names."""

    values: Sequence[float]
    named: Mapping[str, float]


def draw_rankings(path: Path, rankings: Mapping[str, Ranking], *, title: str) -> None:
    """Draws a row for each subject, with the values of all its settings divided by the best value.
    Settings that have names are marked."""
    figure = Figure(figsize=(7, 1.2 + 0.8 * len(rankings)), layout="constrained")
    axes = figure.subplots()
    for row, ranking in enumerate(rankings.values()):
        best = max((*ranking.values, *ranking.named.values())) or 1.0
        axes.scatter(
            [value / best for value in ranking.values],
            [row] * len(ranking.values),
            color="lightgrey",
            label="a setting of the grid" if row == 0 else None,
        )
        for index, (name, value) in enumerate(ranking.named.items()):
            axes.scatter(
                [value / best],
                [row],
                marker=MARKERS[index % len(MARKERS)],
                color=f"C{index}",
                label=name if row == 0 else None,
            )
    axes.set_yticks(range(len(rankings)), list(rankings))
    axes.set_ylim(-0.5, len(rankings) - 0.5)
    axes.set_xlabel("of the best")
    axes.set_title(title, fontsize=10)
    axes.grid(visible=True, axis="x", alpha=0.3)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
