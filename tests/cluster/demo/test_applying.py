"""Applying to what is there: a second deployment, the same again, an autoscaler's number."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import KUBECTL_TIMEOUT_S, NAMESPACE, OVERLAYS, Cluster
from tests.k8s.manifests import K8S

pytestmark = pytest.mark.cluster

SECOND = OVERLAYS / "second"
KINDS = "deployment,service,networkpolicy,role,rolebinding,serviceaccount,configmap"


def applied(cluster: Cluster, overlay: Path, *options: str) -> list[str]:
    """Applies an overlay once and returns what kubectl says of each object."""
    return cluster.kubectl("apply", *options, "-k", str(overlay)).splitlines()


def of_instance(cluster: Cluster, kind: str, instance: str) -> list[dict[str, Any]]:
    """Returns the objects of one deployment."""
    found = cluster.get(kind, "-l", f"app.kubernetes.io/instance={instance}")
    items: list[dict[str, Any]] = found["items"]
    return items


def test_applying_twice_changes_nothing_and_server_side_neither(demo: Cluster) -> None:
    overlay = OVERLAYS / "demo"
    demo.apply(overlay)
    assert [line for line in applied(demo, overlay) if not line.endswith(" unchanged")] == []
    before = {it["metadata"]["name"]: it["metadata"]["generation"] for it in deployments(demo)}
    applied(demo, overlay, "--server-side")  # a conflict would fail
    applied(demo, overlay, "--server-side")
    assert before == {
        it["metadata"]["name"]: it["metadata"]["generation"] for it in deployments(demo)
    }
    applied(demo, overlay)  # writes the annotation of a client-side apply, and no more
    assert [line for line in applied(demo, overlay) if not line.endswith(" unchanged")] == []
    assert before == {
        it["metadata"]["name"]: it["metadata"]["generation"] for it in deployments(demo)
    }


def deployments(cluster: Cluster) -> list[dict[str, Any]]:
    """Returns the Deployments of the first deployment."""
    return of_instance(cluster, "deployment", "orcinus")


def test_a_second_deployment_serves_beside_the_first(demo: Cluster) -> None:
    workers = {it["metadata"]["uid"] for it in of_instance(demo, "pods", "orcinus")}
    demo.insist(lambda: applied(demo, SECOND))
    try:
        host = "orcinus-frontend-b"
        body = {"prompt": "Hello", "max_tokens": 4, "temperature": 0, "return_token_ids": True}
        second = demo.insist(
            lambda: demo.ask_once("complete", host=host, port=8000, body=body),
            unless=lambda answer: answer["status"] != 200,
        )
        first = demo.complete("Hello", max_tokens=4)
        assert first["body"]["choices"] == second["body"]["choices"]
        holders = {
            instance: demo.get("lease", name)["spec"]["holderIdentity"].partition("_")[0]
            for instance, name in (
                ("orcinus", "orcinus-scheduler"),
                ("orcinus-b", "orcinus-scheduler-b"),
            )
        }
        for instance, holder in holders.items():
            names = [it["metadata"]["name"] for it in of_instance(demo, "pods", instance)]
            assert holder in names
            endpoints = demo.get("endpoints", "orcinus-frontend" + instance.removeprefix("orcinus"))
            targets = [
                address["targetRef"]["name"]
                for subset in endpoints["subsets"]
                for address in subset.get("addresses", [])
            ]
            assert targets
            assert set(targets) <= set(names)
        assert workers <= {it["metadata"]["uid"] for it in of_instance(demo, "pods", "orcinus")}
    finally:
        remove = ("delete", KINDS, "-l", "app.kubernetes.io/instance=orcinus-b")
        demo.insist(lambda: demo.in_namespace(*remove, "--wait=false"))
        lease = ("delete", "lease", "orcinus-scheduler-b", "--ignore-not-found")
        demo.insist(lambda: demo.in_namespace(*lease))
    demo.wait_serving()


LIMITED = "orcinus-limited"
QUOTA = f"""apiVersion: v1
kind: ResourceQuota
metadata: {{name: limits, namespace: {LIMITED}}}
spec: {{hard: {{limits.cpu: "10", limits.memory: 8Gi}}}}
"""


def test_a_quota_that_demands_cpu_limits_admits_every_pod(cluster: Cluster, tmp_path: Path) -> None:
    overlay = tmp_path / "limited"
    overlay.mkdir()
    k8s = Path(os.path.relpath(K8S, overlay.resolve()))
    components = [str(k8s / "components" / it) for it in ("cpu-limits", "kubernetes-1.20")]
    kustomization = {
        "namespace": LIMITED,
        "resources": [str(k8s / "base")],
        "components": components,
    }
    (overlay / "kustomization.yaml").write_text(json.dumps(kustomization))
    try:
        cluster.insist(lambda: cluster.kubectl("create", "namespace", LIMITED))
        cluster.insist(lambda: cluster.kubectl("apply", "-f", "-", text=QUOTA))
        cluster.apply(overlay)
        query = ("-n", LIMITED, "get", "replicasets", "-o", "jsonpath={.items[*].status.replicas}")
        cluster.until(
            lambda: cluster.kubectl(*query).split() == ["2", "2", "2"], what="all pods are made"
        )
    finally:
        cluster.insist(
            lambda: cluster.kubectl("delete", "ns", LIMITED, "--ignore-not-found", "--wait=false")
        )


SCALER = """kind: HorizontalPodAutoscaler
metadata:
  name: orcinus-frontend
  namespace: orcinus
