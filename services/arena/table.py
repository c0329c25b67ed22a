"""The results as a table for a terminal."""

from collections.abc import Sequence
from itertools import groupby

from services.arena.figures import Figures, Result

HEAD = (
    f"{'policy':<26} {'way':<9} {'tokens/s':>9} {'first token, s':>17} {'between tokens, ms':>19} "
    f"{'Jain':>6} {'preempted':>9} {'select, us':>10}\n"
    f"{'':<26} {'':<9} {'':>9} {'p50':>8} {'p99':>8} {'p50':>9} {'p99':>9}"
)


def lines(results: Sequence[Result]) -> list[str]:
    """Returns the lines of a table, with a part for each trace."""
    found: list[str] = []
    for trace, of_trace in groupby(results, key=lambda one: one.trace):
        found += ["", f"trace {trace}", *HEAD.splitlines()]
        found += [_line(one) for one in of_trace]
    return found


def _line(result: Result) -> str:
    name = f"{result.entrant:<26} {result.way:<9}"
    if result.figures is None:
        return f"{name} stopped: {result.stopped}"
    return f"{name} {_numbers(result.figures)}"


def _numbers(found: Figures) -> str:
    return (
        f"{found.tokens_per_s:>9.1f} {found.ttft_p50_s:>8.3f} {found.ttft_p99_s:>8.3f} "
        f"{1e3 * found.gap_p50_s:>9.2f} {1e3 * found.gap_p99_s:>9.2f} "
        f"{_optional(found.jain, '.3f'):>6} {_optional(found.n_preemptions, 'd'):>9} "
        f"{_optional(found.select_us, '.1f'):>10}"
    )


def _optional(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
