"""Rules of the house for all that is deployed: those of linters, and those that only we know."""

from dataclasses import dataclass
from ipaddress import IPv6Address, ip_network
from typing import Any

import pytest

from tests.k8s.manifests import (
    COMPONENT,
    INSTANCE,
    NAME,
    Manifests,
    Workload,
    each_composition,
    rendered,
    selects,
)

OPENSHIFT = ("openshift", "OpenShift, traced")


def policies_of(manifests: Manifests, workload: Workload, direction: str) -> list[dict[str, Any]]:
    """The NetworkPolicies for one direction of a workload's pods, but for those of all pods."""
    return [
        item["spec"]
        for item in manifests.of("NetworkPolicy")
        if direction in item["spec"]["policyTypes"]
        and item["spec"]["podSelector"]
        and selects(item["spec"]["podSelector"]["matchLabels"], workload.labels)
    ]


def may_reach(manifests: Manifests, source: Workload, target: Workload, port: int) -> bool:
    """Whether policies let a pod of one workload connect to another's port, on both sides."""

    def allows(policies: list[dict[str, Any]], rules: str, side: str, peer: Workload) -> bool:
        return any(
            _has_port(rule, port) and _has_peer(rule.get(side), peer)
            for policy in policies
            for rule in policy.get(rules, [])
        )

    return allows(policies_of(manifests, source, "Egress"), "egress", "to", target) and allows(
        policies_of(manifests, target, "Ingress"), "ingress", "from", source
    )


def _has_port(rule: dict[str, Any], port: int) -> bool:
    return "ports" not in rule or any(item["port"] == port for item in rule["ports"])


def _has_peer(peers: list[dict[str, Any]] | None, peer: Workload) -> bool:
    return peers is None or any(
        "podSelector" in item
        and "namespaceSelector" not in item
        and selects(item["podSelector"]["matchLabels"], peer.labels)
        for item in peers
    )


@each_composition()
def test_pods_are_restricted(name: str) -> None:
    for workload in rendered(name).workloads():
        pod = workload.pod
        assert pod["enableServiceLinks"] is False
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        ids = {"runAsUser", "runAsGroup", "fsGroup"} & set(pod["securityContext"])
        assert not ids if name in OPENSHIFT else pod["securityContext"]["runAsUser"] >= 10000
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        for container in workload.all_containers:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}


@each_composition()
def test_the_namespace_enforces_the_restricted_profile(name: str) -> None:
    (namespace,) = rendered(name).of("Namespace")
    labels = namespace["metadata"]["labels"]
    for mode in ("enforce", "warn", "audit"):
        assert labels[f"pod-security.kubernetes.io/{mode}"] == "restricted"


@each_composition()
def test_containers_ask_for_what_they_need_and_no_more(name: str) -> None:
    for workload in rendered(name).workloads():
        for container in workload.all_containers:
            requests, limits = (container["resources"][key] for key in ("requests", "limits"))
            assert {"cpu", "memory", "ephemeral-storage"} <= set(requests)
            assert {"memory", "ephemeral-storage"} <= set(limits)
            assert requests["memory"] == limits["memory"]
            is_limited = container["name"] != "worker" or "limits" in name
            assert ("cpu" in limits) == is_limited
        for volume in workload.pod.get("volumes", []):
            assert "sizeLimit" in volume.get("emptyDir", {"sizeLimit": ""}), volume["name"]


@each_composition()
def test_every_mount_has_its_volume_and_every_volume_its_mount(name: str) -> None:
    for workload in rendered(name).workloads():
        mounted = {
            mount["name"]
            for container in workload.all_containers
            for mount in container.get("volumeMounts", [])
        }
        assert mounted == {volume["name"] for volume in workload.pod.get("volumes", [])}


@each_composition()
def test_service_accounts_exist_and_mount_no_token(name: str) -> None:
    manifests = rendered(name)
    accounts = {item["metadata"]["name"]: item for item in manifests.of("ServiceAccount")}
    used = [workload.pod["serviceAccountName"] for workload in manifests.workloads()]
    assert sorted(used) == sorted(accounts)  # one each
    assert not any(item["automountServiceAccountToken"] for item in accounts.values())