spec:
  scaleTargetRef:
    kind: Deployment
    name: orcinus-frontend
"""


def test_an_autoscaler_takes_over_without_a_drop(demo: Cluster, tmp_path: Path) -> None:
    """Runs the hand-over of `make deploy`. The cluster is too old for the autoscaler itself."""
    overlay = tmp_path / "scaled"
    overlay.mkdir()
    to_demo = os.path.relpath(OVERLAYS / "demo", overlay.resolve())
    patch = (
        "{apiVersion: apps/v1, kind: Deployment, metadata: {name: orcinus-frontend}, "
        "spec: {replicas: null}}"
    )
    kustomization = {"resources": [to_demo], "patches": [{"patch": patch}]}
    (overlay / "kustomization.yaml").write_text(json.dumps(kustomization))
    applied(demo, OVERLAYS / "demo")  # client-side
    demo.in_namespace("scale", "deployment/orcinus-frontend", "--replicas=3")
    rendered = f"#!/bin/sh\n[ \"$1\" != kustomize ] || {{ cat <<'END'\n{SCALER}END\nexit; }}\n"
    stand_in = tmp_path / "bin" / "kubectl"
    stand_in.parent.mkdir()
    stand_in.write_text(f'{rendered}exec {shutil.which("kubectl")} "$@"\n')
    stand_in.chmod(0o755)
    path = f"{stand_in.parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [K8S / "keep-replicas.sh", str(overlay)],
        env={**os.environ, "PATH": path},
        check=True,
        timeout=KUBECTL_TIMEOUT_S,
    )
    applied(demo, overlay, "--server-side", "--force-conflicts")
    try:
        made = demo.get("deployment", "orcinus-frontend", "--show-managed-fields")
        assert (made["metadata"]["namespace"], made["spec"]["replicas"]) == (NAMESPACE, 3)
        assert owned_by(made, "autoscaling") == [{"f:spec": {"f:replicas": {}}}]
        assert owned_by(made, "kubectl-client-side-apply") == []
    finally:
        applied(demo, OVERLAYS / "demo", "--server-side", "--force-conflicts")
    assert demo.get("deployment", "orcinus-frontend")["spec"]["replicas"] == 2


def owned_by(item: dict[str, Any], manager: str) -> list[dict[str, Any]]:
    """Returns the fields of an object that a field manager owns."""
    entries = item["metadata"]["managedFields"]
    return [entry["fieldsV1"] for entry in entries if entry["manager"] == manager]
