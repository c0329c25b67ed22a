"""Draws attention_items.png: how the attention of a mixed batch becomes one launch.

    python docs/images/attention_items.py

The items are those that the planner itself makes of the batch below, for a small device, so that
there are few enough to draw.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Polygon, Rectangle

from kernels.ops import Ints
from kernels.triton.attention_plan import Column, Cut, cut_batch
from kernels.triton.tuning import Tiles
from kernels.upload import Uploads

SPANS = {  # tokens stored before, tokens in the batch
    "A": (2999, 1),
    "B": (299, 1),
    "C": (499, 1),
    "D": (640, 48),
    "E": (0, 96),
}
COLOURS = {"A": "#4c72b0", "B": "#dd8452", "C": "#8172b3", "D": "#55a868", "E": "#c44e52"}
N_HEADS, N_KV_HEADS, BLOCK_SIZE = 32, 8, 16
GROUP_SIZE = N_HEADS // N_KV_HEADS
N_MULTIPROCESSORS = 16
SMALL = Tiles(rows=16, keys=64, n_warps=4, n_stages=3)
LARGE = Tiles(rows=128, keys=64, n_warps=8, n_stages=2)
CUT = Cut(
    SMALL,
    LARGE,
    GROUP_SIZE,
    small_shares=4 * N_MULTIPROCESSORS / N_KV_HEADS,
    large_shares=2 * N_MULTIPROCESSORS / N_KV_HEADS,
)
INK, FAINT = "#333333", "#d9d9d9"


def items() -> Ints:
    """Returns the planner's items of the batch, [n_items, columns of `Column`], in the planner's
    order."""
    starts, counts = np.array(list(SPANS.values()), np.int64).T.copy()
    n_blocks = -(-int((starts + counts).max()) // BLOCK_SIZE)
    planned = cut_batch(
        starts,
        counts,
        block_tables=np.zeros((len(SPANS), n_blocks), np.int64),
        block_size=BLOCK_SIZE,
        windows=(None,),
        cut=CUT,
        uploads=Uploads(),
        has_fixed_shape=False,
    )
    table: torch.Tensor = planned.items
    return table.numpy().astype(np.int64)


def names_of(table: Ints) -> list[str]:
    """Returns a name for each item: its span, and its number among the span's items."""
    spans = list(SPANS)
    names = [""] * len(table)
    for index, name in enumerate(spans):
        own = np.flatnonzero(table[:, Column.SPAN] == index)
        order = own[np.lexsort((table[own, Column.KEY_BEGIN], table[own, Column.POSITION]))]
        for place, item in enumerate(order):
            names[item] = name if len(order) == 1 else f"{name}{place + 1}"
    return names


def bare(axes: Axes) -> None:
    """Removes the frame and ticks of a plot."""
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(False)


def draw_batch(axes: Axes) -> None:
    """Draws the flat batch; decodes are drawn wider than in scale."""
    bare(axes)
    x = 0.0
    for name, (start, n) in SPANS.items():
        width = 20.0 if n == 1 else float(n) + 12
        kind = "decode" if n == 1 else "prompt" if start == 0 else "chunk"
        axes.add_patch(Rectangle((x, 0), width, 1, facecolor=COLOURS[name], edgecolor="white"))
        axes.text(x + width / 2, 0.5, name, color="white", ha="center", va="center", weight="bold")
        said = "1 token" if n == 1 else f"{n} tokens"
        axes.text(
            x + width / 2,
            -0.15,
            f"{kind}, {said},\n{start:,} stored" if start else f"{kind}, {said},\nnothing stored",
            ha="center",
            va="top",
            fontsize=8.5,
            color=INK,
        )
        x += width
    axes.set_xlim(-2, x + 2)
    axes.set_ylim(-1.0, 1.05)