@each_composition()
def test_only_the_scheduler_has_a_token_and_rights_of_its_names(name: str) -> None:
    manifests = rendered(name)
    with_token = [
        workload.name
        for workload in manifests.workloads()
        if "serviceAccountToken" in str(workload.pod.get("volumes"))
    ]
    assert with_token == ["orcinus-scheduler"]
    assert not manifests.of("ClusterRole", "ClusterRoleBinding")
    role, *scaling = manifests.of("Role")
    assert not manifests.of("Lease")  # applied again, it would take the leader's away
    patches = {"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
        {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "resourceNames": ["orcinus-scheduler"],
            "verbs": ["get", "create", "update"],
        },
        *([patches] if name == "pod-deletion-cost" else []),
    ]
    has_autoscaler = "ORCINUS_WORKER_DEPLOYMENT" in str(manifests.workload("scheduler").container)
    assert [one["rules"] for one in scaling] == has_autoscaler * [
        [
            {
                "apiGroups": ["apps"],
                "resources": ["deployments/scale"],
                "resourceNames": ["orcinus-worker"],
                "verbs": ["get", "patch"],
            }
        ]
    ]
    bindings = manifests.of("RoleBinding")
    assert [one["roleRef"]["name"] for one in bindings] == [
        one["metadata"]["name"] for one in (role, *scaling)
    ]
    for binding in bindings:
        assert [subject["name"] for subject in binding["subjects"]] == ["orcinus-scheduler"]


@each_composition()
def test_services_select_pods_that_have_their_ports(name: str) -> None:
    manifests = rendered(name)
    for service in manifests.of("Service"):
        (workload,) = (
            found
            for found in manifests.workloads()
            if selects(service["spec"]["selector"], found.labels)
        )
        for item in service["spec"]["ports"]:
            assert workload.ports()[item["targetPort"]] == item["port"]
            assert "appProtocol" in item


@each_composition()
def test_identity_is_for_all_pods_and_clients_see_ready_ones(name: str) -> None:
    manifests = rendered(name)
    services = {item["metadata"]["name"]: item["spec"] for item in manifests.of("Service")}
    frontend = services["orcinus-frontend"]
    assert "clusterIP" not in frontend
    assert "publishNotReadyAddresses" not in frontend
    scheduler = services["orcinus-scheduler"]
    assert scheduler["clusterIP"] == "None"
    assert scheduler["publishNotReadyAddresses"] is True


@each_composition()
def test_probes_differ_and_say_how_long_they_wait(name: str) -> None:
    for workload in rendered(name).workloads():
        container = workload.container
        liveness, readiness = container["livenessProbe"], container["readinessProbe"]
        assert liveness != readiness
        assert "timeoutSeconds" in liveness
        assert "timeoutSeconds" in readiness
    for workload in rendered(name).services():
        container = workload.container
        has_delay = "initialDelaySeconds" in container["livenessProbe"]
        assert has_delay == ("startupProbe" not in container)  # a frontend's, before 1.27


@each_composition()
def test_a_process_that_only_lacks_cpu_is_not_restarted(name: str) -> None:
    for workload in rendered(name).services():
        for kind in {"startupProbe", "livenessProbe"} & set(workload.container):
            probe = workload.container[kind]
            assert probe["timeoutSeconds"] >= 10
            assert probe["periodSeconds"] * probe.get("failureThreshold", 3) >= 60


@each_composition()
def test_a_pod_on_a_lost_node_is_soon_replaced(name: str) -> None:
    for workload in rendered(name).services():
        seconds = {
            item["key"]: item["tolerationSeconds"]
            for item in workload.pod["tolerations"]
            if item["effect"] == "NoExecute"
        }
        assert seconds == {
            "node.kubernetes.io/not-ready": 10,
            "node.kubernetes.io/unreachable": 10,
        }


@each_composition()
def test_every_pod_starts_with_no_connections_at_all(name: str) -> None:
    manifests = rendered(name)
    deny = manifests.get("NetworkPolicy", "orcinus")["spec"]
    assert deny == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for workload in manifests.workloads():
        assert policies_of(manifests, workload, "Ingress")


@each_composition()
def test_connections_are_those_of_the_design(name: str) -> None:
    manifests = rendered(name)
    pods = {workload.labels[COMPONENT]: workload for workload in manifests.services()}
    allowed = {
        (source, target, port)
        for source in pods
        for target in pods
        for port in (8000, 50051, 50052, 50053, 50060, 29500, 41234)
        if may_reach(manifests, pods[source], pods[target], port)
    }
    assert allowed == {
        ("frontend", "scheduler", 50052),
        ("scheduler", "scheduler", 50052),
        ("scheduler", "worker", 50053),
        *(("worker", "worker", p) for p in (8000, 50051, 50052, 50053, 50060, 29500, 41234)),
    }


