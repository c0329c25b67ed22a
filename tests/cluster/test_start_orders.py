"""Three stages, a scheduler and a frontend, started in all orders.

Each pod waits at a gate (an init container) until the test opens it. There are six orders of the
three components, each run with another order of the three workers among themselves. START_ORDERS
says how many of them are run; the first two are each other backwards.
"""

import itertools
import os
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.cluster.cluster import HANG_S, OVERLAYS, Cluster, NotYet, Pod

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(HANG_S)]

STAGES = ("0", "1", "2")
COMPONENTS = ("scheduler", "frontend", "worker")
ORDERS = [
    [pod for component in components for pod in (stages if component == "worker" else [component])]
    for components, stages in dict.fromkeys(
        pair
        for forwards in zip(
            itertools.permutations(COMPONENTS), itertools.permutations(STAGES), strict=True
        )
        for pair in (forwards, (forwards[0][::-1], forwards[1][::-1]))
    )
]
N_ORDERS = int(os.environ.get("START_ORDERS", "2"))
NAMES = {**dict.fromkeys(STAGES, "worker"), "scheduler": "scheduler", "frontend": "frontend"}
OPEN = "open('/tmp/open', 'w').close()"


@pytest.fixture(scope="module")
def gated(cluster: Cluster) -> Iterator[Cluster]:
    """All pods, waiting at their gates."""
    try:
        cluster.apply(OVERLAYS / "gated")
        for name in NAMES:
            at_the_gate(cluster, name)
        yield cluster
    finally:
        cluster.delete(OVERLAYS / "gated")


def at_the_gate(cluster: Cluster, name: str) -> Pod:
    """The pod of a component, or one of the workers, when all of them wait."""

    def look() -> Pod:
        n_pods = len(STAGES) if name in STAGES else 1
        waiting = [pod for pod in cluster.pods(NAMES[name]) if "gate" in pod.running]
        if len(waiting) < n_pods:
            raise NotYet(f"{name} does not wait at its gate")
        return waiting[int(name) if name in STAGES else 0]

    return cluster.insist(look)


def open_gate(cluster: Cluster, pod: Pod) -> None:
    """Lets a pod go on. That it does is seen at the pod: the call itself may fail, as the gate ends
    with whatever still runs there."""

    def is_open() -> bool:
        found = cluster.pod(pod.name)
        assert found is not None, "the pod itself has gone"
        assert found.uid == pod.uid, "the pod itself was replaced"
        if "gate" not in found.running:
            return True
        cluster.in_namespace("exec", pod.name, "-c", "gate", "--", "python", "-c", OPEN)
        return False

    cluster.until(is_open, what=f"the gate of {pod.name} is open")


@pytest.mark.parametrize("order", ORDERS[:N_ORDERS], ids=lambda order: "-".join(order))
def test_the_pods_may_start_in_any_order(gated: Cluster, order: list[str]) -> None:
    everything = "app.kubernetes.io/name=orcinus"
    gated.insist(
        lambda: gated.in_namespace(
            "delete", "pods", "-l", everything, "--grace-period=1", "--wait=false"
        )
    )
    waiting = {name: at_the_gate(gated, name) for name in NAMES}
    for name in order:
        pod, component = waiting[name], NAMES[name]
        open_gate(gated, pod)
        gated.until(
            lambda pod=pod, component=component: gated.is_started(pod.name, component),  # type: ignore[misc]
            what=f"{name} has started",
        )
    gated.until_answers()
    gated.wait_serving()
    for component, n_pods in Counter(NAMES.values()).items():
        assert [pod.restarts for pod in gated.pods(component)] == [0] * n_pods
