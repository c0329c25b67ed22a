"""The deployments that the tests share, and the figures that they report at the end."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import NAMESPACE, OVERLAYS, Cluster

FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """The cluster of KUBECONFIG."""
    if not os.environ.get("KUBECONFIG"):
        pytest.fail("KUBECONFIG must name a cluster that has the images; see `make test-cluster`")
    return Cluster()


@pytest.fixture(scope="module")
def demo(cluster: Cluster, figures: "Figures") -> Iterator[Cluster]:
    """The demo overlay, serving."""
    yield from deployment(cluster, OVERLAYS / "demo", figures)


def deployment(cluster: Cluster, overlay: Path, figures: "Figures") -> Iterator[Cluster]:
    """Applies an overlay, and at the end deletes it and finds nothing of it left."""
    crds = cluster.kubectl("get", "crd", "-o", "name")
    assert crds == ""
    started = time.monotonic()
    cluster.apply(overlay)
    try:
        cluster.until_answers()
        figures.add(f"{overlay.name}: apply to first token", time.monotonic() - started)
        cluster.wait_serving()
        yield cluster
        assert cluster.kubectl("get", "crd", "-o", "name") == ""
    finally:
        cluster.delete(overlay)
    assert cluster.kubectl("get", "namespace", NAMESPACE, "--ignore-not-found") == ""


class Figures:
    """Durations that a run has seen, printed at its end."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def add(self, what: str, seconds: float) -> None:
        """Notes one."""
        self._lines.append(f"{seconds:8.1f} s  {what}")


@pytest.fixture(scope="session")
def figures(pytestconfig: pytest.Config) -> Figures:
    """Where durations are noted."""
    return Figures(pytestconfig.stash.setdefault(FIGURES, []))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Prints the figures."""
    lines = config.stash.get(FIGURES, [])
    if lines:
        terminalreporter.section("durations on the cluster")
        for line in lines:
            terminalreporter.write_line(line)