@each_composition()
def test_nobody_leaves_but_the_scheduler_for_the_api_server_and_all_for_names(name: str) -> None:
    manifests = rendered(name)
    outside = {
        (item["metadata"]["name"], port["port"])
        for item in manifests.of("NetworkPolicy")
        for rule in item["spec"].get("egress", [])
        if "to" not in rule or any("ipBlock" in peer for peer in rule["to"])
        for port in rule["ports"]
    }
    api = {("orcinus-scheduler-api", 443), ("orcinus-scheduler-api", 6443)}
    hub = {("orcinus-model-fetch", 443)} if name in ("model-fetch", "fetched, lws") else set()
    assert outside == {("orcinus-dns", 53), *api, *hub}
    policy = manifests.get("NetworkPolicy", "orcinus-scheduler-api")["spec"]
    chosen = [
        w.name
        for w in manifests.workloads()
        if selects(policy["podSelector"]["matchLabels"], w.labels)
    ]
    assert chosen == ["orcinus-scheduler"]


def test_what_fetches_reaches_no_private_address_of_either_family() -> None:
    policy = rendered("model-fetch").get("NetworkPolicy", "orcinus-model-fetch")["spec"]
    blocks = [peer["ipBlock"] for rule in policy["egress"] for peer in rule["to"]]
    assert [block["cidr"] for block in blocks] == ["0.0.0.0/0", "::/0"]
    by_ipv4, by_ipv6 = ([ip_network(it) for it in block["except"]] for block in blocks)
    nat64 = int(IPv6Address("64:ff9b::"))
    through_nat64 = [
        ip_network((nat64 + int(it.network_address), 96 + it.prefixlen)) for it in by_ipv4
    ]
    local = ["fc00::/7", "fe80::/10", "64:ff9b:1::/48"]
    assert by_ipv6 == [*map(ip_network, local), *through_nat64]


@each_composition()
def test_clients_reach_the_public_ports_and_no_other(name: str) -> None:
    manifests = rendered(name)
    open_to_all = {
        (workload.name, item["port"])
        for workload in manifests.workloads()
        for policy in policies_of(manifests, workload, "Ingress")
        for rule in policy.get("ingress", [])
        if "from" not in rule
        for item in rule["ports"]
    }
    of_proxy = {("orcinus-frontend", 4143)} if name == "linkerd" else set()
    assert open_to_all == {("orcinus-frontend", 8000), ("orcinus-frontend", 50051)} | of_proxy


@pytest.mark.parametrize("name", ["monitoring", "everything", "everything, lws"])
def test_prometheus_reaches_the_port_that_it_scrapes(name: str) -> None:
    manifests = rendered(name)
    (endpoint,) = manifests.get("PodMonitor", "orcinus")["spec"]["podMetricsEndpoints"]
    (rule,) = manifests.get("NetworkPolicy", "orcinus-metrics")["spec"]["ingress"]
    for workload in manifests.services():
        assert [item["port"] for item in rule["ports"]] == [workload.ports()[endpoint["port"]]]


@pytest.mark.parametrize("name", ["tracing", "everything", "everything, lws"])
def test_traces_reach_jaeger(name: str) -> None:
    manifests = rendered(name)
    (collector,) = (w for w in manifests.workloads() if w.name == "otel-collector")
    (jaeger,) = (w for w in manifests.workloads() if w.name == "jaeger")
    for workload in manifests.services():
        assert may_reach(manifests, workload, collector, collector.ports()["otlp"])
        assert not may_reach(manifests, workload, jaeger, jaeger.ports()["otlp"])
    assert may_reach(manifests, collector, jaeger, jaeger.ports()["otlp"])


@each_composition()
def test_every_service_has_a_disruption_budget(name: str) -> None:
    if "1.20" in name:
        return  # policy/v1 is not there
    manifests = rendered(name)
    budgets = manifests.of("PodDisruptionBudget")
    for workload in manifests.services():
        (budget,) = (
            item["spec"]
            for item in budgets
            if selects(item["spec"]["selector"]["matchLabels"], workload.labels)
        )
        assert budget["maxUnavailable"] == 1
        assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


@each_composition()
def test_pods_of_a_kind_prefer_different_nodes(name: str) -> None:
    for workload in rendered(name).services():
        (spread,) = workload.pod["topologySpreadConstraints"]
        assert spread["topologyKey"] == "kubernetes.io/hostname"
        assert spread["maxSkew"] == 1
        assert selects(spread["labelSelector"]["matchLabels"], workload.labels)
        is_hard = name == "hard-spread" and workload.labels[COMPONENT] != "worker"
        assert spread["whenUnsatisfiable"] == ("DoNotSchedule" if is_hard else "ScheduleAnyway")


