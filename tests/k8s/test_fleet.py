"""The overlay `fleet`: two models, each a deployment of its own, behind the same frontends."""

import re

import pytest
from pydantic import ByteSize, TypeAdapter

from services.frontend.settings import FrontendSettings
from tests.k8s.manifests import COMPONENT, INSTANCE, Manifests, Workload, environment, rendered
from tests.k8s.test_policy import may_reach
from tests.k8s.test_render import VERSIONS, validate

FLEET = "overlays/fleet"
NAMES = ("demo", "demo-b")


def _workload(manifests: Manifests, component: str, instance: str) -> Workload:
    [found] = [
        workload
        for workload in manifests.services()
        if (workload.labels[COMPONENT], workload.labels[INSTANCE]) == (component, instance)
    ]
    return found


def _frontend() -> tuple[Workload, FrontendSettings]:
    manifests = rendered(FLEET)
    [frontend] = [it for it in manifests.services() if it.labels[COMPONENT] == "frontend"]
    variables = environment(manifests, frontend)
    settings = FrontendSettings.load(
        "frontend",
        [f"--{name}={variables[f'ORCINUS_{name}'.upper()]}" for name in ("model", "scheduler")],
    )
    return frontend, settings


def test_the_frontends_serve_both_models_by_the_services_of_their_schedulers() -> None:
    _, settings = _frontend()
    assert [model.names for model in settings.models] == [(name,) for name in NAMES]
    services = {item["metadata"]["name"]: item for item in rendered(FLEET).of("Service")}
    for model, instance in zip(settings.models, ("orcinus", "orcinus-b"), strict=True):
        host, _, port = model.scheduler.rpartition(":")
        assert services[host]["spec"]["selector"][INSTANCE] == instance
        assert services[host]["spec"]["ports"][0]["port"] == int(port)


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_field(version: str) -> None:
    for item in rendered(FLEET).objects:
        validate(item, version)


def test_every_object_is_named_once_and_belongs_to_one_deployment() -> None:
    objects = rendered(FLEET).objects
    identities = [(item["kind"], item["metadata"]["name"]) for item in objects]
    assert len(set(identities)) == len(identities)
    for item in objects:
        if item["kind"] != "Namespace":
            metadata = item["metadata"]
            assert metadata["namespace"] == "orcinus"
            is_of_second = re.search("-b(-|$)", metadata["name"]) and "to-b" not in metadata["name"]
            instance = "orcinus-b" if is_of_second else "orcinus"
            assert metadata["labels"][INSTANCE] == instance, metadata["name"]


def test_the_memory_of_a_frontend_is_enough_for_both_models() -> None:
    frontend, settings = _frontend()
    limit = TypeAdapter(ByteSize).validate_python(
        frontend.container["resources"]["limits"]["memory"].replace("Mi", "MiB")
    )
    with_page = settings.model_copy(update={"page": True})
    assert sum(with_page.memory_parts().values()) < limit


def test_variables_come_before_those_that_use_them() -> None:
    frontend, _ = _frontend()
    names = [variable["name"] for variable in frontend.container["env"]]
    assert names.index("SCHEDULER_HOST") < names.index("ORCINUS_SCHEDULER")


def test_one_model_has_three_pipelines_and_the_other_one() -> None:
    manifests = rendered(FLEET)
    for instance, n_pipelines in (("orcinus", 3), ("orcinus-b", 1)):
        scheduler = _workload(manifests, "scheduler", instance)
        n_stages = int(environment(manifests, scheduler)["ORCINUS_N_STAGES"])
        assert _workload(manifests, "worker", instance).n_pods == n_pipelines * n_stages


def test_frontends_reach_both_schedulers_and_the_models_do_not_reach_each_other() -> None:
    manifests = rendered(FLEET)
    frontend, _ = _frontend()
    first, second = "orcinus", "orcinus-b"
    for instance, other in ((first, second), (second, first)):
        scheduler = _workload(manifests, "scheduler", instance)
        assert may_reach(manifests, frontend, scheduler, 50052)
        assert may_reach(manifests, scheduler, _workload(manifests, "worker", instance), 50053)
        assert not may_reach(manifests, scheduler, _workload(manifests, "worker", other), 50053)
        assert not may_reach(manifests, scheduler, _workload(manifests, "scheduler", other), 50052)
        assert not may_reach(manifests, frontend, _workload(manifests, "worker", instance), 50053)
