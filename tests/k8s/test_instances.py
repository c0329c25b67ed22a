"""Two deployments in one namespace share nothing: `nameSuffix` is all that an overlay says."""

import json
import re
from functools import cache
from itertools import permutations
from pathlib import Path

import pytest
import yaml

from services.scheduler.cluster.kubernetes_client import KubernetesClient
from tests.fake_kubernetes import NAMESPACE, fake_kubernetes, write_kubeconfig
from tests.k8s.manifests import (
    COMPONENT,
    COMPOSITIONS,
    INSTANCE,
    Composition,
    Manifests,
    Object,
    Workload,
    environment,
    render,
    rendered,
    replacements,
    selects,
)
from tests.k8s.test_policy import may_reach
from tests.k8s.test_render import FOREIGN, VERSIONS, validate

OTHER = "orcinus-b"
UNLABELLED = {"Namespace", "PriorityClass", "Issuer", "Certificate", "ConfigMap"}
"""Kinds that nothing selects by the label of a deployment."""

SELECTOR = re.compile(r"(\w+)\{([^}]*)\}")
PORTS = (8000, 50051, 50052, 50053, 50060, 9464, 29500, 41234, 4317)
EACH = pytest.mark.parametrize(
    "name",
    [
        "base",
        pytest.param("everything", marks=pytest.mark.thorough),
        pytest.param("everything, lws", marks=pytest.mark.thorough),
    ],
)


@cache
def second(name: str) -> Manifests:
    """The composition with a suffix to its names, and nothing else changed by hand."""
    first = COMPOSITIONS[name]
    options = {**first.options, "nameSuffix": "-b"}
    if "mtls/cert-manager" in first.components:
        options["replacements"] = replacements("gpu")
    made = Composition(first.resource, first.components, first.n_stages, options=options)
    return Manifests(list(yaml.load_all(render(made), yaml.CSafeLoader)))


def identities(manifests: Manifests) -> set[tuple[str, str]]:
    """Kinds and names of all that two deployments must not share."""
    return {
        (item["kind"], item["metadata"]["name"])
        for item in manifests.objects
        if item["kind"] != "Namespace"
    }


def selectors(manifests: Manifests) -> list[tuple[str, Object]]:
    """Every selector of pods of one deployment, with the name of the object that has it."""
    found: list[tuple[str, Object]] = []
    for item in manifests.of("Service"):
        found.append((item["metadata"]["name"], item["spec"]["selector"]))
    for item in manifests.of("Deployment", "PodDisruptionBudget", "PodMonitor"):
        found.append((item["metadata"]["name"], item["spec"]["selector"]["matchLabels"]))
    for workload in manifests.services():
        for spread in workload.pod["topologySpreadConstraints"]:
            found.append((workload.name, spread["labelSelector"]["matchLabels"]))
    return found


@EACH
def test_no_object_is_in_both_but_the_namespace(name: str) -> None:
    assert not identities(rendered(name)) & identities(second(name))
    assert rendered(name).of("Namespace") == second(name).of("Namespace")


@EACH
def test_every_object_carries_its_instance(name: str) -> None:
    for manifests, instance in ((rendered(name), "orcinus"), (second(name), OTHER)):
        labels = {
            (item["kind"], item["metadata"]["name"]): item["metadata"].get("labels", {})
            for item in manifests.objects
            if item["kind"] not in UNLABELLED
        }
        assert {it.get(INSTANCE) for it in labels.values()} == {instance}, labels


@EACH
def test_no_selector_of_one_selects_pods_of_the_other(name: str) -> None:
    for mine, theirs in permutations((rendered(name), second(name))):
        for owner, selector in selectors(mine):
            assert any(selects(selector, it.labels) for it in mine.workloads()), owner
            assert not any(selects(selector, it.labels) for it in theirs.workloads()), owner


@EACH
def test_no_pod_of_one_may_connect_to_the_other(name: str) -> None:
    first, other = rendered(name), second(name)
    both = Manifests([*first.objects, *other.objects])
    for mine, theirs in permutations((first, other)):
        for source in mine.workloads():
            reached = [
                (source.name, target.name, port)
                for target in theirs.workloads()
                for port in PORTS
                if may_reach(both, source, target, port)
            ]
            assert not reached
    assert may_reach(both, other.workload("frontend"), other.workload("scheduler"), 50052)
    assert may_reach(both, other.workload("scheduler"), other.workload("worker"), 50053)


