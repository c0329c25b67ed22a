"""With the component for old clusters nothing is left that Kubernetes 1.20 does not know."""

import pytest

from tests.k8s.manifests import COMPOSITIONS, rendered, walk

OLD = [name for name in COMPOSITIONS if "1.20" in name]

UNKNOWN_FIELDS = {
    "grpc",  # of a probe
    "sleep",  # of a hook
    "minReadySeconds",
    "ordinals",
    "persistentVolumeClaimRetentionPolicy",
    "completionMode",
    "podFailurePolicy",
    "minDomains",
    "matchLabelKeys",
    "nodeTaintsPolicy",
    "schedulingGates",
    "hostUsers",
    "os",
    "resourceClaims",
    "resizePolicy",
    "appArmorProfile",
    "endPort",
    "internalTrafficPolicy",
    "ipFamilyPolicy",  # behind a feature gate; dropped without it
    "trafficDistribution",
    "unhealthyPodEvictionPolicy",
    "ephemeral",  # a volume with a claim of its own
}
UNKNOWN_KINDS = {
    ("policy/v1", "PodDisruptionBudget"),
    ("autoscaling/v2", "HorizontalPodAutoscaler"),
    ("batch/v1", "CronJob"),
    ("discovery.k8s.io/v1", "EndpointSlice"),
}


@pytest.mark.parametrize("name", OLD)
def test_no_newer_kind_is_left(name: str) -> None:
    kinds = {(item["apiVersion"], item["kind"]) for item in rendered(name).objects}
    assert not kinds & UNKNOWN_KINDS
    assert not {kind for _, kind in kinds if kind.startswith("ValidatingAdmission")}


@pytest.mark.parametrize("name", OLD)
def test_no_newer_field_is_left(name: str) -> None:
    for item in rendered(name).of("Service", "NetworkPolicy", "Deployment"):
        keys = {key for key, _ in walk(item["spec"])}
        assert not keys & UNKNOWN_FIELDS, item["metadata"]["name"]


@pytest.mark.parametrize("name", OLD)
def test_init_containers_end_and_probes_keep_to_the_pods_grace_period(name: str) -> None:
    for workload in rendered(name).workloads():
        for container in workload.all_containers:
            assert "restartPolicy" not in container
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                assert "terminationGracePeriodSeconds" not in container.get(probe, {})


@pytest.mark.parametrize("name", OLD)
def test_a_frontend_is_not_asked_whether_it_has_started(name: str) -> None:
    """Such a kubelet sees late that a startup probe has passed; a liveness probe that waits
    gives as long a time to start."""
    old, new = (rendered(it).workload("frontend").container for it in (name, "base"))
    assert "startupProbe" not in old
    starting, living = new["startupProbe"], old["livenessProbe"]
    time_to_start_s = starting["periodSeconds"] * starting["failureThreshold"]
    failing_s = living["periodSeconds"] * living["failureThreshold"]
    assert living["initialDelaySeconds"] + failing_s >= time_to_start_s


@pytest.mark.parametrize("name", OLD)
def test_no_pod_waits_for_a_node_that_such_a_server_does_not_know_to_be_lost(name: str) -> None:
    for workload in rendered(name).services():
        for spread in workload.pod["topologySpreadConstraints"]:
            assert spread["whenUnsatisfiable"] == "ScheduleAnyway"


@pytest.mark.parametrize("name", OLD)
def test_the_rest_stays_as_it_is(name: str) -> None:
    kinds = {item["kind"] for item in rendered(name).objects}
    wanted = {"Namespace", "Role", "NetworkPolicy", "Service", "Deployment"}
    assert wanted <= kinds


@pytest.mark.parametrize("name", OLD)
def test_no_policy_counts_on_namespaces_that_carry_their_names(name: str) -> None:
    for policy in rendered(name).of("NetworkPolicy"):
        assert "kubernetes.io/metadata.name" not in str(policy["spec"])
