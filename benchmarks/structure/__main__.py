"""`python -m benchmarks.structure`: prints the numbers of source trees side by side."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import benchmarks.structure
from benchmarks.machine import ROOT
from benchmarks.structure.durations import minutes_of
from benchmarks.structure.measures import rows_of
from benchmarks.structure.sample import listed, sample
from benchmarks.structure.tree import tree_of, working_tree


def table(columns: Mapping[str, Mapping[str, str]]) -> str:
    """Returns a table in Markdown with a column for each tree. A tree without a value in a row has
    a dash there."""
    titles = _merged([list(figures) for figures in columns.values()])
    lines = [["", *columns], ["---"] * (1 + len(columns))]
    lines += [[title, *(each.get(title, "-") for each in columns.values())] for title in titles]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _merged(lists: Sequence[Sequence[str]]) -> list[str]:
    """Merges lists of titles into one list, in which each title occurs once. A title that is
    missing in the earlier lists is inserted after the title that precedes it in its own list."""
    merged: list[str] = []
    for titles in lists:
        place = 0
        for title in titles:
            if title in merged:
                place = merged.index(title) + 1
            else:
                merged.insert(place, title)
                place += 1
    return merged


def minutes(given: Sequence[str]) -> dict[str, str]:
    """Returns the rows of the arguments `NAME=MINUTES` and `NAME=FILE`, where FILE has durations of
    tests.

    Raises:
        ValueError: a value is neither a number nor a file of durations.
    """
    figures = {}
    for each in given:
        name, _, value = each.partition("=")
        path = Path(value)
        duration = minutes_of(path) if path.is_file() else float(value)
        figures[f"minutes of {name}"] = f"{duration:.1f}"
    return figures


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Prints the table of the repository `root`, or random docstrings with `--docstrings`. Returns
    the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.structure",
        description=benchmarks.structure.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rev", action="append", default=[], help="a revision; may be repeated")
    parser.add_argument(
        "--minutes",
        action="append",
        default=[],
        metavar="NAME=MINUTES",
        help="a row of minutes; also NAME=FILE, JUnit's XML or a line `SECONDS NAME` a test. Of "
        "the last tree; may be repeated",
    )
    parser.add_argument("--docstrings", type=int, metavar="N", help="print N docstrings instead")
    parser.add_argument("--seed", type=int, default=0, help="seed of the docstrings (0)")
    options = parser.parse_args(arguments)
    trees = {revision: tree_of(root, revision) for revision in options.rev}
    trees = trees or {"working tree": working_tree(root)}
    if options.docstrings is not None:
        for name, tree in trees.items():
            drawn = sample(tree, options.docstrings, seed=options.seed)
            print(f"{len(drawn)} docstrings of {name}, seed {options.seed}\n\n{listed(drawn)}")
        return 0
    columns = {name: rows_of(tree) for name, tree in trees.items()}
    columns[list(columns)[-1]] |= minutes(options.minutes)
    print(table(columns))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
