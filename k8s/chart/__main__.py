"""Writes the Helm chart.

    python -m k8s.chart [DIRECTORY]

DIRECTORY is `build/chart/orcinus` where none is given. It needs kubectl, which renders the
manifests.
"""

import argparse
import sys
from pathlib import Path

from k8s.chart.chart import write
from k8s.chart.kustomize import Unrendered


def main() -> None:
    """Writes the chart into the directory that the command line names. Ends the process with a
    message if that fails."""
    parser = argparse.ArgumentParser(
        prog="python -m k8s.chart",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", nargs="?", type=Path, default=Path("build/chart/orcinus"))
    directory: Path = parser.parse_args().directory
    try:
        write(directory)
    except Unrendered as error:
        sys.exit(f"the chart was not made: {error}")
    sys.stdout.write(f"{directory}\n")


if __name__ == "__main__":
    main()
