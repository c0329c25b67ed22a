"""Renders the state of a pipeline at a given time as the lines of a screen, without side effects.

Each request has a colour; prefill, decode and recomputation have different glyphs. Without colours,
the first cell of each iteration shows the last digit of the request's number.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.text import Text

from services.console.console_state import ConsoleState, DrawnIteration, RequestRow, ServingPipeline
from services.console.lanes import Cell, busy_share, cells_of, window_for

GLYPHS = {"p": "█", "d": "▄", "r": "▞"}
FIRST_GLYPHS = {"p": "▐", "d": "▗", "r": "▝"}
"""Glyphs of the first cell of an iteration, by the kind of work. These glyphs show where an
iteration begins."""
IDLE = "·"
PALETTE = (39, 208, 76, 199, 220, 141, 51, 203, 112, 75, 214, 177)
"""Colours of requests, as numbers in the terminal palette of 256 colours.

The colours differ clearly on dark and on light backgrounds.
"""
KV_PARTS = (
    ("shared", "█", "color(141)"),
    ("used", "▓", "color(39)"),
    ("reserved", "░", "color(39)"),
    ("cached", "▒", "color(76)"),
    ("free", IDLE, "dim"),
)
MAX_LANES = 8
MAX_MARK_LINES = 3
MIN_WIDTH = 40
_LABEL = 9
_STATES = {"admitted": "running", "put_down": "preempted"}


@dataclass(frozen=True, slots=True)
class Screen:
    """The size of the screen, and whether it shows colours."""

    width: int = 80
    height: int = 24
    has_colour: bool = True


def lines(state: ConsoleState, screen: Screen, *, now: float) -> list[Text]:
    """Returns the lines of the screen, cut to its width and height."""
    width = max(screen.width, MIN_WIDTH)
    top = [*_header(state), *_lanes(state, screen, width=width, now=now)]
    top += [_kv_bar(state, width), _kv_legend(state), _pool(state)]
    marks = [*_marks(state)][-MAX_MARK_LINES:]
    room = screen.height - len(top) - len(marks)
    made = top + _table(state, room, screen) + marks
    for line in made:
        line.truncate(screen.width, overflow="ellipsis")
    return made[: screen.height]


def summary(state: ConsoleState) -> str:
    """Returns a summary of the state in one line, for outputs that are not a terminal."""
    return (
        f"{_count(state)}epoch {state.epoch.get('epoch', '-')}  "
        f"{state.figures['tokens_per_s']:.0f} tokens/s  "
        f"{state.n_running} running  {state.n_waiting} waiting  {state.n_in_flight} in flight  "
        f"batch {state.figures['batch_size']:.1f}  K/V {_kv_share(state):.0%}"
    )


def colour_of(number: int) -> str:
    """Returns the terminal style in which the request with the number `number` is drawn."""
    return f"color({PALETTE[number % len(PALETTE)]})"


def _header(state: ConsoleState) -> Iterator[Text]:
    epoch = state.epoch
    title = Text("Orcinus ", style="bold")
    if epoch:
        title.append(f" {epoch.get('model', '')}", style="bold")
        shape = f"{_count(state)}{epoch.get('n_stages')} stages of {epoch.get('tp_size')}"
        way = f"{epoch.get('policy', '')}, {epoch.get('order', '')}"
        title.append(f"  epoch {epoch.get('epoch')}  {shape}  {way}")
    if state.away:
        title.append(f"  {state.away}", style="bold red")
    yield title
    depth = sum(int(it.epoch.get("pipeline_depth", 0)) for it in state.pipelines.values())
    yield Text(
        f"{state.figures['tokens_per_s']:.0f} tokens/s   {state.n_running} running   "
        f"{state.n_waiting} waiting   in flight {state.n_in_flight}"
        f"{f' of {depth}' if depth else ''}   batch {state.figures['batch_size']:.1f}"
    )


def _lanes(state: ConsoleState, screen: Screen, *, width: int, now: float) -> Iterator[Text]:
    n_cells = width - _LABEL - 6
    iterations = list(state.iterations)
    window_s = window_for(iterations, n_cells)
    shown = [it for it in iterations if it.ended >= now - window_s]
    pipelines = sorted(state.pipelines.items())
    n_hidden = 0
    for place, (number, stage) in enumerate(
        (number, stage) for number, pipeline in pipelines for stage in range(pipeline.n_stages)
    ):
        if place >= MAX_LANES:
            n_hidden += 1
            continue
        if stage == 0 and len(pipelines) > 1:
            yield _heading(number, state.pipelines[number])
        line = Text(f"stage {stage}".ljust(_LABEL))
        own = [it for it in shown if it.pipeline == number]
        cells = cells_of(own, stage, end=now, window_s=window_s, n_cells=n_cells)
        drawn = [_drawn(cell, screen) for cell in cells]
        for style, run in groupby(drawn, key=lambda each: each[1]):
            line.append("".join([glyph for glyph, _ in run]), style=style)
        line.append(f" {busy_share(own, stage, end=now, window_s=window_s):4.0%}")
        yield line
    if n_hidden:
        yield Text(f"{' ' * _LABEL}and {n_hidden} stages more", style="dim")
    legend = f"{GLYPHS['p']} prefill {GLYPHS['d']} decode {GLYPHS['r']} recomputation"
    scale = f"the last {window_s:g} s"
    yield Text(f"{' ' * _LABEL}{legend.ljust(n_cells - len(scale))}{scale}", style="dim")


def _heading(number: int, pipeline: ServingPipeline) -> Text:
    """Returns the line above the lanes of a pipeline, for screens that show several pipelines."""
    text = f"  epoch {pipeline.epoch.get('epoch')}  {pipeline.n_running} running"
    text += "  draining" * bool(pipeline.epoch.get("is_draining"))
    return Text(f"pipeline {number}", style="bold").append(text, style="dim not bold")


def _count(state: ConsoleState) -> str:
    """Returns the number of pipelines as text. The text is empty if there is only one pipeline."""
    n_pipelines = len(state.pipelines)
    return f"{n_pipelines} pipelines  " if n_pipelines > 1 else ""


def _drawn(cell: Cell | None, screen: Screen) -> tuple[str, str]:
    """Returns the glyph and the style of a cell."""
    if cell is None:
        return IDLE, "dim"
    glyph = _glyph(cell.iteration, is_first=cell.is_first, screen=screen)
    return glyph, colour_of(cell.iteration.request)


def _glyph(iteration: DrawnIteration, *, is_first: bool, screen: Screen) -> str:
    if is_first and not screen.has_colour:
        return str(iteration.request % 10)
    return (FIRST_GLYPHS if is_first else GLYPHS).get(iteration.kind, "?")


def _kv_share(state: ConsoleState) -> float:
    kv = state.kv
    n_taken = kv.shared + kv.used + kv.reserved
    return n_taken / max(1, n_taken + kv.cached + kv.free)


def _kv_bar(state: ConsoleState, width: int) -> Text:
    n_cells = width - _LABEL - 6
    counts = [int(getattr(state.kv, name)) for name, _, _ in KV_PARTS]
    line = Text("K/V".ljust(_LABEL))
    for (_, glyph, style), n in zip(KV_PARTS, _shares(counts, n_cells), strict=True):
        line.append(glyph * n, style=style)
    return line.append(f" {_kv_share(state):4.0%}")


def _shares(counts: Sequence[int], n_cells: int) -> list[int]:
    """Divides a bar of `n_cells` cells in proportion to `counts`. Returns the number of cells of
    each part.

    The numbers add up to `n_cells`. A part whose count is above 0 has at least one cell.
    """
    total = sum(counts)
    if total == 0:
        return [0] * (len(counts) - 1) + [n_cells]
    cells = [max(n * n_cells // total, n > 0) for n in counts]
    largest = max(range(len(cells)), key=cells.__getitem__)
    cells[largest] += n_cells - sum(cells)
    return cells


def _kv_legend(state: ConsoleState) -> Text:
    line = Text(" " * _LABEL)
    for name, glyph, style in KV_PARTS:
        line.append(glyph, style=style)
        line.append(f" {name} {getattr(state.kv, name):,}  ", style="dim")
    return line


def _pool(state: ConsoleState) -> Text:
    line = Text("pool".ljust(_LABEL))
    for name, numbers, n in (
        ("runs", state.running, state.n_running),
        ("waits", state.waiting, state.n_waiting),
    ):
        line.append(f"{name} ", style="dim")
        for number in numbers[:12]:
            line.append(f"{number} ", style=colour_of(number))
        if n > len(numbers[:12]):
            line.append(f"+{n - len(numbers[:12])} ")
        elif not n:
            line.append("- ")
        line.append(" ")
    return line


def _table(state: ConsoleState, n_lines: int, screen: Screen) -> list[Text]:
    """Returns the table of requests, filled with empty lines up to `n_lines`."""
    if n_lines < 2:
        return [Text()] * max(n_lines, 0)
    widths = (7, max(8, screen.width - 68), 11, 8, 12, 8, 5, 10)
    heads = ("number", "id", "state", "prompt", "generated", "cached", "prio", "account")
    made = [Text(_columns(heads, widths), style="bold")]
    rows = state.shown_requests()
    room = n_lines - 1
    shown = rows if len(rows) <= room else rows[: room - 1]
    are_several = len(state.pipelines) > 1
    made += [_request_line(row, widths, names_pipeline=are_several) for row in shown]
    if len(rows) > len(shown):
        made.append(Text(f"and {len(rows) - len(shown)} requests more", style="dim"))
    return made + [Text()] * (n_lines - len(made))


def _request_line(row: RequestRow, widths: Sequence[int], *, names_pipeline: bool) -> Text:
    state = row.reason or "ended" if row.turn == "ended" else _STATES.get(row.turn, row.turn)
    if names_pipeline and row.turn == "admitted":
        state += f" {row.pipeline}"
    limit = "" if row.max_new_tokens is None else f"/{row.max_new_tokens}"
    cells = (
        str(row.number),
        row.request_id or "?",
        state,
        "?" if row.n_prompt_tokens is None else str(row.n_prompt_tokens),
        f"{row.n_generated_tokens}{limit}",
        str(row.n_cached_tokens),
        str(row.priority),
        row.account or "-",
    )
    text = _columns(cells, widths)
    line = Text(text, style="dim" if row.turn == "ended" else "")
    line.stylize(colour_of(row.number), 0, widths[0])
    return line


def _columns(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Returns one line of columns. A text that is too long for its column ends with an ellipsis."""
    return " ".join(
        (text if len(text) <= width - 1 else text[: width - 2] + "…").ljust(width - 1)
        for text, width in zip(cells, widths, strict=True)
    ).rstrip()


def _marks(state: ConsoleState) -> Iterator[Text]:
    for mark in state.marks:
        ago = max(0.0, state.now - mark.t)
        is_bad = mark.kind in ("lost", "suspects", "unfit", "unformed", "gap", "away")
        line = Text(f"{f'{ago:.0f} s ago':>9}  ", style="dim")
        yield line.append(str(mark), style="bold red" if is_bad else "bold")
