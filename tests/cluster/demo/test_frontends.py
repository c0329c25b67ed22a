"""Frontends that come and go: what clients notice that cannot resume."""

import signal
import time
from datetime import datetime
from typing import Any

import pytest

from tests.cluster.cluster import CLIENT, FRONTEND, HANG_S, Cluster, Pod
from tests.cluster.figures import Figures
from tests.cluster.streams import LOAD, PROMPT, STREAMS, failures

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(HANG_S)]

READY_S = 10
TICKS_PER_S = 100
"""Unit of times in /proc on Linux."""
CUT_S = 25
LONG_S = 80
"""Seconds of a pause that no answer outlasted when frontends drained for a minute."""

GRPC_STREAMS: dict[str, Any] = {
    "host": FRONTEND,
    "port": 50051,
    "grpc": True,
    "clients": 16,
    "streams": [{"prompt": PROMPT, "options": {"max_tokens": 150, "sampling": {"seed": 5}}}],
}


def seconds_to_ready(demo: Cluster, pod: Pod) -> float:
    """The time from a container's start until its pod was ready, in whole seconds."""
    status = demo.get("pod", pod.name)["status"]
    (container,) = status["containerStatuses"]
    (ready,) = (it for it in status["conditions"] if it["type"] == "Ready")
    times = container["state"]["running"]["startedAt"], ready["lastTransitionTime"]
    started, was_ready = (datetime.fromisoformat(it.replace("Z", "+00:00")) for it in times)
    return (was_ready - started).total_seconds()


def processor_s(demo: Cluster, pod: Pod) -> float:
    """Processor time that a container's first process has taken: on a machine that others use, too,
    it is what says how long a start takes."""
    said = demo.insist(lambda: demo.in_namespace("exec", pod.name, "--", "cat", "/proc/1/stat"))
    user, system = said.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / TICKS_PER_S


def rank_is_killed(demo: Cluster, worker: Pod) -> bool:
    """Kills the rank of a worker, unless the worker's pod is gone."""
    if demo.pod(worker.name) is not None:
        demo.signal_rank(worker, signal.SIGKILL)
    return True


def test_a_service_has_an_endpoint_while_frontends_are_replaced(
    demo: Cluster, figures: Figures
) -> None:
    before = demo.pods("frontend")
    with demo.load(**LOAD) as load:
        for pod in before:
            demo.delete_pod(pod)
            demo.wait_serving()  # so there is an endpoint, on clusters too where none may terminate
        outcomes = load.finish()
    after = demo.pods("frontend")
    figures.add(
        "a frontend's start to its readiness", max(seconds_to_ready(demo, it) for it in after)
    )
    assert all(processor_s(demo, pod) < READY_S for pod in after)
    assert failures(outcomes) == []


def test_no_module_of_pythons_library_is_compiled_at_each_start(demo: Cluster) -> None:
    pod = demo.pods("frontend")[0].name
    command = "python -v -c 'import asyncio, email, http.client, typing' 2>&1"
    said = demo.insist(lambda: demo.in_namespace("exec", pod, "--", "sh", "-c", command))
    assert "matches" in said  # byte code that was found
    assert [line for line in said.splitlines() if line.startswith("# code object from /")] == []


def test_streams_of_a_frontend_that_drains_outlast_a_minute(demo: Cluster) -> None:
    """A frontend that is told to stop keeps streams, even those whose pipeline is away."""
    workers = demo.pods("worker")

    def scale(n: int) -> None:
        count = f"--replicas={n}"
        demo.insist(lambda: demo.in_namespace("scale", "deployment/orcinus-worker", count))

    with demo.load(**STREAMS) as load:
        scale(0)
        try:
            # The workers would serve until their requests have ended.
            demo.until(lambda: rank_is_killed(demo, workers[0]), what="a rank is killed")
            for frontend in demo.pods("frontend"):
                demo.delete_pod(frontend)
            time.sleep(LONG_S)
        finally:
            scale(len(workers))
        demo.until_answers()
        outcomes = load.finish()
    assert failures(outcomes) == []
    assert max(outcome["stream"]["longest_pause_s"] for outcome in outcomes) > LONG_S
    assert sum(outcome["stream"]["n_resumed"] for outcome in outcomes) == 0
    demo.wait_serving()


def test_streams_over_grpc_outlast_a_node_that_is_cut_off(demo: Cluster, figures: Figures) -> None:
    client = demo.pod(CLIENT)
    assert client is not None
    frontends = demo.pods("frontend")
    lost = next((it.node for it in frontends if it.node != client.node), None)
    if lost is None:
        pytest.skip("frontends and clients are all on one node")
    with demo.load(**GRPC_STREAMS) as load:
        with demo.node_away(lost):
            cut_at = time.time()
            time.sleep(CUT_S)
        demo.until_answers()
        outcomes = load.finish()
    # A client that only connects then fails: it has no stream yet, and may begin anew.
    hit = [
        it
        for it in outcomes
        if it["started"] + it["stream"]["first_token_s"] < cut_at < it["ended"]
    ]
    assert len(hit) > GRPC_STREAMS["clients"] / 2
    assert failures(hit) == []
    longest_s = max(it["stream"]["longest_pause_s"] for it in hit)
    figures.add(f"node cut for {CUT_S} s: longest pause of {len(hit)} streams over gRPC", longest_s)
    demo.until(lambda: lost in demo.nodes(), what="the node is back")
    demo.wait_serving()
