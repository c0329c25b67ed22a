"""The cluster, deployments on it, and the figures that the tests report at the end."""

import os
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, NotYet
from tests.cluster.figures import Figures

FIGURES = pytest.StashKey[list[str]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the state of the pods to the report of a failed test, unless the failure itself shows
    it."""
    report = yield
    error = call.excinfo.value if call.excinfo else None
    if report.when == "call" and report.failed and not isinstance(error, NotYet):
        report.sections.append(("cluster", Cluster().report()))
    return report


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """The cluster of KUBECONFIG."""
    if not os.environ.get("KUBECONFIG"):
        pytest.fail("KUBECONFIG must name a cluster that has the images; see `make test-cluster`")
    return Cluster()


def deployment(cluster: Cluster, overlay: Path, figures: Figures) -> Iterator[Cluster]:
    """Applies an overlay, and at the end deletes it and finds nothing of it left."""
    crds = cluster.crds()
    started = time.monotonic()
    try:
        cluster.apply(overlay)
        cluster.until_answers()
        figures.add(f"{overlay.name}: apply to first token", time.monotonic() - started)
        cluster.wait_serving()
        yield cluster
        assert cluster.crds() == crds
    finally:
        cluster.delete(overlay)


def spread(cluster: Cluster) -> bool:
    """Whether the stages are on different nodes, as far as there are nodes.

    That is a preference: a stage that is made while a node takes no pods for a moment goes to
    another one and stays there. So stages that share a node are made again, twice at most.
    """
    for n_attempts_left in (2, 1, 0):
        cluster.wait_serving()
        workers = cluster.pods("worker")
        if len({worker.node for worker in workers}) >= min(len(workers), len(cluster.nodes())):
            return True
        if n_attempts_left:
            cluster.delete_pod(workers[-1])
    return False


@pytest.fixture(scope="session")
def figures(pytestconfig: pytest.Config) -> Figures:
    """The notebook of durations."""
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
