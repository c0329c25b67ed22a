"""Numbers and names that must agree do: manifests with settings, and with one another."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ByteSize, TypeAdapter

from services.common.by_model import for_all
from services.common.metrics import HEALTH_PATH
from services.common.settings import ServerSettings
from services.frontend.frontend import END_S
from services.frontend.settings import FrontendSettings
from services.hub import __main__ as hub
from services.scheduler.settings import SchedulerSettings
from services.worker.settings import WorkerSettings
from tests.k8s.manifests import (
    COMPOSITIONS,
    FIELDS,
    K8S,
    OTHER_HOST,
    Manifests,
    each_composition,
    environment,
    rendered,
)

SETTINGS: Mapping[str, type[ServerSettings]] = {
    "frontend": FrontendSettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
}
EXIT_S = 10
"""Seconds that a scheduler or a worker needs to end when it has drained."""


@cache
def load(manifests: Manifests, component: str) -> ServerSettings:
    """Returns what the service makes of its container's variables; it refuses unknown names."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(manifests, manifests.workload(component)).items():
            patch.setenv(name, value)
        return SETTINGS[component].load(component, [])


def settings(manifests: Manifests, component: str) -> Mapping[str, Any]:
    """Returns the settings by name."""
    loaded = load(manifests, component)
    return {name: getattr(loaded, name) for name in SETTINGS[component].model_fields}


def port(address: str) -> int:
    return int(address.rpartition(":")[2])


def in_bytes(quantity: str) -> int:
    """A Kubernetes quantity of memory."""
    return int(TypeAdapter(ByteSize).validate_python(re.sub(r"([KMG]i)$", r"\1B", quantity)))


def in_cpus(quantity: str) -> float:
    """A Kubernetes quantity of processors."""
    return float(quantity.removesuffix("m")) / (1000 if quantity.endswith("m") else 1)


@each_composition()
@pytest.mark.parametrize("component", SETTINGS)
def test_a_service_takes_its_environment(name: str, component: str) -> None:
    host = OTHER_HOST if name == "another namespace" else "[::]"
    loaded = settings(rendered(name), component)
    assert loaded["health_address"] == f"{host}:50060"
    assert loaded["metrics_address"] == f"{host}:9464"
    names = ("http_address", "grpc_address") if component == "frontend" else ("address",)
    assert all(loaded[name].startswith(f"{host}:") for name in names)
    if component == "worker":
        assert loaded["data_host"] == FIELDS["status.podIP"]


def test_no_manifest_binds_a_port_to_one_family_of_addresses() -> None:
    for path in K8S.rglob("*.yaml"):
        assert not re.search(r"0\.0\.0\.0:|127\.0\.0\.1:\d", code_of(path)), path


def code_of(path: Path) -> str:
    """Returns a YAML file without its comments."""
    return re.sub(r"(^|\s)#.*", "", path.read_text(encoding="utf-8"))


@each_composition()
@pytest.mark.parametrize("component", ["frontend", "scheduler"])
def test_what_a_service_may_need_fits_its_memory_limit(name: str, component: str) -> None:
    manifests = rendered(name)
    limit = manifests.workload(component).container["resources"]["limits"]["memory"]
    needed = sum(load(manifests, component).memory_parts().values())
    assert 0 < needed <= in_bytes(limit)


@each_composition()
@pytest.mark.parametrize("component", SETTINGS)
def test_variables_are_named_once_and_refer_to_earlier_ones(name: str, component: str) -> None:
    variables = rendered(name).workload(component).container["env"]
    names = [variable["name"] for variable in variables]
    assert len(set(names)) == len(names)
    for place, variable in enumerate(variables):
        assert set(re.findall(r"\$\((\w+)\)", variable.get("value", ""))) <= set(names[:place])


@each_composition()
def test_there_are_as_many_worker_pods_as_stages(name: str) -> None:
    manifests = rendered(name)
    worker = manifests.workload("worker")
    n_stages = int(manifests.config("orcinus-pipeline")["ORCINUS_N_STAGES"])
    if settings(manifests, "scheduler")["worker_deployment"] == worker.name:
        assert worker.n_pods is None  # applying it again would undo what the scheduler has set
    else:
        assert worker.n_pods == n_stages + (name == "a spare")
    assert settings(manifests, "scheduler")["n_stages"] == n_stages
    if worker.item["kind"] == "LeaderWorkerSet":  # which gives each pod its index
        assert settings(manifests, "worker")["n_stages"] == n_stages
        assert settings(manifests, "worker")["stage_index"] == 1
    else:
        assert settings(manifests, "worker")["stage_index"] is None


