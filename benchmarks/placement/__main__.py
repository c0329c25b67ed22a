"""Compares one pool over many pipelines with routers in front of independent schedulers.

    python -m benchmarks.placement --mooncake conversation.jsonl      half an hour on two cores
    python -m benchmarks.placement --mooncake conversation.jsonl --pipelines 1 4 --requests 150

The second command takes two minutes.

Everything runs in virtual time: the deployed scheduling core, on pipelines with the costs of
`hardware.py`. Each load runs at two rates per pipeline. At the steady rate, about four fifths of
what the pipelines can serve, times to the first token and the shares of prompts that caches hold
are compared. In overload, throughput and fairness are compared: all clients have waiting requests
then, and each of the two large clients sends three times as much as any other client. `RATES` and
`loads.py` have the numbers.

The file of Mooncake's hour comes from its publisher, https://github.com/kvcache-ai/Mooncake
(FAST'25, `conversation.jsonl`); without the file, the load is left out. For n pipelines, each load
has `--requests` times n^0.75 requests. Of Mooncake's hour these are all requests of sampled
conversations, and their times of arrival are scaled to the rate.

The routers are described in `routers.py`. The site `two pools` is run only for the page on limits:
two schedulers with half of the pipelines each.
"""

import argparse
import dataclasses
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks import machine
from benchmarks.machine import ROOT
from benchmarks.paper.beyond.trials import on_all_cores
from benchmarks.placement.drawing import draw
from benchmarks.placement.figures import Figures
from benchmarks.placement.trials import HALVES, RATES, SITES, Trial, run

RESULTS = ROOT / "benchmarks" / "results" / "placement.json"
FIGURE = ROOT / "docs" / "images" / "placement.png"
HEAD = (
    f"{'load':>9} {'rate':>9} {'pipelines':>9} {'site':>19} {'first token, s':>14} {'p99, s':>8} "
    f"{'tokens/s':>9} {'cached':>7} {'Jain':>6}"
)


def trials(options: argparse.Namespace) -> list[Trial]:
    """Returns the trials to run, the longest first, so that no core is idle at the end while
    another runs a long trial."""
    found = [
        Trial(
            load,
            site,
            n_pipelines,
            n_requests=round(options.requests * n_pipelines**0.75),
            is_overload=is_overload,
            seed=options.seed,
            mooncake=options.mooncake,
        )
        for load in options.loads
        for n_pipelines in options.pipelines
        for site in options.sites
        for is_overload in (False, True)
        if site != HALVES or n_pipelines % 2 == 0
    ]
    return sorted(found, key=lambda one: -one.n_requests)


def line(trial: Trial, found: Figures) -> str:
    """Returns the line of the table for a trial and its results."""
    return (
        f"{trial.load:>9} {'overload' if trial.is_overload else 'steady':>9} "
        f"{trial.n_pipelines:>9} {trial.site:>19} {found.ttft_p50_s:>14.3f} "
        f"{found.ttft_p99_s:>8.3f} {found.tokens_per_s:>9.0f} {found.hit_rate:>7.3f} "
        f"{found.jain:>6.3f}"
    )


def curves(
    done: Sequence[tuple[Trial, Figures]], *, is_overload: bool
) -> dict[str, dict[str, dict[int, Figures]]]:
    """Returns the results by load, site and number of pipelines: of the trials in overload, or of
    the trials at the steady rate. The site `two pools` is left out."""
    found: dict[str, dict[str, dict[int, Figures]]] = defaultdict(lambda: defaultdict(dict))
    for trial, figures in done:
        if trial.is_overload is is_overload and trial.site != HALVES:
            found[trial.load][trial.site][trial.n_pipelines] = figures
    return found


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the parsed command line; exits with a message if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.placement",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--mooncake", type=Path, metavar="FILE", help="conversation.jsonl")
    parser.add_argument("--loads", nargs="+", choices=list(RATES), help="default: all there are")
    parser.add_argument("--sites", nargs="+", choices=(*SITES, HALVES), default=SITES)
    parser.add_argument("--pipelines", type=int, nargs="+", default=[1, 4, 16, 64], metavar="N")
    parser.add_argument("--requests", type=int, default=300, help="for one pipeline")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="record, JSON")
    parser.add_argument("--figure", type=Path, default=FIGURE, help="plot, PNG")
    options = parser.parse_args(arguments)
    if options.loads is None:
        options.loads = [one for one in RATES if one != "mooncake" or options.mooncake]
    if "mooncake" in options.loads and options.mooncake is None:
        parser.error("--mooncake: the load `mooncake` needs the publisher's file")
    if min(options.pipelines) < 1 or options.requests < 2:
        parser.error("--pipelines and --requests: at least 1 pipeline and 2 requests")
    return options


def main() -> None:
    """Parses the command line, runs all trials, prints the table, and writes the record and the
    figure."""
    options = parse()
    about = machine.describe()  # first, since written files would make the working tree differ
    to_do = trials(options)
    done = sorted(
        zip(to_do, on_all_cores(run, to_do), strict=True),
        key=lambda one: (one[0].load, one[0].is_overload, one[0].n_pipelines),
    )
    print(HEAD)
    for trial, figures in done:
        print(line(trial, figures))
    record = {
        **about,
        "runs": [
            {
                "load": trial.load,
                "rate": round(trial.rate, 2),
                "is_overload": trial.is_overload,
                "n_pipelines": trial.n_pipelines,
                "site": trial.site,
                "n_requests": trial.n_requests,
                **{name: round(one, 5) for name, one in dataclasses.asdict(figures).items()},
            }
            for trial, figures in done
        ],
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    draw(
        options.figure,
        curves(done, is_overload=False),
        curves(done, is_overload=True),
    )


if __name__ == "__main__":
    main()