@EACH
def test_pods_refer_to_what_is_there(name: str) -> None:
    manifests = second(name)
    there = {(item["kind"], item["metadata"]["name"]) for item in manifests.objects}
    for workload in manifests.services():
        pod = workload.pod
        used = {("ServiceAccount", pod["serviceAccountName"])}
        used |= {("ConfigMap", it["configMapRef"]["name"]) for it in workload.container["envFrom"]}
        for volume in pod["volumes"]:
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                used.add(("PersistentVolumeClaim", claim))
        if "priorityClassName" in pod:
            used.add(("PriorityClass", pod["priorityClassName"]))
        assert used <= there


@EACH
def test_variables_name_what_the_deployment_has(name: str) -> None:
    manifests = second(name)
    frontend, scheduler = (
        environment(manifests, manifests.workload(it)) for it in ("frontend", "scheduler")
    )
    services = {item["metadata"]["name"] for item in manifests.of("Service")}
    assert frontend["ORCINUS_SCHEDULER"] == "orcinus-scheduler-b:50052"
    assert scheduler["ORCINUS_LEASE_NAME"] == "orcinus-scheduler-b"
    assert scheduler["ORCINUS_PIPELINE_ID"] == OTHER
    assert "orcinus-scheduler-b" in services
    role, *_ = manifests.of("Role")
    (leases,) = (rule for rule in role["rules"] if rule["resources"] == ["leases"])
    assert leases["resourceNames"] == ["orcinus-scheduler-b"]
    for variables in (frontend, scheduler):
        collector = variables.get("OTEL_EXPORTER_OTLP_ENDPOINT", "http://none:4317")
        assert collector in {*(f"http://{it}:4317" for it in services), "http://none:4317"}


@pytest.mark.thorough
def test_certificates_make_secrets_of_their_own() -> None:
    manifests = second("everything")
    issuers = {item["metadata"]["name"] for item in manifests.of("Issuer")}
    made = {item["spec"]["secretName"] for item in manifests.of("Certificate")}
    assert all(name.endswith("-tls-b") for name in made)
    assert {item["spec"]["issuerRef"]["name"] for item in manifests.of("Certificate")} <= issuers
    mounted = {
        volume["secret"]["secretName"]
        for workload in manifests.services()
        for volume in workload.pod["volumes"]
        if "secret" in volume
    }
    by_hand = {"orcinus-api-keys", "orcinus-receipt-keys"}
    assert mounted - by_hand == made - {"orcinus-authority-tls-b"}
    public = manifests.get("Certificate", "orcinus-public-tls-b")["spec"]
    assert public["dnsNames"][0] == "orcinus-frontend-b.orcinus.svc"


@pytest.mark.thorough
@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_field(version: str) -> None:
    for item in second("everything").objects:
        if item["kind"] not in FOREIGN:
            validate(item, version)


def labelled(manifests: Manifests, component: str) -> Workload:
    """One workload, with the label of its deployment."""
    workload = manifests.workload(component)
    assert workload.labels[COMPONENT] == component
    assert workload.labels[INSTANCE] in ("orcinus", OTHER)
    return workload


async def test_a_scheduler_finds_the_workers_of_its_own_deployment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    both = {"a": rendered("base"), "b": second("base")}
    async with fake_kubernetes() as api:
        monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(api, tmp_path)))
        for name, manifests in both.items():
            labels = labelled(manifests, "worker").labels
            api.set_pod(f"worker-{name}", ip="10.0.0.1", labels=labels)
        async with KubernetesClient(call_timeout_s=5, silence_limit_s=60) as client:
            for name, manifests in both.items():
                variables = environment(manifests, labelled(manifests, "scheduler"))
                source = client.pods(NAMESPACE, variables["ORCINUS_WORKER_SELECTOR"])
                pods, _ = await source.list_pods()
                assert [pod.name for pod in pods] == [f"worker-{name}"]


def test_no_panel_of_the_dashboard_mixes_two_deployments() -> None:
    dashboard = json.loads(rendered("monitoring").config("orcinus-dashboard")["orcinus.json"])
    variables = [item["name"] for item in dashboard["templating"]["list"]]
    assert variables == ["datasource", "namespace", "instance"]
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            selected = SELECTOR.findall(target["expr"])
            assert selected
            for metric, labels in selected:
                label = "app_kubernetes_io_instance"
                if metric.startswith("kube_"):  # it has not the label, but the targets have
                    assert f'up{{namespace="$namespace", {label}!="$instance"}}' in target["expr"]
                elif metric != "up":
                    assert f'{label}="$instance"' in labels, target["expr"]
