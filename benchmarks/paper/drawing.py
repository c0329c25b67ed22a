"""The paper's figures, drawn from the simulation beside what the paper reports."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.paper.published import FIGURE_10, Point

LARGEST_MS = 2000.0


def figure_10(path: Path, curves: Mapping[str, Mapping[str, Sequence[Point]]]) -> None:
    """Draws median normalised latency over throughput, a part for each model: lines are simulated,
    markers are the paper's points."""
    figure = Figure(figsize=(6 * len(curves), 5), layout="constrained")
    for axes, (model, systems) in zip(figure.subplots(1, len(curves)), curves.items(), strict=True):
        for index, (system, points) in enumerate(systems.items()):
            _line(axes, system, points, colour=f"C{index}")
            paper = FIGURE_10[model].get(system, ())
            axes.plot(*_columns(paper), "o", color=f"C{index}", markersize=4)
        _finish(axes, model)
    _save(figure, path)


def figure_11(path: Path, curves: Mapping[str, Mapping[str, Sequence[Point]]]) -> None:
    """Draws median normalised latency over throughput for requests that are all alike."""
    figure = Figure(figsize=(6 * len(curves), 5), layout="constrained")
    for axes, (part, systems) in zip(figure.subplots(1, len(curves)), curves.items(), strict=True):
        for index, (system, points) in enumerate(systems.items()):
            _line(axes, system, points, colour=f"C{index}")
        _finish(axes, f"175B, {part}")
    _save(figure, path)


def _line(axes: Axes, system: str, points: Sequence[Point], *, colour: str) -> None:
    axes.plot(*_columns(points), "-", color=colour, label=system)


def _columns(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [point[0] for point in points], [point[1] for point in points]


def _finish(axes: Axes, title: str) -> None:
    axes.set_yscale("log")
    axes.set_ylim(top=LARGEST_MS)
    axes.set_xlim(left=0)
    axes.set_xlabel("throughput (requests/s)")
    axes.set_ylabel("median normalised latency (ms/token)")
    axes.set_title(title)
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(fontsize=8)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
