"""The demo overlay as its users have it, and what it does when its parts die."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.cluster import CLIENT, FRONTEND, HANG_S, KUBECTL_TIMEOUT_S, Cluster, Pod
from tests.cluster.conftest import spread
from tests.cluster.figures import Figures
from tests.cluster.streams import LOAD, PROMPT, Streams, failures, unchanged
from tests.k8s.manifests import Manifests, render_directory
from tests.requirements.locks import REQUIREMENTS, entries
from tests.system.stack import serving

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(HANG_S)]

ROOT = Path(__file__).parents[3]
LEASE_S = 8
UNREADY_S = 10
SLACK = 2
"""Factor by which promised times may be longer on a machine that others use, too."""

API_AWAY_S = 60


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


@pytest.mark.parametrize("component", ["frontend", "scheduler", "worker"])
def test_an_image_lists_what_is_installed_in_it(demo: Cluster, component: str) -> None:
    pod = demo.pods(component)[0].name
    bill = json.loads(demo.insist(lambda: demo.in_namespace("exec", pod, "--", "cat", SBOM)))
    found = demo.insist(lambda: demo.in_namespace("exec", pod, "--", "python", "-c", INSTALLED))
    assert bill["bomFormat"] == "CycloneDX"
    listed = {(item["name"].lower(), item["version"]) for item in bill["components"]}
    assert listed == {(name.lower(), version) for name, version in json.loads(found)}
    locks = entries(REQUIREMENTS / "scheduler.txt")
    (grpcio,) = [lock.specifier for lock in locks if lock.name == "grpcio"]
    assert any(name == "grpcio" and grpcio.contains(version) for name, version in listed)


SBOM = "/sbom.cdx.json"
INSTALLED = """
import importlib.metadata, json
print(json.dumps([(one.name, one.version) for one in importlib.metadata.distributions()]))
"""


def test_make_deploy_narrows_the_schedulers_way_to_this_api_server(demo: Cluster) -> None:
    subprocess.run(
        [ROOT / "k8s" / "compose.sh", "deploy", "demo"],
        env={**os.environ, "API_SERVER": "auto"},
        check=True,
        timeout=KUBECTL_TIMEOUT_S,
    )
    composed = Manifests(list(yaml.safe_load_all(render_directory(ROOT / "build" / "deploy"))))
    policy = composed.get("NetworkPolicy", "orcinus-scheduler-api")
    demo.insist(lambda: demo.kubectl("apply", "--dry-run=server", "-f-", text=json.dumps(policy)))
    servers = {
        (peer["ipBlock"]["cidr"].partition("/")[0], item["port"])
        for rule in policy["spec"]["egress"]
        for peer in rule["to"]
        for item in rule["ports"]
    }
    found = {
        name: json.loads(demo.kubectl("-n", "default", "get", name, "kubernetes", "-o", "json"))
        for name in ("service", "endpoints")
    }
    assert servers == {(found["service"]["spec"]["clusterIP"], 443)} | {
        (address["ip"], port["port"])
        for subset in found["endpoints"]["subsets"]
        for address in subset["addresses"]
        for port in subset["ports"]
    }


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
    demo: Cluster, figures: Figures, streams: Streams, index: int
) -> None:
    workers = demo.pods("worker")
    lost, others = workers[index], [w for w in workers if w is not workers[index]]
    bystanders = demo.pods("scheduler") + demo.pods("frontend")

    def is_replaced() -> bool:
        uids = {pod.uid for pod in demo.pods("worker")}
        return len(uids) == len(workers) and lost.uid not in uids

    with streams.through(f"worker {index} deleted"):
        started = time.monotonic()
        demo.delete_pod(lost, "--grace-period=0", "--force")
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
    demo.insist(lambda: demo.signal_rank(stopped, signal.SIGSTOP))

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


def test_the_standby_leads_when_the_leader_is_killed_under_load(
    demo: Cluster, figures: Figures, streams: Streams
) -> None:
    leader = demo.leading_pod()
    with streams.through("leader killed"):
        started = time.monotonic()
        demo.delete_pod(leader, "--grace-period=0", "--force")
        demo.until(lambda: demo.leader() not in ("", leader.name), what="a new leader")
        led_s = time.monotonic() - started
        figures.add("leader killed to new leader", led_s)
        assert led_s < SLACK * (LEASE_S + 2)
        demo.until_answers()
        figures.add("leader killed to next token", time.monotonic() - started)
    demo.wait_serving()


def test_streams_do_not_notice_an_api_server_that_is_away(demo: Cluster, streams: Streams) -> None:
    leader = demo.leading_pod()
    pods = [pod for name in ("scheduler", "worker", "frontend") for pod in demo.pods(name)]
    with streams.through(f"API server away for {API_AWAY_S} s"):
        with demo.api_server_away():
            time.sleep(API_AWAY_S)
        demo.until_answers()
    demo.wait_serving()
    assert demo.leading_pod() == leader
    assert unchanged(
        pods, [pod for name in ("scheduler", "worker", "frontend") for pod in demo.pods(name)]
    )


@pytest.mark.parametrize("deployment", ["orcinus-frontend", "orcinus-scheduler", "orcinus-worker"])
def test_a_rollout_under_load_fails_no_request(
    demo: Cluster, figures: Figures, streams: Streams, deployment: str
) -> None:
    component = deployment.removeprefix("orcinus-")
    before = demo.pods(component)
    with streams.through(f"rollout of {deployment}"), demo.load(**LOAD) as load:
        started = time.monotonic()
        demo.insist(lambda: demo.in_namespace("rollout", "restart", f"deployment/{deployment}"))
        demo.wait_serving()
        figures.add(f"rollout of {deployment} under load", time.monotonic() - started)
        outcomes = load.finish()
    assert failures(outcomes) == []
    assert not {pod.uid for pod in before} & {pod.uid for pod in demo.pods(component)}


ODD = "odd-worker"


@pytest.fixture
def odd_worker(demo: Cluster) -> Iterator[str]:
    """A pod like the workers' with another block size, which nobody replaces."""
    pod = demo.get("deployment", "orcinus-worker")["spec"]["template"]
    pod |= {"apiVersion": "v1", "kind": "Pod"}
    pod["metadata"] = {"name": ODD, "labels": pod["metadata"]["labels"]}
    pod["spec"]["containers"][0]["env"].append({"name": "ORCINUS_BLOCK_SIZE", "value": "32"})
    demo.insist(lambda: demo.in_namespace("apply", "-f", "-", text=json.dumps(pod)))
    try:
        yield ODD
    finally:
        demo.insist(lambda: demo.in_namespace("delete", "pod", ODD, "--ignore-not-found"))


def test_a_worker_that_does_not_fit_is_named_and_streams_go_on_without_it(
    demo: Cluster, streams: Streams, odd_worker: str
) -> None:
    says = f"{odd_worker}:50053 at"

    def is_named() -> bool:
        log = demo.in_namespace("logs", demo.leading_pod().name)
        return says in log and "does not fit: block_size 32, not 16" in log

    demo.until(is_named, what="the leader names the odd worker while the pipeline serves")
    with streams.through("a worker is killed beside one that does not fit"):
        good = next(pod for pod in demo.pods("worker") if pod.name != odd_worker)
        demo.delete_pod(good, "--grace-period=0", "--force")
        demo.until_answers()
    assert is_named()


def test_a_lost_node_is_done_without_and_nobody_has_to_help(
    demo: Cluster, figures: Figures, streams: Streams
) -> None:
    assert spread(demo)
    client = demo.pod(CLIENT)
    assert client is not None
    workers = demo.pods("worker")
    lost = next(worker for worker in workers if worker.node != client.node)
    kept = [worker for worker in workers if worker.node != lost.node]
    with streams.through("node cut"), demo.node_away(lost.node):
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