@pytest.mark.parametrize(("name", "n_stages"), [("base", 2), ("3 stages", 3), ("lws, 3 stages", 3)])
def test_one_number_changes_the_stages_everywhere(name: str, n_stages: int) -> None:
    assert rendered(name).workload("worker").n_pods == n_stages


def substituted(manifests: Manifests, container: dict[str, Any]) -> list[str]:
    """The arguments of a container, with the values that it has from ConfigMaps."""
    values = {
        variable["name"]: manifests.config("orcinus-pipeline")[reference["key"]]
        for variable in container.get("env", [])
        if (reference := variable.get("valueFrom", {}).get("configMapKeyRef"))
        and not reference.get("optional", False)
    }
    return [
        re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], argument)
        for argument in container["args"]
    ]


@each_composition()
def test_frontend_and_workers_read_the_same_model(name: str) -> None:
    manifests = rendered(name)
    model = settings(manifests, "worker")["model"]
    assert settings(manifests, "frontend")["model"] == for_all(model)
    for component in ("frontend", "worker"):
        workload = manifests.workload(component)
        mounts = {mount["name"]: mount for mount in workload.container["volumeMounts"]}
        assert mounts["model"]["readOnly"] is True
        assert str(model).startswith(f"{mounts['model']['mountPath']}/")
        for init in workload.pod.get("initContainers", []):
            assert str(model) in substituted(manifests, init)


@pytest.mark.parametrize("name", ["model-fetch", "fetched, lws"])
def test_workers_fetch_the_checkpoint_and_frontends_wait_for_it(name: str) -> None:
    manifests = rendered(name)
    pipeline = manifests.config("orcinus-pipeline")
    for component, more in (("worker", []), ("frontend", ["--wait"])):
        workload = manifests.workload(component)
        (init,) = workload.pod["initContainers"]
        assert init["command"] == ["env", "--block-signal=TERM", "python", "-m", "services.hub"]
        arguments = substituted(manifests, init)
        assert arguments == [pipeline["MODEL_SOURCE"], "--to", pipeline["ORCINUS_MODEL"], *more]
        options = hub.parser().parse_args(arguments)
        assert options.wait == (component == "frontend")
        (mount,) = (it for it in init["volumeMounts"] if it["name"] == "model")
        assert mount.get("readOnly", False) == options.wait
        (volume,) = (it for it in workload.pod["volumes"] if it["name"] == "model")
        assert volume["persistentVolumeClaim"]["readOnly"] == options.wait


def test_only_who_fetches_has_credentials_for_storage() -> None:
    manifests = rendered("model-fetch")
    (init,) = manifests.workload("worker").pod["initContainers"]
    env = {item["name"]: item for item in init["env"]}
    for name in ("AWS_ENDPOINT_URL", "AWS_REGION"):
        reference = env[name]["valueFrom"]["configMapKeyRef"]
        assert (reference["key"], reference["optional"]) == (name, True)
    (volume,) = (it for it in manifests.workload("worker").pod["volumes"] if it["name"] == "s3")
    assert volume["secret"] == {"secretName": "orcinus-s3", "optional": True}
    (mount,) = (it for it in init["volumeMounts"] if it["name"] == "s3")
    file = Path(env["AWS_SHARED_CREDENTIALS_FILE"]["value"])
    assert str(file.parent) == mount["mountPath"]
    assert mount["readOnly"] is True
    (waiting,) = manifests.workload("frontend").pod["initContainers"]
    for other in (manifests.workload("worker").container, waiting):
        assert not {"s3", "authorities"} & {it["name"] for it in other["volumeMounts"]}


def test_only_what_fetches_has_proxies_and_authorities() -> None:
    manifests = rendered("model-fetch")
    workload = manifests.workload("worker")
    (init,) = workload.pod["initContainers"]
    variables = {"configMapRef": {"name": "orcinus-model-fetch", "optional": True}}
    assert init["envFrom"] == [variables]
    assert variables not in workload.container["envFrom"]
    (volume,) = (it for it in workload.pod["volumes"] if it["name"] == "authorities")
    assert volume["configMap"] == {"name": "orcinus-authorities", "optional": True}
    (mount,) = (it for it in init["volumeMounts"] if it["name"] == "authorities")
    assert mount["mountPath"] == "/etc/orcinus/authorities"


@each_composition()
def test_a_pod_has_the_time_that_its_drain_takes(name: str) -> None:
    manifests = rendered(name)
    for component in ("scheduler", "worker"):
        needed = settings(manifests, component)["drain_s"] + EXIT_S
        assert manifests.workload(component).pod["terminationGracePeriodSeconds"] >= needed


