"""The chart makes what kustomize makes, and refuses values that mean nothing."""

import re
from collections.abc import Mapping
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s.chart.chart import write
from k8s.chart.switches import LEFT_OUT, OPTIONAL, SWITCHES
from tests.k8s.chart.cases import CASES, IMAGES, Case, of_components
from tests.k8s.chart.helm import helm, run_template, template
from tests.k8s.manifests import K8S, Manifests, Object, render, render_directory
from tests.k8s.test_documented_overlay import write_overlay
from tests.k8s.test_pairs import APART
from tests.k8s.test_render import FOREIGN, VERSIONS, validate

pytestmark = pytest.mark.helm

NEEDS = {switch.component: switch.needs for switch in SWITCHES.values()}
ALONE = [(*NEEDS[name], name) for name in SWITCHES]
PAIRS = [
    tuple(sorted({*first, *second}, key=list(SWITCHES).index))
    for first, second in combinations(ALONE, 2)
    if not any(apart <= {*first, *second} for apart in APART)
]


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart, made once."""
    directory = tmp_path_factory.mktemp("chart") / "orcinus"
    write(directory)
    return directory


@pytest.mark.parametrize("name", CASES)
def test_helm_makes_what_kustomize_makes(chart: Path, name: str) -> None:
    assert_equal(chart, CASES[name])


@pytest.mark.thorough
@pytest.mark.parametrize("components", dict.fromkeys([*ALONE, *PAIRS]), ids=" ".join)
def test_components_are_the_same(chart: Path, components: tuple[str, ...]) -> None:
    assert_equal(chart, of_components(*components))


def test_the_values_on_the_page_mean_what_the_overlay_on_its_page_means(
    chart: Path, tmp_path: Path
) -> None:
    page = (K8S.parent / "docs" / "operations" / "helm.md").read_text(encoding="utf-8")
    [shown] = re.findall(r"has it:\n\n((?:    .*\n)+)", page)
    made = render_directory(write_overlay(tmp_path))
    [left_out] = re.findall(
        "sizeLimit: 4300Mi", made
    )  # which the chart cannot say, as the page tells
    expected = made.replace(left_out, "sizeLimit: 400Mi")
    assert_same(template(chart, yaml.safe_load(shown)), expected)


def assert_equal(chart: Path, case: Case) -> None:
    """Fails if Helm and kustomize make different objects."""
    values = {**IMAGES, **case.values}
    made = template(chart, values, release=case.release, namespace=case.namespace)
    assert_same(made, render(case.composition))


def assert_same(made: Manifests, text: str) -> None:
    """Fails if objects differ from those in a text of kustomize."""
    by_helm = compared(made.objects)
    by_kustomize = compared(list(yaml.load_all(text, yaml.CSafeLoader)))
    assert by_helm.keys() == by_kustomize.keys()
    for identity, item in by_kustomize.items():
        assert by_helm[identity] == item, identity


def compared(objects: list[Object]) -> dict[tuple[str, str], Object]:
    """Returns objects by kind and name, without what differs by intent: the namespace, the test
    pod, the hashes of settings, which Helm has in annotations, and the default kind of Service."""
    config_maps = {
        item["metadata"]["name"]: re.sub(r"-[a-z0-9]{10}$", "", item["metadata"]["name"])
        for item in objects
        if item["kind"] == "ConfigMap"
    }
    found = {}
    for original in objects:
        if original["kind"] == "Namespace" or is_hook(original):
            continue
        item = normal(original, config_maps)
        if item["kind"] == "Service" and item["spec"].get("type") == "ClusterIP":
            del item["spec"]["type"]
        metadata = item["spec"]["template"]["metadata"] if item["kind"] == "Deployment" else {}
        kept = {
            key: value
            for key, value in metadata.pop("annotations", {}).items()
            if not key.startswith("checksum/")
        }
        metadata |= {"annotations": kept} if kept else {}
        found[item["kind"], item["metadata"]["name"]] = item
    return found


def is_hook(item: Object) -> bool:
    """Returns whether an object is made for a test alone."""
    return "helm.sh/hook" in item["metadata"].get("annotations", {})


def normal(value: Any, config_maps: Mapping[str, str]) -> Any:
    """Returns a value in which lists whose order means nothing have one order."""
    match value:
        case dict():
            return {key: normal(inner, config_maps) for key, inner in value.items()}
        case list():
            inner = [normal(it, config_maps) for it in value]
            for key in ("name", "mountPath", "key"):
                if inner and all(isinstance(it, dict) and key in it for it in inner):
                    return sorted(inner, key=lambda it: str(it[key]))
            return inner
        case str():
            return config_maps.get(value, value)
        case _:
            return value


@pytest.mark.parametrize("name", CASES)
def test_variables_come_after_those_that_they_use(chart: Path, name: str) -> None:
    for workload in template(chart, CASES[name].values).services():
        known: set[str] = set()
        for variable in workload.container["env"]:
            used = re.findall(r"\$\((\w+)\)", variable.get("value", ""))
            assert set(used) <= known
            known.add(variable["name"])


@cache
def everything(chart: Path, release: str = "orcinus") -> Manifests:
    return template(chart, {**IMAGES, **CASES["everything"].values}, release=release)


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_field(chart: Path, version: str) -> None:
    for item in everything(chart).objects:
        if item["kind"] not in FOREIGN:
            validate(item, version)


def test_every_component_has_a_value_or_is_left_out() -> None:
    there = {path.name for path in (K8S / "components").iterdir()}
    assert there - {"stages", "drain"} == {name for name in SWITCHES if "/" not in name} | LEFT_OUT


def test_two_releases_share_no_object(chart: Path) -> None:
    names = [
        {(item["kind"], item["metadata"]["name"]) for item in everything(chart, release).objects}
        for release in ("orcinus", "mine")
    ]
    assert not names[0] & names[1]


def test_where_images_come_from_is_one_value(chart: Path) -> None:
    digest = f"sha256:{'a' * 64}"
    made = template(
        chart, {"image": {"registry": "registry.example/us", "digests": {"frontend": digest}}}
    )
    images = {
        container["image"]
        for item in [*made.of("Deployment"), *made.of("Pod")]
        for container in containers(item)
    }
    version = yaml.safe_load((chart / "Chart.yaml").read_text("utf-8"))["appVersion"]
    assert images == {
        f"registry.example/us/frontend@{digest}",
        *(f"registry.example/us/{name}:{version}" for name in ("scheduler", "worker")),
        f"registry.example/us/demo-model:{version}",
    }


def containers(item: Object) -> list[Object]:
    """Returns all containers of a pod, or of what makes pods."""
    pod = item["spec"]["template"]["spec"] if "template" in item["spec"] else item["spec"]
    return [*pod.get("initContainers", []), *pod["containers"]]


def test_pods_take_what_a_cluster_wants_of_them(chart: Path) -> None:
    volume = {"name": "extra", "emptyDir": {}}
    worker: dict[str, Any] = {
        "nodeSelector": {"zone": "a"},
        "tolerations": [{"key": "mine", "operator": "Exists"}],
        "podAnnotations": {"a/b": "c"},
        "extraEnv": [{"name": "A", "value": "B"}],
        "extraVolumes": [volume],
        "extraVolumeMounts": [{"name": "extra", "mountPath": "/extra"}],
        "resources": {"limits": {"memory": "14Gi"}},
    }
    image = {"pullSecrets": [{"name": "registry"}], "pullPolicy": "Always"}
    made = template(chart, {"worker": worker, "image": image}).workload("worker")
    template_ = made.item["spec"]["template"]
    assert made.pod["nodeSelector"] == {"zone": "a"}
    assert worker["tolerations"][0] in made.pod["tolerations"]
    assert len(made.pod["tolerations"]) == 3
    assert template_["metadata"]["annotations"]["a/b"] == "c"
    assert made.container["env"][-1] == worker["extraEnv"][0]
    assert made.volume("extra") == volume
    assert made.container["volumeMounts"][-1] == worker["extraVolumeMounts"][0]
    assert made.container["resources"]["limits"]["memory"] == "14Gi"
    assert made.container["resources"]["requests"]["memory"] == "1536Mi"
    assert made.pod["imagePullSecrets"] == [{"name": "registry"}]
    assert {it["imagePullPolicy"] for it in made.all_containers} == {"Always"}


@pytest.mark.parametrize(
    ("components", "size"),
    [({}, "400Mi"), ({"tensorParallel": True}, "784Mi"), ({"gpu": True}, "8Gi")],
    ids=str,
)
def test_shared_memory_has_the_size_of_its_value_or_of_the_manifests(
    chart: Path, components: dict[str, bool], size: str
) -> None:
    for given, expected in (("", size), ("4300Mi", "4300Mi")):
        values = {"components": components, "worker": {"sharedMemory": given}}
        volume = template(chart, values).workload("worker").volume("shm")
        assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": expected}


def test_settings_that_change_replace_their_readers_alone(chart: Path) -> None:
    settings = {"settings": {"frontend": {"ORCINUS_LOG_LEVEL": "DEBUG"}}}
    before, after = (
        {
            it.labels["app.kubernetes.io/component"]: it.item["spec"]["template"]
            for it in template(chart, values).services()
        }
        for values in ({}, settings)
    )
    assert {name for name in before if before[name] != after[name]} == {"frontend"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"stages": 1, "spares": 1}, {"ORCINUS_MAX_PIPELINES": "1"}),
        ({"stages": 2, "pipelines": 3, "spares": 2}, {"ORCINUS_MAX_PIPELINES": "3"}),
        ({"stages": 2, "spares": 1}, {}),
        (
            {"stages": 1, "spares": 2, "components": {"pipelineAutoscaling": True}},
            {"ORCINUS_N_SPARE_WORKERS": "2"},
        ),
        (
            {
                "stages": 1,
                "spares": 1,
                "settings": {"scheduler": {"ORCINUS_MAX_PIPELINES": 2}},
            },
            {"ORCINUS_MAX_PIPELINES": "2"},
        ),
    ],
)
def test_spares_form_no_pipeline(
    chart: Path, values: Mapping[str, Any], expected: dict[str, str]
) -> None:
    data = template(chart, values).get("ConfigMap", "orcinus-scheduler-settings")["data"]
    without = template(chart, {**values, "spares": 0, "settings": {}}).get(
        "ConfigMap", "orcinus-scheduler-settings"
    )["data"]
    assert dict(data.items() - without.items()) == expected


def test_a_claim_that_is_there_is_used(chart: Path) -> None:
    made = template(chart, {"model": {"from": "claim", "claim": {"existing": "mine"}}})
    assert not made.of("PersistentVolumeClaim")
    for name in ("frontend", "worker"):
        volume = made.workload(name).volume("model")
        assert volume["persistentVolumeClaim"]["claimName"] == "mine"


def test_the_way_to_the_api_server_can_be_narrow(chart: Path) -> None:
    servers = [{"cidr": "10.0.0.1/32", "port": 6443}]
    made = template(chart, {"networkPolicies": {"apiServers": servers}})
    assert made.get("NetworkPolicy", "orcinus-scheduler-api")["spec"]["egress"] == [
        {
            "to": [{"ipBlock": {"cidr": "10.0.0.1/32"}}],
            "ports": [{"protocol": "TCP", "port": 6443}],
        }
    ]
    assert not template(chart, {"networkPolicies": {"enabled": False}}).of("NetworkPolicy")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"stagse": 2}, "stagse"),
        ({"stages": 0}, "/stages"),
        ({"frontend": {"replica": 2}}, "replica"),
        ({"model": {"from": "hub"}}, "/model/from"),
        ({"worker": {"sharedMemory": "4 GB"}}, "/worker/sharedMemory"),
        ({"components": {"mtsl": True}}, "mtsl"),
        ({"components": {"certManager": True}}, "/components"),
        ({"components": {"istio": True, "linkerd": True}}, "/components"),
        ({"settings": {"worker": {"ORCINUS_KV_MEMROY": "1GiB"}}}, "ORCINUS_KV_MEMROY"),
        ({"image": {"digests": {"frontend": "latest"}}}, "/image/digests/frontend"),
    ],
    ids=str,
)
def test_values_that_mean_nothing_are_refused_by_name(
    chart: Path, values: Mapping[str, Any], named: str
) -> None:
    done = run_template(chart, values)
    assert done.returncode
    assert named in done.stderr.replace("'", "").replace(".", "/")


def test_a_name_that_is_too_long_for_objects_is_refused(chart: Path) -> None:
    done = run_template(chart, {}, release="a" * 41)
    assert "longer than 40 characters" in done.stderr


def test_helm_finds_no_fault_with_the_chart(chart: Path) -> None:
    done = helm("lint", "--strict", str(chart))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "THERE ARE NO API KEYS"),
        (["--set", "components.mtls=true"], "orcinus-api-keys"),
    ],
)
def test_notes_say_what_is_left_to_do(chart: Path, options: list[str], said: str) -> None:
    done = helm("install", "mine", str(chart), "--dry-run=client", *options)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert "service/mine-orcinus-frontend" in done.stdout


def test_values_that_are_listed_are_those_that_there_are(chart: Path) -> None:
    listed = yaml.safe_load((chart / "values.yaml").read_text("utf-8"))
    assert set(listed["components"]) == set(OPTIONAL)
    assert not any(listed["components"].values())
