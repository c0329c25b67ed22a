"""Workers that are told to stop: what they run moves, and no pipeline is lost."""

import re
import time

import pytest

from tests.cluster.cluster import HANG_S, Cluster
from tests.cluster.figures import Figures
from tests.cluster.streams import Streams, unchanged

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(HANG_S)]

WORKERS = "deployment/orcinus-worker"
SERVING = re.compile(r"epoch (\d+): 2 stages")
ENDED = re.compile(r"epoch (\d+) (?:has drained|is over)")


def log_of_leader(demo: Cluster) -> str:
    return demo.insist(lambda: demo.in_namespace("logs", demo.leading_pod().name))


def n_pipelines(demo: Cluster) -> int:
    """Returns the number of pipelines that serve, by the log of the leader."""
    log = log_of_leader(demo)
    return len(set(SERVING.findall(log)) - set(ENDED.findall(log)))


def losses(demo: Cluster) -> list[str]:
    return [line for line in log_of_leader(demo).splitlines() if " is over: " in line]


def scale(demo: Cluster, n_workers: int) -> None:
    demo.insist(lambda: demo.in_namespace("scale", WORKERS, f"--replicas={n_workers}"))


def test_a_worker_that_is_evicted_serves_until_another_has_its_stage(
    demo: Cluster, figures: Figures, streams: Streams
) -> None:
    before = losses(demo)
    leaving, *others = demo.pods("worker")
    with streams.through("worker of the only pipeline evicted"):
        started = time.monotonic()
        demo.delete_pod(leaving)
        demo.until(lambda: demo.pod(leaving.name) is None, what="the worker has ended")
        figures.add("worker evicted to its end", time.monotonic() - started)
        demo.until_answers()
    demo.wait_serving()
    assert unchanged(others, [pod for pod in demo.pods("worker") if pod.uid == others[0].uid])
    assert losses(demo) == before


def test_schedulers_and_workers_are_replaced_at_once(
    demo: Cluster, figures: Figures, streams: Streams
) -> None:
    before = {pod.uid for role in ("scheduler", "worker") for pod in demo.pods(role)}
    with streams.through("schedulers and workers replaced at once"):
        restart = ("rollout", "restart", "deployment/orcinus-scheduler", WORKERS)
        demo.insist(lambda: demo.in_namespace(*restart))

        def are_replaced() -> bool:
            pods = [pod for role in ("scheduler", "worker") for pod in demo.pods(role)]
            return before.isdisjoint(pod.uid for pod in pods)

        demo.until(are_replaced, what="all schedulers and workers are replaced")
        demo.wait_serving()
        demo.until_answers()


def test_pipelines_come_and_go_under_load_as_workers_are_scaled(
    demo: Cluster, figures: Figures, streams: Streams
) -> None:
    before = losses(demo)
    try:
        with streams.through("1 to 3 to 1 pipelines"):
            started = time.monotonic()
            scale(demo, 6)
            demo.until(lambda: n_pipelines(demo) == 3, what="three pipelines serve")
            figures.add("1 to 3 pipelines", time.monotonic() - started)
            started = time.monotonic()
            scale(demo, 2)
            demo.wait_serving()
            demo.until(lambda: n_pipelines(demo) == 1, what="one pipeline serves")
            figures.add("3 to 1 pipelines", time.monotonic() - started)
    finally:
        scale(demo, 2)
    assert losses(demo) == before
