"""The plots: the results of each kind of site, over the number of pipelines."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.placement.figures import Figures
from benchmarks.plots import MARKERS

Curves = Mapping[str, Mapping[int, Figures]]
"""Results by the name of a site and the number of pipelines."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of plots: its title, and the result that it shows."""

    title: str
    value: Callable[[Figures, int], float]
    is_overload: bool
    is_logarithmic: bool = False


COLUMNS = (
    Column("first token, median (s)", lambda one, _: one.ttft_p50_s, False, True),
    Column("first token, p99 (s)", lambda one, _: one.ttft_p99_s, False, True),
    Column("part of prompts in caches", lambda one, _: one.hit_rate, False),
    Column(
        "overload: tokens/s of each pipeline",
        lambda one, n_pipelines: one.tokens_per_s / n_pipelines,
        True,
    ),
    Column("overload: Jain's index of clients", lambda one, _: one.jain, True),
)


def draw(path: Path, steady: Mapping[str, Curves], overload: Mapping[str, Curves]) -> None:
    """Draws a row of plots for each load, with a line for each kind of site."""
    figure = Figure(figsize=(3.4 * len(COLUMNS), 2.7 * len(steady)), layout="constrained")
    rows = figure.subplots(len(steady), len(COLUMNS), squeeze=False)
    for load, row in zip(steady, rows, strict=True):
        for column, axes in zip(COLUMNS, row, strict=True):
            _plot(axes, column, (overload if column.is_overload else steady)[load])
        row[0].set_ylabel(load)
    for column, axes in zip(COLUMNS, rows[0], strict=True):
        axes.set_title(column.title, fontsize=10)
    for axes in rows[-1]:
        axes.set_xlabel("pipelines")
    handles, labels = rows[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=len(labels), loc="outside lower center")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _plot(axes: Axes, column: Column, curves: Curves) -> None:
    counts: Sequence[int] = ()
    for index, (site, by_count) in enumerate(curves.items()):
        counts = list(by_count)
        values = [column.value(one, n) for n, one in by_count.items()]
        axes.plot(counts, values, marker=MARKERS[index], label=site, linewidth=1.5, markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(n) for n in counts])
    if column.is_logarithmic:
        axes.set_yscale("log")
    axes.grid(visible=True, which="both", alpha=0.3)