def draw_decodes(axes: Axes, table: Ints, names: list[str]) -> None:
    """Draws decodes as bars over their keys."""
    decodes = [name for name, (_, n) in SPANS.items() if n == 1]
    for item, label in zip(table, names, strict=True):
        span = list(SPANS)[item[Column.SPAN]]
        if span not in decodes:
            continue
        y = decodes.index(span)
        begin, end = item[Column.KEY_BEGIN], item[Column.KEY_END]
        axes.add_patch(
            Rectangle(
                (begin, y - 0.32),
                end - begin,
                0.64,
                facecolor=COLOURS[span],
                edgecolor="white",
                linewidth=2,
            )
        )
        axes.text(
            (begin + end) / 2,
            y,
            label,
            color="white",
            ha="center",
            va="center",
            fontsize=9,
            weight="bold",
        )
    axes.set_yticks(range(len(decodes)), decodes)
    axes.set_ylim(len(decodes) - 0.5, -0.5)
    axes.set_xlim(0, 3040)
    axes.set_xlabel("keys")
    axes.set_title("decodes: one query, all its keys; the long one in parts", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def draw_span(axes: Axes, span: str, table: Ints, names: list[str], title: str) -> None:
    """Draws a span's queries over its keys, with the causal line."""
    start, n = SPANS[span]
    for item, label in zip(table, names, strict=True):
        if list(SPANS)[item[Column.SPAN]] != span:
            continue
        top, n_queries = item[Column.POSITION] - start, item[Column.N_QUERIES]
        begin, end = item[Column.KEY_BEGIN], item[Column.KEY_END]
        first_end = item[Column.POSITION] + 1
        axes.add_patch(
            Polygon(
                [(begin, top), (first_end, top), (end, top + n_queries), (begin, top + n_queries)],
                facecolor=COLOURS[span],
                edgecolor="white",
                linewidth=2,
            )
        )
        axes.add_patch(
            Polygon(
                [(first_end, top), (end, top), (end, top + n_queries)],
                facecolor=FAINT,
                edgecolor="white",
                linewidth=1,
            )
        )
        axes.text(
            (begin + first_end) / 2 if start else begin + (end - begin) * 0.3,
            top + n_queries * (0.5 if start else 0.72),
            label,
            color="white",
            ha="center",
            va="center",
            fontsize=9,
            weight="bold",
        )
    axes.set_xlim(0, start + n)
    axes.set_ylim(n, 0)
    axes.set_xlabel("keys")
    axes.set_ylabel("queries")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def draw_grid(axes: Axes, table: Ints, names: list[str]) -> None:
    """Draws the items in the order of the launch; the height of a bar is the item's number of
    keys."""
    n_keys = table[:, Column.KEY_END] - table[:, Column.KEY_BEGIN]
    spans = [list(SPANS)[index] for index in table[:, Column.SPAN]]
    axes.bar(range(len(table)), n_keys, 0.82, color=[COLOURS[span] for span in spans])
    axes.set_xticks(range(len(table)), names)
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("keys of the item")
    axes.set_xlim(-0.6, len(table) + 1.2)
    axes.set_ylim(0, 1.3 * n_keys.max())
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        f"one launch: {len(table)} items, the longest first, "
        f"by {N_KV_HEADS} K/V heads = {len(table) * N_KV_HEADS} programs",
        fontsize=10,
    )
    divided = [i for i in range(len(table)) if table[i, Column.PART] >= 0]
    top = float(n_keys.max())
    for item in divided:
        axes.plot([item - 0.4, item + 0.4], [1.12 * top] * 2, color=COLOURS["A"], linewidth=3)
    x = len(table) - 1.6
    axes.annotate(
        "a second, small launch combines\nthe parts of A; all other items\n"
        "write their result at once",
        xy=(divided[-1] + 0.45, 1.12 * top),
        xytext=(x, 0.98 * top),
        va="center",
        fontsize=9.5,
        color=INK,
        bbox={"boxstyle": "round,pad=0.5", "facecolor": "white", "edgecolor": COLOURS["A"]},
        arrowprops={"arrowstyle": "<|-", "color": COLOURS["A"]},
    )


