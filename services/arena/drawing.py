"""The results as a picture, with a row for each trace, a column for each figure, and bars for each
policy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from services.arena.figures import Figures, Result


@dataclass(frozen=True, slots=True)
class Column:
    """A column of plots, which shows one figure of all policies. `values` returns the values of a
    policy, each of which is drawn as a bar. If there are two, the bars are dark and light, one
    above the other."""

    title: str
    values: Callable[[Figures], tuple[float | None, ...]]
    is_logarithmic: bool = False


COLUMNS = (
    Column("output tokens/s", lambda one: (one.tokens_per_s,)),
    Column("first token, s: p50, p99", lambda one: (one.ttft_p50_s, one.ttft_p99_s), True),
    Column(
        "between tokens, ms: p50, p99",
        lambda one: (1e3 * one.gap_p50_s, 1e3 * one.gap_p99_s),
    ),
    Column("Jain's index of clients", lambda one: (one.jain,)),
    Column("policy, us a selection", lambda one: (one.select_us,)),
)
DARK, LIGHT = "#1f5f99", "#9cc3e6"
ROW_HEIGHT = 0.26


def draw(path: Path, results: Sequence[Result]) -> None:
    """Draws the results as a picture, and writes the picture as a PNG file."""
    traces = [list(found) for _, found in groupby(results, key=lambda one: one.trace)]
    n_bars = max(len(found) for found in traces)
    figure = Figure(
        figsize=(3.0 * len(COLUMNS), (0.9 + ROW_HEIGHT * n_bars) * len(traces)),
        layout="constrained",
    )
    rows = figure.subplots(len(traces), len(COLUMNS), squeeze=False, sharey="row")
    for found, row in zip(traces, rows, strict=True):
        for column, axes in zip(COLUMNS, row, strict=True):
            _plot(axes, column, found)
        row[0].set_yticks(range(len(found)), [_name(one) for one in found], fontsize=8)
        row[0].invert_yaxis()
        row[0].set_ylabel(found[0].trace)
    for column, axes in zip(COLUMNS, rows[0], strict=True):
        axes.set_title(column.title, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _name(result: Result) -> str:
    name = result.entrant if result.way == "virtual" else f"{result.entrant} ({result.way})"
    return name if result.figures is not None else f"{name}: stopped"


def _plot(axes: Axes, column: Column, found: Sequence[Result]) -> None:
    for place, result in enumerate(found):
        values = () if result.figures is None else column.values(result.figures)
        for index, value in enumerate(values):
            if value:
                shift = 0.2 * (2 * index - 1) if len(values) > 1 else 0.0
                height = 0.8 / len(values)
                axes.barh(place + shift, value, height, color=LIGHT if index else DARK)
    if column.is_logarithmic and any(axes.patches):
        axes.set_xscale("log")
    axes.tick_params(axis="x", labelsize=7)
    axes.grid(visible=True, axis="x", alpha=0.3)
