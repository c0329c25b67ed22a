"""The chart, installed by real Helm on the cluster, and upgraded there under streams."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from k8s.chart.chart import write
from tests.cluster.cluster import HANG_S, NAMESPACE, OVERLAYS, Cluster
from tests.cluster.figures import Figures
from tests.cluster.streams import Streams

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(HANG_S)]

RELEASE = "orcinus"
OLD_CLUSTER = Path(__file__).parents[2] / "k8s" / "components" / "kubernetes-1.20"
VALUES = (
    *("--set", "image.registry=localhost/orcinus", "--set", "image.tag=dev"),
    *("--set", "stages=2", "--set", "spares=1"),
    *("--set", "worker.resources.requests.cpu=200m"),  # nodes are small
)
PLUGIN = """\
apiVersion: v1
type: postrenderer/v1
name: old-cluster
version: 0.1.0
runtime: subprocess
runtimeConfig:
  platformCommand:
    - command: ${HELM_PLUGIN_DIR}/render.sh
"""
RENDER = """\
#!/bin/sh
set -e
cat >"$HELM_PLUGIN_DIR/rendered.yaml"
exec kubectl kustomize "$HELM_PLUGIN_DIR"
"""


class Helm:
    """Helm for the cluster of KUBECONFIG, which may be older than the chart allows. So the chart
    names no version here, and Helm hands what it has rendered to kustomize, which adds the
    component for old clusters."""

    def __init__(self, home: Path) -> None:
        """`home` is an empty directory for the chart and for what Helm writes."""
        program = os.environ.get("HELM") or shutil.which("helm")
        assert program, "Helm is missing: `make test-cluster` fetches it"
        self._program = program
        self._plugins = home / "plugins"
        self._environment = {
            **os.environ,
            "HOME": str(home),
            "HELM_PLUGINS": str(self._plugins),
        }
        self._chart = home / "orcinus"
        write(self._chart)
        self._allow_old_cluster()
        self._write_plugin()

    def install(self) -> None:
        """Installs the chart."""
        self("install", RELEASE, str(self._chart), *VALUES, "--post-renderer", "old-cluster")

    def upgrade(self, *values: str) -> None:
        """Upgrades the release to further values, each like `name=value`."""
        options = [option for value in values for option in ("--set", value)]
        chart = str(self._chart)
        self("upgrade", RELEASE, chart, *VALUES, *options, "--post-renderer", "old-cluster")

    def __call__(self, *arguments: str) -> None:
        """Runs Helm in the namespace of the deployment.

        Raises:
            AssertionError: it failed.
        """
        done = subprocess.run(
            [self._program, "--namespace", NAMESPACE, *arguments],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=HANG_S / 4,
            check=False,
        )
        assert done.returncode == 0, done.stderr + done.stdout

    def _allow_old_cluster(self) -> None:
        about = self._chart / "Chart.yaml"
        lines = about.read_text().splitlines()
        kept = [line for line in lines if not line.startswith("kubeVersion:")]
        about.write_text("\n".join(kept))

    def _write_plugin(self) -> None:
        plugin = self._plugins / "old-cluster"
        plugin.mkdir(parents=True)
        component = os.path.relpath(OLD_CLUSTER, plugin.resolve())
        (plugin / "plugin.yaml").write_text(PLUGIN)
        (plugin / "kustomization.yaml").write_text(
            f"resources: [rendered.yaml]\ncomponents: [{component}]\n"
        )
        script = plugin / "render.sh"
        script.write_text(RENDER)
        script.chmod(0o755)


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Helm and the chart."""
    return Helm(tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="module")
def installed(cluster: Cluster, helm: Helm, figures: Figures) -> Iterator[Cluster]:
    """The demo model as Helm installs it, and a client beside it."""
    try:
        cluster.insist(lambda: cluster.kubectl("create", "namespace", NAMESPACE))
        cluster.apply(OVERLAYS / "client")
        helm.install()
        figures.add("helm install to first token", cluster.until_answers())
        cluster.wait_serving()
        yield cluster
        helm("uninstall", RELEASE)
        cluster.until(lambda: cluster.get("deployments") is None, what="nothing is left")
    finally:
        cluster.delete_namespace()


def test_the_release_passes_its_own_test(installed: Cluster, helm: Helm) -> None:
    helm("test", RELEASE)


def test_an_upgrade_of_all_pods_loses_and_changes_no_stream(
    installed: Cluster, helm: Helm, figures: Figures
) -> None:
    streams = Streams(installed, figures)
    before = {pod.uid for it in ("frontend", "scheduler", "worker") for pod in installed.pods(it)}
    with streams.through("helm upgrade of all pods"):
        helm.upgrade(
            *(f"{it}.podAnnotations.rollout=second" for it in ("frontend", "scheduler", "worker"))
        )
        installed.wait_serving()
    after = {pod.uid for it in ("frontend", "scheduler", "worker") for pod in installed.pods(it)}
    assert not before & after