@each_composition()
def test_answers_of_five_minutes_end_before_a_frontend_does(name: str) -> None:
    manifests = rendered(name)
    loaded = settings(manifests, "frontend")
    frontend = manifests.workload("frontend")
    assert frontend.pod["terminationGracePeriodSeconds"] == loaded["drain_s"] == 15 * 60
    assert loaded["linger_s"] == 30
    assert loaded["linger_s"] + 5 * 60 < loaded["drain_s"] - END_S


@each_composition()
def test_a_frontend_that_has_started_is_soon_seen_to_be_ready(name: str) -> None:
    """Its process has the rest of three seconds."""
    container = rendered(name).workload("frontend").container
    started = container.get("startupProbe", {"periodSeconds": 0})  # seen late before 1.27
    assert started["periodSeconds"] + container["readinessProbe"]["periodSeconds"] <= 2


def test_what_a_frontend_is_killed_for_does_not_wait_for_its_streams() -> None:
    container = rendered("base").workload("frontend").container
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["terminationGracePeriodSeconds"] <= 5


@each_composition()
def test_requests_are_held_while_a_leader_drains(name: str) -> None:
    manifests = rendered(name)
    hold_s = settings(manifests, "frontend")["hold_s"]
    drain_s = settings(manifests, "scheduler")["drain_s"]
    assert hold_s > drain_s + EXIT_S


@each_composition()
@pytest.mark.parametrize("component", SETTINGS)
def test_ports_are_those_of_the_settings(name: str, component: str) -> None:
    manifests = rendered(name)
    loaded = settings(manifests, component)
    ports = manifests.workload(component).ports()
    expected = {
        "health": port(loaded["health_address"]),
        "metrics": port(loaded["metrics_address"]),
    }
    if component == "frontend":
        expected |= {"http": port(loaded["http_address"]), "grpc": port(loaded["grpc_address"])}
    else:
        expected |= {"grpc": port(loaded["address"])}
    if component == "worker":
        expected |= {"rendezvous": loaded["rendezvous_port"]}
    assert ports == expected


@each_composition()
def test_services_find_one_another(name: str) -> None:
    manifests = rendered(name)
    [(_, address)] = settings(manifests, "frontend")["scheduler"]
    host, _, number = address.rpartition(":")
    ports = manifests.get("Service", host)["spec"]["ports"]
    assert [item["port"] for item in ports if item["name"] == "grpc"] == [int(number)]
    scheduler = settings(manifests, "scheduler")
    worker = manifests.workload("worker")
    assert scheduler["worker_port"] == worker.ports()["grpc"]
    for pair in scheduler["worker_selector"].split(","):
        key, _, value = pair.partition("=")
        assert worker.labels[key] == value
    [rule] = [rule for rule in manifests.of("Role")[0]["rules"] if "leases" in rule["resources"]]
    assert rule["resourceNames"] == [scheduler["lease_name"]]


@each_composition()
@pytest.mark.parametrize("component", SETTINGS)
def test_probes_ask_for_health_where_it_is_told(name: str, component: str) -> None:
    manifests = rendered(name)
    health = port(settings(manifests, component)["health_address"])
    container = manifests.workload(component).container
    for service in ("startup", "liveness", "readiness"):
        probe = container.get(f"{service}Probe")
        if probe is None:  # before 1.27, a frontend's
            assert (component, service) == ("frontend", "startup")
            assert "1.20" in name
        elif "grpc" in probe:
            assert probe["grpc"] == {"port": health, "service": service}
        else:
            assert probe["httpGet"] == {"path": f"{HEALTH_PATH}{service}", "port": "metrics"}


@each_composition()
def test_the_scheduler_and_rollouts_wait_as_long_as_workers_may_load(name: str) -> None:
    manifests = rendered(name)
    budget_s = settings(manifests, "worker")["load_limit_s"]
    assert settings(manifests, "scheduler")["start_timeout_s"] >= budget_s
    for workload in manifests.services():  # ready when there is a pipeline
        if workload.item["kind"] == "Deployment":
            assert workload.item["spec"]["progressDeadlineSeconds"] > budget_s


