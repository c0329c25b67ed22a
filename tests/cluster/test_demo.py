"""The demo overlay as its users have it, and what it does when its parts die."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import CLIENT, FRONTEND, HANG_S, Cluster, Pod
from tests.cluster.conftest import Figures, spread
from tests.system.stack import serving

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(HANG_S)]

ROOT = Path(__file__).parents[2]
LEASE_S = 15
UNREADY_S = 10
SLACK = 2
"""Factor by which promised times may be longer on a machine that others use, too."""

PROMPT = "If the file does not exist,"
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


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """The answer of a run on this machine, made before the cluster needs its processors."""
    with serving(ROOT / "models" / "demo", stages=2) as local:
        return local.complete(PROMPT, max_tokens=20, temperature=0)


def test_completions_through_the_services_equal_a_local_run(
    expected: dict[str, Any], demo: Cluster
) -> None:
    http = demo.complete(PROMPT, max_tokens=20)
    grpc = demo.insist(
        lambda: demo.ask_once(
            "generate",
            target=f"{FRONTEND}:50051",
            prompt=PROMPT,
            options={"max_tokens": 20, "sampling": {"temperature": 0}},
        ),
        unless=lambda answer: answer["code"] == "UNAVAILABLE",
    )
    assert http["body"]["choices"][0]["text"] == expected["text"]
    assert http["body"]["choices"][0]["token_ids"] == expected["token_ids"]
    assert grpc == {"code": "OK", "text": expected["text"], "token_ids": expected["token_ids"]}


def test_stages_run_on_different_nodes(demo: Cluster) -> None:
    assert len(demo.pods("worker")) == 2
    assert spread(demo)


def test_every_pod_is_ready_and_one_scheduler_leads(demo: Cluster) -> None:
    schedulers = demo.pods("scheduler")
    assert len(schedulers) == 2
    assert demo.leading_pod().uid in {pod.uid for pod in schedulers}
    for component in ("frontend", "scheduler", "worker"):
        for pod in demo.pods(component):
            assert pod.restarts == 0, pod


@pytest.mark.parametrize("index", [0, 1])
def test_a_deleted_worker_comes_back_and_nobody_else_restarts(
    demo: Cluster, figures: Figures, index: int
) -> None:
    workers = demo.pods("worker")
    lost, others = workers[index], [w for w in workers if w is not workers[index]]
    bystanders = demo.pods("scheduler") + demo.pods("frontend")
    started = time.monotonic()
    demo.delete_pod(lost)

    def is_replaced() -> bool:
        uids = {pod.uid for pod in demo.pods("worker")}
        return len(uids) == len(workers) and lost.uid not in uids

    demo.until(is_replaced, what="a new worker")
    demo.until_answers()
    figures.add(f"worker {index} deleted to next token", time.monotonic() - started)
    demo.wait_serving()
    assert unchanged(others, [w for w in demo.pods("worker") if w.uid in {o.uid for o in others}])
    assert unchanged(bystanders, demo.pods("scheduler") + demo.pods("frontend"))


def test_a_hung_rank_makes_its_pod_unready_and_restarts_it_alone(
    demo: Cluster, figures: Figures
) -> None:
    stopped, neighbour = demo.pods("worker")
    bystanders = demo.pods("scheduler") + demo.pods("frontend")
    demo.insist(
        lambda: demo.in_namespace("exec", "-i", stopped.name, "--", "python", "-", text=STOP_RANK)
    )

    def state() -> Pod:
        pod = demo.pod(stopped.name)
        assert pod is not None, "the pod itself has gone"
        assert pod.uid == stopped.uid, "the pod itself was replaced"
        return pod

    unready_s = demo.until(
        lambda: not state().is_ready or state().restarts > stopped.restarts,
        what="the pod is unready",
    )
    figures.add("rank stopped to pod unready", unready_s)
    assert unready_s < SLACK * UNREADY_S
    demo.until(lambda: state().restarts > stopped.restarts, what="the pod restarts")
    demo.until_answers()
    demo.wait_serving()
    assert unchanged([neighbour], [w for w in demo.pods("worker") if w.uid == neighbour.uid])
    assert unchanged(bystanders, demo.pods("scheduler") + demo.pods("frontend"))


STOP_RANK = """
import contextlib, os, pathlib, signal
ranks = []
for entry in pathlib.Path("/proc").iterdir():
    with contextlib.suppress(OSError):  # a probe's process, that has ended
        if entry.name.isdecimal() and b"services.worker.rank" in (entry / "cmdline").read_bytes():
            ranks.append(int(entry.name))
assert len(ranks) == 1, ranks
os.kill(ranks[0], signal.SIGSTOP)
"""


def test_the_standby_leads_when_the_leader_is_killed_under_load(
    demo: Cluster, figures: Figures
) -> None:
    leader = demo.leading_pod()
    with demo.load(**LOAD) as load:
        started = time.monotonic()
        demo.delete_pod(leader, "--grace-period=0", "--force")
        demo.until(lambda: demo.leader() not in ("", leader.name), what="a new leader")
        led_s = time.monotonic() - started
        figures.add("leader killed to new leader", led_s)
        assert led_s < SLACK * (LEASE_S + 2)
        demo.until_answers()
        figures.add("leader killed to next token", time.monotonic() - started)
        outcomes = load.finish()
    for outcome in failures(outcomes):
        assert outcome["status"] == 503, outcome  # it had tokens; it may be tried again
    failed = Counter(outcome["client"] for outcome in failures(outcomes))
    assert set(failed.values()) <= {1}, "each had one request when the leader was lost"
    last = {outcome["client"]: outcome["status"] for outcome in outcomes}
    assert list(last.values()) == [200] * len(last)
    demo.wait_serving()


@pytest.mark.parametrize("deployment", ["orcinus-frontend", "orcinus-scheduler", "orcinus-worker"])
def test_a_rollout_under_load_fails_no_request(
    demo: Cluster, figures: Figures, deployment: str
) -> None:
    component = deployment.removeprefix("orcinus-")
    before = demo.pods(component)
    with demo.load(**LOAD) as load:
        started = time.monotonic()
        demo.insist(lambda: demo.in_namespace("rollout", "restart", f"deployment/{deployment}"))
        demo.wait_serving()
        figures.add(f"rollout of {deployment} under load", time.monotonic() - started)
        outcomes = load.finish()
    assert failures(outcomes) == []
    assert not {pod.uid for pod in before} & {pod.uid for pod in demo.pods(component)}


def test_a_lost_node_is_done_without_and_nobody_has_to_help(
    demo: Cluster, figures: Figures
) -> None:
    assert spread(demo)
    client = demo.pod(CLIENT)
    assert client is not None
    workers = demo.pods("worker")
    lost = next(worker for worker in workers if worker.node != client.node)
    kept = [worker for worker in workers if worker.node != lost.node]
    with demo.node_away(lost.node):
        started = time.monotonic()

        def are_elsewhere() -> bool:
            now = demo.pods("worker")
            return len(now) == len(workers) and all(
                pod.is_ready and pod.node != lost.node for pod in now
            )

        demo.until(are_elsewhere, what="all workers are ready on other nodes")
        figures.add("node cut to all stages loaded", time.monotonic() - started)
        demo.until_answers()
        figures.add("node cut to next token", time.monotonic() - started)
        assert unchanged(kept, [w for w in demo.pods("worker") if w.uid in {k.uid for k in kept}])
    demo.wait_serving()
    demo.until(lambda: lost.node in demo.nodes(), what="the node is back")
