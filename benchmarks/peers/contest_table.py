"""The tables of `benchmarks.peers.compare`: a line for each run, and the medians of each case."""

import statistics
from collections.abc import Sequence

from benchmarks.peers import contest
from benchmarks.peers.catalogue import PEERS
from benchmarks.peers.contest import Range
from benchmarks.peers.contestants import OURS
from benchmarks.records import RunRecord

HEADER = (
    f"{'':<14} {'tokens/s':>9} {'ours is':>22} {'p50 ms':>8} {'ours is':>22} {'p99 ms':>8} "
    f"{'ours is':>22} {'others':>7} {'disturbed':>10}"
)


def line_of(run: RunRecord) -> str:
    """Returns one line about a run, to print as soon as the run has ended."""
    return (
        f"{run.meta['case']} {run.meta['round']} {run.meta['engine']}: "
        f"{contest.output_rate(run.summary()):.1f} tokens/s, "
        f"others {run.meta['other_cpus']:.2f} cores{', disturbed' * run.meta['is_disturbed']}"
    )


def table(case: str, results: Sequence[RunRecord]) -> str:
    """Returns the table of a case. For each engine it has the medians over the rounds, and our
    results divided by the results of the engine."""
    runs = [run for run in results if run.meta["case"] == case]
    counted = contest.undisturbed(runs)
    names = list(dict.fromkeys(run.meta["engine"] for run in runs))
    rate = runs[0].meta["rate"]
    title = case if rate is None else f"{case}, {rate:.2f} requests/s"
    n_rounds, n_counted = (len({run.meta["round"] for run in each}) for each in (runs, counted))
    lines = [f"{title}: median of {n_counted} of {n_rounds} rounds", HEADER]
    for name in names:
        mine = [run.meta for run in runs if run.meta["engine"] == name]
        n_disturbed = f"{sum(meta['is_disturbed'] for meta in mine)} of {len(mine)}"
        others = statistics.mean(meta["other_cpus"] for meta in mine)
        lines.append(f"{row(name, [name], counted)} {others:>7.2f} {n_disturbed:>10}")
    if len(peers := [name for name in names if name in PEERS]) > 1:
        lines.append(row("best peer", peers, counted))
    return "\n".join(lines) + "\n"


def row(title: str, names: Sequence[str], runs: Sequence[RunRecord]) -> str:
    """Returns a row of the table: the medians of an engine, or of the best of several engines, and
    the ratio of our results to these."""
    cells = [f"{title:<14}"]
    for measured, scale, width in (
        (contest.output_rate, 1.0, 9),
        (contest.median_latency, 1e3, 8),
        (contest.p99_latency, 1e3, 8),
    ):
        value = contest.best(runs, names, measured)
        cells.append(f"{scale * statistics.median(value.values()):>{width}.1f}")
        cells.append(f"{spread(contest.ratio(runs, OURS, names, measured)):>22}")
    return " ".join(cells)


def spread(values: Range) -> str:
    return f"{values.median:.2f} x ({values.low:.2f}-{values.high:.2f})"
