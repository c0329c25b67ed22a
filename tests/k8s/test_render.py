"""Everything renders without a warning, and is what the current Kubernetes takes."""

import json
import re
from functools import cache
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.exposition import Samples
from tests.k8s.manifests import (
    COMPOSITIONS,
    K8S,
    OTHER_NAMESPACE,
    Workload,
    each_composition,
    rendered,
)
from tests.registries import registries

VERSIONS = ["1.32", kubernetes_validate.latest_version()]
FOREIGN = {
    "Certificate",
    "Issuer",
    "LeaderWorkerSet",
    "PodMonitor",
    "PrometheusRule",
}
"""Kinds of others, whose schemas Kubernetes does not have; only components may name them."""


def validate(item: dict[str, Any], version: str) -> None:
    """Fails if a version of Kubernetes does not know an object as it is."""
    complaint = _complaint(json.dumps(item), version)
    assert complaint == "", f"{item['kind']} {item['metadata']['name']}: {complaint}"


@cache  # compositions have most objects in common
def _complaint(item: str, version: str) -> str:
    try:
        kubernetes_validate.validate(json.loads(item), version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{error.message} at {list(error.path)}"
    return ""


@each_composition()
@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_field(name: str, version: str) -> None:
    objects = rendered(name).objects
    assert objects
    for item in objects:
        if item["kind"] not in FOREIGN:
            validate(item, version)


@pytest.mark.parametrize("name", ["lws", "everything, lws"])
@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_the_pods_of_a_leader_worker_set(name: str, version: str) -> None:
    template = rendered(name).get("LeaderWorkerSet", "orcinus-worker")["spec"]
    template = template["leaderWorkerTemplate"]["workerTemplate"]
    validate({"apiVersion": "v1", "kind": "Pod", **template, "metadata": {"name": "x"}}, version)


@pytest.mark.parametrize("name", ["base", *(n for n in COMPOSITIONS if n.startswith("overlays/"))])
def test_what_is_deployed_alone_needs_nobody_elses_kinds(name: str) -> None:
    assert not FOREIGN & {item["kind"] for item in rendered(name).objects}


@each_composition()
def test_every_object_is_named_once_and_labelled(name: str) -> None:
    manifests = rendered(name)
    identities = [
        (item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"])
        for item in manifests.objects
    ]
    assert len(set(identities)) == len(identities)
    for item in manifests.objects:
        if item["kind"] not in {"Issuer", "Certificate", "ConfigMap"}:
            labels = item["metadata"]["labels"]
            assert labels["app.kubernetes.io/part-of"] == "orcinus", item["metadata"]["name"]


@each_composition()
def test_everything_is_in_the_namespace(name: str) -> None:
    expected = OTHER_NAMESPACE if name == "another namespace" else "orcinus"
    for item in rendered(name).objects:
        namespace = item["metadata"].get("namespace")
        if item["kind"] == "Namespace":
            assert item["metadata"]["name"] == expected
        is_of_cluster = item["kind"] in {"Namespace", "PriorityClass"}
        assert namespace == (None if is_of_cluster else expected), item["metadata"]


@each_composition()
def test_names_of_config_maps_carry_their_hash_wherever_they_are_used(name: str) -> None:
    manifests = rendered(name)
    there = {item["metadata"]["name"] for item in manifests.of("ConfigMap")}
    assert all(re.search(r"-[a-z0-9]{10}$", found) for found in there)
    for workload in manifests.workloads():
        # The last two are made by the cluster and by its operator.
        assert _config_maps(workload) <= there | {"kube-root-ca.crt", "orcinus-authorities"}


def _config_maps(workload: Workload) -> set[str]:
    container, volumes = workload.container, workload.pod.get("volumes", [])
    references = [source["configMapRef"] for source in container.get("envFrom", [])]
    references += [
        variable["valueFrom"]["configMapKeyRef"]
        for variable in container.get("env", [])
        if "configMapKeyRef" in variable.get("valueFrom", {})
    ]
    references += [volume["configMap"] for volume in volumes if "configMap" in volume]
    references += [
        source["configMap"]
        for volume in volumes
        for source in volume.get("projected", {}).get("sources", [])
        if "configMap" in source
    ]
    return {reference["name"] for reference in references}


def test_the_dashboard_and_the_rules_ask_for_the_same_metrics() -> None:
    manifests = rendered("monitoring")
    dashboard = json.loads(manifests.config("orcinus-dashboard")["orcinus.json"])
    on_dashboard = _metrics(
        target["expr"] for panel in dashboard["panels"] for target in panel["targets"]
    )
    (rules,) = manifests.get("PrometheusRule", "orcinus")["spec"]["groups"]
    in_rules = _metrics(rule["expr"] for rule in rules["rules"])
    assert in_rules <= on_dashboard


async def test_what_is_asked_for_is_what_services_tell() -> None:
    manifests = rendered("everything")
    dashboard = json.loads(manifests.config("orcinus-dashboard")["orcinus.json"])
    variables = [item["query"] for item in dashboard["templating"]["list"]]
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    (rules,) = manifests.get("PrometheusRule", "orcinus")["spec"]["groups"]
    expressions += [rule["expr"] for rule in rules["rules"]]
    scalers = manifests.of("HorizontalPodAutoscaler")
    scaled_by = [
        metric["external"]["metric"]["name"] for it in scalers for metric in it["spec"]["metrics"]
    ]
    assert scaled_by
    told = {name for it in (await registries()).values() for name in Samples.of(it).names}
    assert _metrics([*variables, *expressions, *scaled_by]) - told == set()


def _metrics(expressions: Any) -> set[str]:
    return {
        found
        for text in expressions
        for found in re.findall(r"\b(?:orcinus|gen_ai_server)_[a-z_]+", text)
    }


def test_every_alert_is_explained() -> None:
    (rules,) = rendered("monitoring").get("PrometheusRule", "orcinus")["spec"]["groups"]
    page = (K8S.parent / "docs" / "operations" / "watch.md").read_text(encoding="utf-8")
    assert [rule["alert"] for rule in rules["rules"] if f"`{rule['alert']}`" not in page] == []


def test_every_component_is_explained() -> None:
    page = (K8S.parent / "docs" / "operations" / "deploy.md").read_text(encoding="utf-8")
    names = [path.name for path in (K8S / "components").iterdir()]
    assert [name for name in names if f"`{name}`" not in page] == []


@pytest.mark.parametrize("name", ["otel-collector", "jaeger"])
def test_configurations_of_collectors_name_what_they_define(name: str) -> None:
    configuration = yaml.safe_load(rendered("tracing").config(name)["config.yaml"])
    assert set(configuration["service"]["extensions"]) == set(configuration["extensions"])
    for pipeline in configuration["service"]["pipelines"].values():
        for kind, names in pipeline.items():
            assert set(names) <= set(configuration[kind])
