"""The demo overlay as its users have it, and what it does when its parts die."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import FRONTEND, Cluster, Pod
from tests.cluster.conftest import Figures
from tests.system.stack import serving

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PROMPT = "If the file does not exist,"
LEASE_S = 15
PROBE_S = 5
"""What a probe may take that is a process of its own, as old clusters have them."""
LOAD = {
    "host": FRONTEND,
    "port": 8000,
    "clients": 4,
    "body": {"prompt": PROMPT, "max_tokens": 24, "temperature": 0},
}


def unchanged(before: list[Pod], after: list[Pod]) -> bool:
    """Whether the same containers run as before."""
    return [(pod.uid, pod.restarts) for pod in before] == [(pod.uid, pod.restarts) for pod in after]


def failures(outcomes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Requests that were not answered."""
    return [outcome for outcome in outcomes if outcome["status"] != 200]


def test_completions_through_the_services_equal_a_local_run(demo: Cluster) -> None:
    http = demo.complete(PROMPT, max_tokens=20)
    grpc = demo.ask(
        "generate",
        target=f"{FRONTEND}:50051",
        prompt=PROMPT,
        options={"max_tokens": 20, "temperature": 0},
    )
    with serving(ROOT / "models" / "demo", stages=2) as local:
        expected = local.complete(PROMPT, max_tokens=20, temperature=0)
    assert http["status"] == 200
    assert http["body"]["choices"][0]["text"] == expected["text"]
    assert http["body"]["choices"][0]["token_ids"] == expected["token_ids"]
    assert grpc == {"code": "OK", "text": expected["text"], "token_ids": expected["token_ids"]}


def test_stages_run_on_different_nodes(demo: Cluster) -> None:
    nodes = json.loads(demo.kubectl("get", "nodes", "-o", "json"))["items"]
    workers = demo.pods("worker")
    assert len(workers) == 2
    assert len({worker.node for worker in workers}) == min(2, len(nodes))


def test_every_pod_is_ready_and_one_scheduler_leads(demo: Cluster) -> None:
    schedulers = demo.pods("scheduler")
    assert len(schedulers) == 2
    assert demo.leader() in {pod.name for pod in schedulers}
    for component in ("frontend", "scheduler", "worker"):
        for pod in demo.pods(component):
            assert pod.is_ready, pod
            assert pod.restarts == 0, pod


@pytest.mark.parametrize("index", [0, 1])
def test_a_deleted_worker_comes_back_and_nobody_else_restarts(
    demo: Cluster, figures: Figures, index: int
) -> None:
    workers = demo.pods("worker")
    lost, others = workers[index], [w for w in workers if w is not workers[index]]
    bystanders = demo.pods("scheduler") + demo.pods("frontend")
    started = time.monotonic()
    demo.in_namespace("delete", "pod", lost.name, "--wait=false")

    def is_replaced() -> bool:
        pod = demo.pod(lost.name)  # between the old one and the new one there is none
        return pod is not None and pod.uid != lost.uid

    demo.until(is_replaced, timeout_s=180, what="a new worker")
    demo.until_answers()
    figures.add(f"worker {index} deleted to next token", time.monotonic() - started)
    demo.wait_serving()
    back = demo.pods("worker")
    assert back[index].ip != lost.ip
    assert unchanged(others, [w for w in back if w.name != lost.name])
    assert unchanged(bystanders, demo.pods("scheduler") + demo.pods("frontend"))


def test_a_hung_rank_makes_its_pod_unready_and_restarts_it_alone(
    demo: Cluster, figures: Figures
) -> None:
    stopped, neighbour = demo.pods("worker")
    bystanders = demo.pods("scheduler") + demo.pods("frontend")
    demo.in_namespace("exec", "-i", stopped.name, "--", "python", "-", text=STOP_RANK)

    def state() -> Pod:
        pod = demo.pod(stopped.name)
        assert pod is not None, "the pod itself has gone"
        return pod

    figures.add(
        "rank stopped to pod unready",
        demo.until(
            lambda: not state().is_ready or state().restarts > stopped.restarts,
            timeout_s=PROBE_S + 10,
            what="the pod is unready",
        ),
    )
    demo.until(
        lambda: state().restarts == stopped.restarts + 1, timeout_s=120, what="the pod restarts"
    )
    demo.until_answers()
    demo.wait_serving()
    assert state().uid == stopped.uid
    assert unchanged([neighbour], demo.pods("worker")[1:])
    assert unchanged(bystanders, demo.pods("scheduler") + demo.pods("frontend"))


STOP_RANK = """
import os, pathlib, signal
ranks = [
    int(entry.name)
    for entry in pathlib.Path("/proc").iterdir()
    if entry.name.isdecimal() and b"services.worker.rank" in (entry / "cmdline").read_bytes()
]
assert len(ranks) == 1, ranks
os.kill(ranks[0], signal.SIGSTOP)
"""


def test_the_standby_leads_when_the_leader_is_killed_under_load(
    demo: Cluster, figures: Figures
) -> None:
    leader = demo.leader()
    with demo.load(**LOAD, seconds=LEASE_S + 20) as load:
        time.sleep(3)
        started = time.monotonic()
        demo.in_namespace("delete", "pod", leader, "--grace-period=0", "--force")
        demo.until(
            lambda: demo.leader() not in ("", leader), timeout_s=LEASE_S + 2, what="a new leader"
        )
        figures.add("leader killed to new leader", time.monotonic() - started)
        demo.until_answers()
        figures.add("leader killed to next token", time.monotonic() - started)
        outcomes = load.outcomes()
    for outcome in failures(outcomes):
        assert outcome["status"] == 503, outcome  # it had tokens; it may be tried again
    assert len(failures(outcomes)) <= LOAD["clients"]  # type: ignore[operator]
    assert outcomes[-1]["status"] == 200
    demo.wait_serving()


@pytest.mark.parametrize("deployment", ["orcinus-frontend", "orcinus-scheduler"])
def test_a_rollout_under_load_fails_no_request(
    demo: Cluster, figures: Figures, deployment: str
) -> None:
    with demo.load(**LOAD, seconds=60) as load:
        time.sleep(3)
        started = time.monotonic()
        demo.in_namespace("rollout", "restart", f"deployment/{deployment}")
        demo.in_namespace("rollout", "status", f"deployment/{deployment}", "--timeout=150s")
        figures.add(f"rollout of {deployment} under load", time.monotonic() - started)
        outcomes = load.outcomes()
    assert failures(outcomes) == []
    assert len(outcomes) > 20
    demo.wait_serving()