@dataclass(frozen=True, slots=True)
class Node:
    """A node with pods of one Deployment: how many of each revision."""

    pods: tuple[str, ...] = ()
    taints: tuple[str, ...] = ()


CORDONED, LOST = "node.kubernetes.io/unschedulable", "node.kubernetes.io/unreachable"


def takers(workload: Workload, nodes: list[Node], revision: str = "new") -> list[int]:
    """The nodes that Kubernetes may put one more pod on, by its rule for a hard constraint: there,
    the number of pods must not exceed the least of all nodes that count by more than the skew."""
    (spread,) = workload.pod["topologySpreadConstraints"]
    assert spread["whenUnsatisfiable"] == "DoNotSchedule"
    counts = [
        sum(pod == revision or "matchLabelKeys" not in spread for pod in node.pods)
        for node in nodes
    ]
    usable = [index for index, node in enumerate(nodes) if not node.taints]
    counted = usable if spread.get("nodeTaintsPolicy") == "Honor" else range(len(nodes))
    least = min(counts[index] for index in counted)
    return [index for index in usable if counts[index] + 1 - least <= spread["maxSkew"]]


@pytest.mark.parametrize("component", ["frontend", "scheduler"])
@pytest.mark.parametrize(
    ("nodes", "allowed"),
    [
        ([Node(("new",)), Node()], [1]),
        ([Node(("new",))], [0]),
        ([Node(("new",)), Node(taints=(CORDONED,))], [0]),
        ([Node(("new",)), Node(("new",), (LOST,))], [0]),
        ([Node(("new",)), Node(("new",), (LOST,)), Node()], [2]),
        ([Node(("old",)), Node(("old", "new"))], [0]),
        ([Node(("old", "new")), Node(())], [1]),
    ],
    ids=[
        "two nodes",
        "one node",
        "the other is cordoned",
        "the other is lost",
        "a third one",
        "rollout, second pod",
        "rollout, after an old pod has gone",
    ],
)
def test_with_a_hard_spread_two_share_a_node_only_where_there_is_no_other(
    component: str, nodes: list[Node], allowed: list[int]
) -> None:
    assert takers(rendered("hard-spread").workload(component), nodes) == allowed


@each_composition()
def test_selectors_name_nothing_that_a_new_version_changes(name: str) -> None:
    for item in rendered(name).of("Deployment"):
        labels = item["spec"]["selector"]["matchLabels"]
        assert {NAME, INSTANCE} <= set(labels) <= {NAME, INSTANCE, COMPONENT}
        assert selects(labels, item["spec"]["template"]["metadata"]["labels"])


@each_composition()
def test_rollouts_break_nothing(name: str) -> None:
    manifests = rendered(name)
    for component in ("frontend", "scheduler"):
        spec = manifests.workload(component).item["spec"]
        one_more = {"maxSurge": 1, "maxUnavailable": 0}
        assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": one_more}
        assert spec["revisionHistoryLimit"] <= 10
    worker = manifests.workload("worker").item
    if worker["kind"] == "Deployment":  # one pipeline more, and without waiting for lost nodes
        n_stages = int(manifests.config("orcinus-pipeline")["ORCINUS_N_STAGES"])
        rolling = {"maxSurge": n_stages, "maxUnavailable": 0}
        if name == "no-surge":
            rolling = {"maxSurge": 0, "maxUnavailable": n_stages}
        assert worker["spec"]["strategy"] == {"type": "RollingUpdate", "rollingUpdate": rolling}
    else:
        assert worker["spec"]["startupPolicy"] == "LeaderCreated"
        assert worker["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "None"


@each_composition()
def test_only_the_frontend_is_scaled_by_load(name: str) -> None:
    manifests = rendered(name)
    for scaler in manifests.of("HorizontalPodAutoscaler"):
        assert scaler["spec"]["scaleTargetRef"]["name"] == "orcinus-frontend"
        assert "replicas" not in manifests.workload("frontend").item["spec"]


@each_composition()
def test_what_is_waived_is_explained(name: str) -> None:
    for item in rendered(name).objects:
        for key, value in item["metadata"].get("annotations", {}).items():
            if key.startswith("checkov.io/skip"):
                check, _, reason = value.partition("=")
                assert check.startswith("CKV")
                assert len(reason.split()) >= 4
