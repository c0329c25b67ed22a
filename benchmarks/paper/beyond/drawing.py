"""Two plots: the ladder from FasterTransformer to Orca, and systems on other traces."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.paper.beyond.elsewhere import Elsewhere
from benchmarks.paper.beyond.ladder import Worth

BAR = 0.38
"""Height of a bar, in units of the distance between rows."""
SLOWEST, FASTEST = 0.02, 10.0
"""Lower and upper end of the axis of throughput, in requests per second."""


def ladder(path: Path, rungs: Sequence[Worth], limits: Mapping[str, float]) -> None:
    """Draws the throughputs of the rungs as bars, the first rung at the top, and each of `limits`
    as a line with its name."""
    figure = Figure(figsize=(9, 5.2), layout="constrained")
    axes = figure.subplots()
    places = range(len(rungs))
    for shift, colour, label, values in (
        (-BAR / 2, "C0", "highest", [rung.highest for rung in rungs]),
        (BAR / 2, "C1", "within 190 ms per token", [rung.within for rung in rungs]),
    ):
        bars = axes.barh(
            [place + shift for place in places], values, BAR, color=colour, label=label
        )
        axes.bar_label(bars, [f"{value:.2g}" for value in values], padding=3, fontsize=8)
    for index, (name, value) in enumerate(limits.items()):
        axes.axvline(value, color="black", linestyle=("--", ":")[index], linewidth=1, label=name)
    axes.set_yticks(places, [rung.name for rung in rungs])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("throughput (requests/s), 175B")
    axes.grid(visible=True, axis="x", which="both", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4)
    _save(figure, path)


def elsewhere(path: Path, rows: Sequence[Elsewhere], bounds: Mapping[str, float]) -> None:
    """Draws the highest throughputs of the systems on each trace, and the upper bound for the
    trace."""
    figure = Figure(figsize=(5 * len(bounds), 4.2), layout="constrained")
    for index, (axes, (trace, bound)) in enumerate(
        zip(figure.subplots(1, len(bounds)), bounds.items(), strict=True)
    ):
        own = [row for row in rows if row.trace == trace]
        bars = axes.barh([row.system for row in own], [row.highest for row in own], color="C0")
        values = [f"{row.highest:.2g}" for row in own]
        over_lines = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        axes.bar_label(bars, values, padding=3, fontsize=8, bbox=over_lines)
        axes.axvline(bound, color="black", linestyle="--", linewidth=1, label="bound")
        axes.set_title(trace)
        axes.set_xscale("log")
        axes.set_xlim(SLOWEST, FASTEST)
        axes.set_xlabel("highest throughput (requests/s)")
        axes.invert_yaxis()
        axes.tick_params(labelleft=index == 0)
        axes.grid(visible=True, axis="x", alpha=0.3)
    figure.axes[-1].legend(loc="upper right")
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
