"""Writes what Helm makes of the chart, for programs that check manifests.

`HELM=… python -m tests.k8s.chart.rendered DIRECTORY` writes a file for each case of `cases`.
"""

import sys
import tempfile
from pathlib import Path

import yaml

from k8s.chart.chart import write
from tests.k8s.chart.cases import CASES, IMAGES
from tests.k8s.chart.helm import template


def main(directory: Path) -> None:
    """Renders every case into a file of its own."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        chart = Path(made, "orcinus")
        write(chart)
        for name, case in CASES.items():
            values = {**IMAGES, **case.values}
            objects = template(
                chart, values, release=case.release, namespace=case.namespace
            ).objects
            file = directory / f"chart-{name.replace(', ', '-').replace(' ', '-')}.yaml"
            file.write_text(yaml.safe_dump_all(objects), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
