"""Plots of the paper's figures from simulations, together with the paper's points."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.paper.published import FIGURE_10, Point

LARGEST_MS, LARGEST_WHOLE_MS = 2e3, 1e5
"""Upper ends of the axes of latency, in ms: latency per token, and latency of whole requests."""

STYLES = ("-", "--")

Curves = Mapping[str, Mapping[str, Sequence[Point]]]
"""Points (throughput, latency) by the part of a figure and the system."""


def figure_10(path: Path, variants: Mapping[str, Curves]) -> None:
    """Draws median normalised latency over throughput, with a plot for each model. Lines are
    simulated, with a line style for each variant of the fit; markers are the paper's points."""
    figure = Figure(figsize=(6 * len(FIGURE_10), 5), layout="constrained")
    for axes, (model, published) in zip(
        figure.subplots(1, len(FIGURE_10)), FIGURE_10.items(), strict=True
    ):
        for curves, style in zip(variants.values(), STYLES, strict=False):
            for index, (system, points) in enumerate(curves[model].items()):
                label = system if style == STYLES[0] else None
                axes.plot(*_columns(points), style, color=f"C{index}", label=label, linewidth=1)
        for index, system in enumerate(published):
            axes.plot(*_columns(published[system]), "o", color=f"C{index}", markersize=4)
        for name, style in zip(variants, STYLES, strict=False):
            axes.plot([], [], style, color="black", label=name)
        axes.plot([], [], "o", color="black", markersize=4, label="the paper")
        _finish(axes, model, "median normalised latency (ms/token)", LARGEST_MS)
    _save(figure, path, legend_of=figure.axes[0])


def figure_11(path: Path, curves: Curves) -> None:
    """Draws the median latency of whole requests over throughput, for requests of equal lengths."""
    figure = Figure(figsize=(6 * len(curves), 5), layout="constrained")
    for axes, (part, systems) in zip(figure.subplots(1, len(curves)), curves.items(), strict=True):
        for index, (system, points) in enumerate(systems.items()):
            axes.plot(*_columns(points), "-", color=f"C{index}", label=system)
        _finish(axes, f"175B, {part}", "median latency (ms)", LARGEST_WHOLE_MS)
    _save(figure, path, legend_of=figure.axes[0])


def _columns(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [point[0] for point in points], [point[1] for point in points]


def _finish(axes: Axes, title: str, latency: str, largest_ms: float) -> None:
    axes.set_yscale("log")
    axes.set_ylim(top=largest_ms)
    axes.set_xlim(left=0)
    axes.set_xlabel("throughput (requests/s)")
    axes.set_ylabel(latency)
    axes.set_title(title)
    axes.grid(visible=True, which="both", alpha=0.3)


def _save(figure: Figure, path: Path, *, legend_of: Axes) -> None:
    """Writes a figure as an image, with one legend for all its plots."""
    figure.legend(*legend_of.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