def draw_tile(axes: Axes) -> None:
    """Draws the rows of a small tile: the query heads of a group, and unused rows."""
    bare(axes)
    for row in range(SMALL.rows):
        is_used = row < GROUP_SIZE
        axes.add_patch(
            Rectangle(
                (0, -row),
                5,
                0.86,
                facecolor=COLOURS["A"] if is_used else FAINT,
                edgecolor="white",
            )
        )
        if is_used:
            axes.text(
                2.5, -row + 0.42, f"head {row}", color="white", ha="center", va="center", fontsize=7
            )
    axes.text(
        5.6,
        -1.1,
        f"a decode is the {GROUP_SIZE} query heads\nthat share a K/V head:\n"
        "each key is read once for all",
        va="center",
        fontsize=9,
        color=INK,
    )
    axes.text(
        5.6,
        -8.5,
        f"the matrix unit takes {SMALL.rows} rows:\n"
        f"up to {SMALL.rows // GROUP_SIZE} tokens of a span fit\n"
        f"a small tile, {LARGE.rows // GROUP_SIZE} a large one",
        va="center",
        fontsize=9,
        color=INK,
    )
    axes.set_xlim(-0.1, 11)
    axes.set_ylim(-SMALL.rows + 0.8, 1.1)
    axes.set_title("rows of a tile", fontsize=10)


def draw_blocks(axes: Axes) -> None:
    """Draws the block table of a span, and the places of the span's blocks."""
    bare(axes)
    table = (7, 2, 11, 4)
    n_blocks = 13
    for place, block in enumerate(table):
        axes.add_patch(Rectangle((2 + 2.4 * place, 5), 2.2, 1.2, facecolor="white", edgecolor=INK))
        axes.text(3.1 + 2.4 * place, 5.6, str(block), ha="center", va="center", fontsize=9)
        axes.add_patch(
            FancyArrowPatch(
                (3.1 + 2.4 * place, 5),
                (block + 0.5, 1.75),
                arrowstyle="-|>",
                mutation_scale=10,
                color=COLOURS["A"],
            )
        )
    for block in range(n_blocks):
        is_own = block in table
        axes.add_patch(
            Rectangle(
                (block, 0.4),
                0.92,
                1.3,
                facecolor=COLOURS["A"] if is_own else FAINT,
                edgecolor="white",
            )
        )
        axes.text(
            block + 0.46,
            1.05,
            str(block),
            ha="center",
            va="center",
            fontsize=8,
            color="white" if is_own else INK,
        )
    axes.text(6.6, 6.6, "block table of A", ha="center", fontsize=9, color=INK)
    axes.text(
        6.5,
        -0.2,
        f"storage: blocks of {BLOCK_SIZE} tokens, anywhere",
        ha="center",
        va="top",
        fontsize=9,
        color=INK,
    )
    axes.set_xlim(-0.3, n_blocks + 0.3)
    axes.set_ylim(-1.2, 7.6)
    axes.set_title(f"keys of a step: {SMALL.keys}, gathered by blocks", fontsize=10)


def main() -> None:
    table = items()
    names = names_of(table)
    figure = Figure(figsize=(12.5, 11), layout="constrained")
    rows: Any = figure.subfigures(4, 1, height_ratios=(1.15, 2.6, 2.4, 2.7), hspace=0.03)
    titles = (
        "1   A batch is a row of tokens: spans of requests, side by side",
        "2   Each span is cut into items: a tile of its queries by the keys they see, or a part",
        "3   A program takes an item and a K/V head",
        "4   Within a program",
    )
    for row, title in zip(rows, titles, strict=True):
        row.suptitle(title, x=0.01, ha="left", fontsize=12, weight="bold")
    draw_batch(rows[0].subplots())
    decodes, chunk, prompt = rows[1].subplots(1, 3, width_ratios=(2.2, 1.2, 1))
    draw_decodes(decodes, table, names)
    draw_span(chunk, "D", table, names, "chunk: two tiles")
    draw_span(prompt, "E", table, names, "prompt: three tiles")
    draw_grid(rows[2].subplots(), table, names)
    tile, blocks = rows[3].subplots(1, 2, width_ratios=(1, 1.25))
    draw_tile(tile)
    draw_blocks(blocks)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=100, metadata={"Software": None})


if __name__ == "__main__":
    main()