@each_composition()
def test_a_workers_memory_holds_what_it_is_told_to_keep(name: str) -> None:
    manifests = rendered(name)
    worker = manifests.workload("worker")
    loaded = settings(manifests, "worker")
    limit = in_bytes(worker.container["resources"]["limits"]["memory"])
    shared = worker.volume("shm")["emptyDir"]
    assert shared["medium"] == "Memory"
    keeps = in_bytes(shared["sizeLimit"])
    if loaded["device"] == "cpu":
        in_files = loaded["tp_size"] * loaded["kv_memory"]
        assert loaded["kv_directory"].parent == Path("/dev/shm")
        assert keeps >= in_files + 128 * 2**20  # and what gloo needs
    assert limit >= keeps + loaded["tp_size"] * 300 * 2**20  # torch, and a small model's weights


@each_composition()
def test_a_stage_has_a_gpu_for_each_rank_or_none(name: str) -> None:
    manifests = rendered(name)
    loaded = settings(manifests, "worker")
    worker = manifests.workload("worker")
    gpus = {amounts.get("nvidia.com/gpu") for amounts in worker.container["resources"].values()}
    assert gpus == ({str(loaded["tp_size"])} if loaded["device"] == "cuda" else {None})
    assert worker.container["image"].endswith("-cuda") == (loaded["device"] == "cuda")


@pytest.mark.parametrize(
    ("name", "tp_size"), [("base", 1), ("tensor-parallel", 2), ("tensor-parallel on GPUs", 2)]
)
def test_tensor_parallelism_reaches_the_worker(name: str, tp_size: int) -> None:
    assert settings(rendered(name), "worker")["tp_size"] == tp_size


@each_composition()
def test_a_worker_asks_for_the_cpus_that_its_threads_keep_busy(name: str) -> None:
    manifests = rendered(name)
    loaded = settings(manifests, "worker")
    asked = in_cpus(manifests.workload("worker").container["resources"]["requests"]["cpu"])
    limit = manifests.workload("worker").container["resources"]["limits"].get("cpu")
    assert loaded["n_threads"] == (0 if limit else 1)  # 0 follows the limit
    assert limit is None or in_cpus(limit) == asked
    busy = loaded["tp_size"]
    if "demo" in name or "kind" in name:  # they share two cores
        assert asked <= 0.25
    else:
        assert asked >= busy


@each_composition()
def test_images_are_targets_of_the_dockerfile(name: str) -> None:
    dockerfile = (K8S.parent / "Dockerfile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^FROM .* AS (\S+)$", dockerfile, flags=re.M))
    for workload in rendered(name).services():
        for container in workload.all_containers:
            repository, _, tag = container["image"].rpartition(":")
            assert tag
            assert tag != "latest"
            assert repository.rpartition("/")[2] in targets
            expected = container["name"]
            if expected == "model":
                expected = "frontend" if "command" in container else "demo-model"
            assert repository.rpartition("/")[2] == expected


@each_composition()
def test_no_image_of_ours_is_looked_for_in_a_registry_of_others(name: str) -> None:
    for workload in rendered(name).services():
        for container in workload.all_containers:
            registry = container["image"].partition("/")[0]
            assert registry == ("registry.invalid" if name == "overlays/gpu" else "localhost")


@pytest.mark.parametrize("name", ["base", "overlays/demo", "overlays/kind"])
def test_the_demo_runs_the_images_that_make_builds(name: str) -> None:
    makefile = (K8S.parent / "Makefile").read_text(encoding="utf-8")
    prefix, tag = (
        re.findall(rf"^{variable}\s*\?= (\S+)$", makefile, flags=re.M)[0]
        for variable in ("IMAGE_PREFIX", "TAG")
    )
    for workload in rendered(name).services():
        for container in workload.all_containers:
            assert re.fullmatch(rf"{prefix}/[a-z-]+:{tag}", container["image"])
            assert container["imagePullPolicy"] == "IfNotPresent"


@pytest.mark.parametrize("name", ["mtls", "overlays/gpu", "everything", "everything, lws"])
@pytest.mark.parametrize("component", SETTINGS)
def test_with_tls_every_service_reads_mounted_secrets(name: str, component: str) -> None:
    manifests = rendered(name)
    loaded = settings(manifests, component)
    workload = manifests.workload(component)
    mounts = {mount["mountPath"]: mount["name"] for mount in workload.container["volumeMounts"]}
    wanted = {str(loaded["tls_dir"]): f"orcinus-{component}-tls"}
    if component == "frontend":
        wanted |= {
            str(loaded["public_tls_dir"]): "orcinus-public-tls",
            str(loaded["api_keys_file"].parent): "orcinus-api-keys",
        }
    secrets = {path: workload.volume(mounts[path])["secret"]["secretName"] for path in wanted}
    assert secrets == wanted


