"""Draws the figures of the GPU benchmark."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.gpu.bench import EAGER, GRAPHS, INT8, OURS, Row
from benchmarks.gpu.report import WITH_HOST
from benchmarks.gpu.section import Outcome

COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple")
MAX_CASES = 40
"""Largest number of cases in a bar chart. If there are more, only the first are drawn."""


def draw(path: Path, outcomes: Mapping[str, Outcome], meta: Mapping[str, Any]) -> None:
    """Draws one picture: kernels and decodes compared with their floors, and the throughput of the
    workload."""
    figure = Figure(figsize=(14, 15), layout="constrained")
    axes = figure.subplots(2, 2, height_ratios=(2, 1))
    figure.suptitle(f"{meta['device']['name']}, operations: {meta['operations']}")
    _shares(axes[0, 0], _rows(outcomes, "attention"), "attention: floor / time")
    _shares(axes[0, 1], _rows(outcomes, "operations"), "other operations: floor / time")
    _steps(axes[1, 0], [*_rows(outcomes, "engine"), *_rows(outcomes, "transformers")])
    _throughput(axes[1, 1], [*_rows(outcomes, "serving"), *_rows(outcomes, "transformers")])
    figure.savefig(path, dpi=110)


def _rows(outcomes: Mapping[str, Outcome], name: str) -> Sequence[Row]:
    return [row for row in outcomes[name].rows if "seconds" in row] if name in outcomes else []


def _shares(axes: Axes, rows: Sequence[Row], title: str) -> None:
    """Draws a bar for each case and version: the floor divided by the measured time."""
    cases = list(dict.fromkeys(row["case"] for row in rows))[:MAX_CASES]
    versions = list(dict.fromkeys(row["version"] for row in rows))
    height = 0.8 / max(len(versions), 1)
    for index, version in enumerate(versions):
        own = [row for row in rows if row["version"] == version and row["case"] in cases]
        axes.barh(
            [cases.index(row["case"]) + (index + 0.5) * height - 0.4 for row in own],
            [row.get("of_floor", 0.0) for row in own],
            height,
            color=COLOURS[index % len(COLOURS)],
            edgecolor="white",
            hatch=["" if row.get("is_graph") else "///" for row in own],
        )
    axes.set_yticks(range(len(cases)), cases, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1, color="grey", linestyle=":", linewidth=1)
    axes.set_title(f"{title} (hatched: {WITH_HOST})", fontsize=10)
    axes.margins(y=0.01)
    if versions:
        axes.legend(
            handles=[
                Patch(color=COLOURS[index % len(COLOURS)], label=version)
                for index, version in enumerate(versions)
            ],
            loc="upper center",
            bbox_to_anchor=(0.5, -0.03),
            fontsize=8,
            ncols=4,
            frameon=False,
        )


def _steps(axes: Axes, rows: Sequence[Row]) -> None:
    """Draws the milliseconds of a decode iteration over the batch size: a line for each context
    with its floor, and markers for other versions."""
    decodes = [row for row in rows if "batch" in row]
    contexts = sorted({row["context"] for row in decodes})
    styles = {
        GRAPHS: ("-", "o"),
        EAGER: ("none", "x"),
        INT8: ("none", "s"),
        "generate": ("none", "^"),
    }
    for context, colour in zip(contexts, COLOURS, strict=False):
        for version, (line, marker) in styles.items():
            own = sorted(
                (row["batch"], row["seconds"], row.get("floor_s"))
                for row in decodes
                if row["context"] == context and row["version"] == version
            )
            if not own:
                continue
            batches, times, floors = zip(*own, strict=True)
            label = f"{version.removeprefix(f'{OURS}, ')}, context {context}"
            axes.plot(
                batches,
                [1e3 * each for each in times],
                linestyle=line,
                marker=marker,
                color=colour,
                label=label,
            )
            if version == GRAPHS and None not in floors:
                axes.plot(
                    batches,
                    [1e3 * each for each in floors],
                    linestyle=":",
                    color=colour,
                    label=f"floor, context {context}",
                )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("requests that decode")
    axes.set_ylabel("ms per iteration")
    axes.set_title("decodes of the whole model", fontsize=10)
    axes.grid(visible=True, which="both", alpha=0.3)
    if decodes:
        axes.legend(fontsize=7)


def _throughput(axes: Axes, rows: Sequence[Row]) -> None:
    """Draws the output tokens per second of the workload, with a bar for each version."""
    own = [row for row in rows if "output_tokens_per_s" in row]
    names = [
        row["version"] if row["version"].startswith(OURS) else f"transformers\n{row['version']}"
        for row in own
    ]
    bars = axes.barh(names, [row["output_tokens_per_s"] for row in own], color=COLOURS[0])
    axes.bar_label(bars, fmt="%.0f", fontsize=9, padding=3)
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.set_xlabel("output tokens/s")
    axes.set_title(own[0]["case"] if own else "no workload", fontsize=10)
