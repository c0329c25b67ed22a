"""Three stages, a scheduler and a frontend, started in all orders.

Each pod waits at a gate (an init container) until the test opens it. The six orders of the three
components are run, each with another order of the three stages among themselves.
"""

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.cluster.cluster import OVERLAYS, Cluster, Pod

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

STAGES = ("0", "1", "2")
ORDERS = [
    [pod for component in components for pod in (stages if component == "worker" else [component])]
    for components, stages in zip(
        itertools.permutations(("scheduler", "frontend", "worker")),
        itertools.permutations(STAGES),
        strict=True,
    )
]
NAMES = {**dict.fromkeys(STAGES, "worker"), "scheduler": "scheduler", "frontend": "frontend"}
OPEN = "open('/tmp/open', 'w').close()"

AT_THE_GATES_TIMEOUT_S = 180
"""For old pods to go and new ones to come: a busy kubelet takes half a minute to remove one."""


@pytest.fixture(scope="module")
def gated(cluster: Cluster) -> Iterator[Cluster]:
    """All pods, waiting at their gates."""
    cluster.apply(OVERLAYS / "gated")
    try:
        wait_at_the_gates(cluster)
        yield cluster
    finally:
        cluster.delete(OVERLAYS / "gated")


def at_the_gate(cluster: Cluster, name: str) -> Pod | None:
    """The pod of a component, or of a stage, if it waits."""
    for pod in cluster.pods(NAMES[name]):
        is_wanted = name not in STAGES or pod.name.endswith(f"-{name}")
        if is_wanted and not pod.is_leaving and pod.is_waiting_at("gate"):
            return pod
    return None


def wait_at_the_gates(cluster: Cluster) -> None:
    """Waits until a new pod of each kind waits."""
    for name in NAMES:
        cluster.until(
            lambda name=name: at_the_gate(cluster, name) is not None,  # type: ignore[misc]
            timeout_s=AT_THE_GATES_TIMEOUT_S,
            what=f"{name} waits at its gate",
        )


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "-".join(order))
def test_the_pods_may_start_in_any_order(gated: Cluster, order: list[str]) -> None:
    everything = "app.kubernetes.io/name=orcinus"
    gated.in_namespace("delete", "pods", "-l", everything, "--grace-period=1", "--wait=false")
    wait_at_the_gates(gated)
    for name in order:
        pod = at_the_gate(gated, name)
        assert pod is not None
        gated.in_namespace("exec", pod.name, "-c", "gate", "--", "python", "-c", OPEN)
        component = NAMES[name]
        gated.until(
            lambda pod=pod, component=component: gated.is_started(pod.name, component),  # type: ignore[misc]
            timeout_s=90,
            what=f"{name} has started",
        )
    gated.until_answers()
    gated.wait_serving()
    for component, n_pods in Counter(NAMES.values()).items():
        restarts = [pod.restarts for pod in gated.pods(component) if not pod.is_leaving]
        assert restarts == [0] * n_pods