def test_cert_manager_makes_every_certificate() -> None:
    manifests = rendered("cert-manager")
    made = {item["spec"]["secretName"]: item["spec"] for item in manifests.of("Certificate")}
    used = {
        volume["secret"]["secretName"]
        for workload in manifests.workloads()
        for volume in workload.pod["volumes"]
        if "secret" in volume
    }
    assert used - {"orcinus-api-keys"} <= set(made)
    for role in SETTINGS:
        certificate = made[f"orcinus-{role}-tls"]
        assert certificate["dnsNames"] == [f"orcinus-{role}"]
        assert {"server auth", "client auth"} <= set(certificate["usages"])


def test_the_public_certificate_follows_the_namespace() -> None:
    for name in ("cert-manager", "another namespace"):
        manifests = rendered(name)
        service = manifests.get("Service", "orcinus-frontend")["metadata"]
        host = f"{service['name']}.{service['namespace']}.svc"
        certificate = manifests.get("Certificate", "orcinus-public-tls")["spec"]
        assert certificate["dnsNames"] == [host, f"{host}.cluster.local"]


MAX_TRACE_BYTES = 4 * 8 * 2**10
"""A trace in Jaeger's memory: four times the OTLP of one with a batch of 32 requests."""


def test_jaegers_traces_fill_half_of_its_memory_at_most() -> None:
    manifests = rendered("tracing")
    (jaeger,) = (workload for workload in manifests.workloads() if workload.name == "jaeger")
    (path,) = (arg.removeprefix("--config=") for arg in jaeger.container["args"])
    mounts = {mount["mountPath"]: mount["name"] for mount in jaeger.container["volumeMounts"]}
    directory, _, file = path.rpartition("/")
    source = jaeger.volume(mounts[directory])["configMap"]["name"]
    configuration = yaml.safe_load(manifests.get("ConfigMap", source)["data"][file])
    backends = configuration["extensions"]["jaeger_storage"]["backends"]
    (storage,) = backends.values()
    limit = in_bytes(jaeger.container["resources"]["limits"]["memory"])
    assert storage["memory"]["max_traces"] * MAX_TRACE_BYTES <= limit / 2
    for pipeline in configuration["service"]["pipelines"].values():
        assert pipeline["processors"][0] == "memory_limiter"


@pytest.mark.parametrize("name", ["priority", "everything", "everything, lws"])
def test_every_service_has_the_class_that_is_made(name: str) -> None:
    manifests = rendered(name)
    (made,) = manifests.of("PriorityClass")
    assert made["globalDefault"] is False
    assert 0 < made["value"] < 10**9
    for workload in manifests.services():
        assert workload.pod["priorityClassName"] == made["metadata"]["name"]


@pytest.mark.parametrize("name", ["base", *(n for n in COMPOSITIONS if n.startswith("overlays/"))])
def test_whoever_deploys_needs_no_rights_but_in_the_namespace(name: str) -> None:
    known = {"Namespace", "ConfigMap", "Deployment", "NetworkPolicy", "Service", "Role"}
    known |= {"PodDisruptionBudget", "PersistentVolumeClaim", "RoleBinding", "ServiceAccount"}
    assert {item["kind"] for item in rendered(name).objects} <= known


@pytest.mark.parametrize("name", ["monitoring", "everything", "all optional, 1.20"])
def test_prometheus_selects_what_is_for_it_by_one_label(name: str) -> None:
    found = rendered(name).of("PodMonitor", "PrometheusRule")
    assert [item["metadata"]["labels"]["release"] for item in found] == [
        "kube-prometheus-stack"
    ] * 2
    text = (K8S / "components" / "monitoring").glob("*.yaml")
    assert "".join(path.read_text(encoding="utf-8") for path in text).count("labels/release") == 1


@each_composition()
def test_the_autoscaler_can_ask_for_as_many_frontends_as_there_may_be(name: str) -> None:
    manifests = rendered(name)
    for scaler in manifests.of("HorizontalPodAutoscaler"):
        scheduler = load(manifests, "scheduler")
        assert isinstance(scheduler, SchedulerSettings)
        n_running = (scheduler.n_stages or 1) * scheduler.max_batch_size
        (metric,) = scaler["spec"]["metrics"]
        each = int(metric["external"]["target"]["averageValue"])
        n_frontends = scaler["spec"]["maxReplicas"] - 1
        tolerated = 1.1  # an autoscaler does nothing about a tenth more
        assert n_frontends * each * tolerated < scheduler.max_requests - n_running
        selector = metric["external"]["metric"]["selector"]["matchLabels"]
        assert selector == {"app_kubernetes_io_instance": "orcinus"}
