"""Rendered manifests: every overlay, the base with each component, and components together.

`python -m tests.k8s.manifests DIRECTORY` writes them all, for linters.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

K8S = Path(__file__).parents[2] / "k8s"
KUSTOMIZE_TIMEOUT_S = 60
NAME, COMPONENT = "app.kubernetes.io/name", "app.kubernetes.io/component"
INSTANCE = "app.kubernetes.io/instance"

OTHER_NAMESPACE = "orcinus-b"
OTHER_HOST = "10.244.1.7"

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Composition:
    """A kustomization as a user might write it."""

    resource: str
    components: tuple[str, ...] = ()
    n_stages: int | None = None
    n_workers: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Any further fields of the kustomization."""

    @property
    def is_local(self) -> bool:
        """Whether it is one of the project's own directories, and not put together here."""
        return not (self.components or self.options or self.n_stages or self.n_workers)


def replacements(overlay: str) -> Any:
    """Returns the replacements that an overlay lists."""
    text = (K8S / "overlays" / overlay / "kustomization.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)["replacements"]


_EVERYTHING = (
    "mtls",
    "mtls/cert-manager",
    "model-pvc",
    "tensor-parallel",
    "gpu",
    "monitoring",
    "priority",
    "page",
    "receipts",
)

COMPOSITIONS: Mapping[str, Composition] = {
    "base": Composition("base"),
    **{
        f"overlays/{path.name}": Composition(f"overlays/{path.name}")
        for path in sorted((K8S / "overlays").iterdir())
    },
    **{
        path.name: Composition("base", (path.name,))
        for path in sorted((K8S / "components").iterdir())
    },
    "cert-manager": Composition("base", ("mtls", "mtls/cert-manager")),
    "another namespace": Composition(
        "base",
        ("mtls", "mtls/cert-manager"),
        options={
            "namespace": OTHER_NAMESPACE,
            "replacements": replacements("gpu"),
            "configMapGenerator": [
                {
                    "name": "orcinus-pipeline",
                    "behavior": "merge",
                    "literals": [f"LISTEN_HOST={OTHER_HOST}"],
                }
            ],
        },
    ),
    "3 stages": Composition("base", ("stages",), n_stages=3),
    "a spare": Composition("base", n_workers=3),
    "lws, 3 stages": Composition("base", ("lws",), n_stages=3),
    "tensor-parallel on GPUs": Composition("base", ("tensor-parallel", "gpu")),
    "pipeline-autoscaling": Composition(
        "base",
        ("pipeline-autoscaling",),
        options={
            "configMapGenerator": [
                {
                    "name": "orcinus-scheduler-settings",
                    "behavior": "merge",
                    "literals": ["ORCINUS_MIN_PIPELINES=0", "ORCINUS_MAX_PIPELINES=3"],
                }
            ]
        },
    ),
    "everything": Composition("base", (*_EVERYTHING, "tracing", "autoscaling", "stages"), 4),
    "everything, lws": Composition("base", (*_EVERYTHING, "tracing", "lws", "stages"), 4),
    "limits, tensor-parallel": Composition("base", ("tensor-parallel", "cpu-limits")),
    "OpenShift, traced": Composition("base", ("tracing", "openshift")),
    "fetched, lws": Composition("base", ("model-fetch", "mtls", "lws", "stages"), 3),
    "demo, 1.20": Composition("overlays/demo", ("kubernetes-1.20",)),
    "demo, mtls, 3 stages, 1.20": Composition(
        "overlays/demo", ("mtls", "stages", "kubernetes-1.20"), 3
    ),
    "all optional, 1.20": Composition(
        "base", ("mtls", "monitoring", "tracing", "autoscaling", "kubernetes-1.20")
    ),
}


SEVERAL = {"overlays/fleet"}
"""Compositions that have more than one deployment."""

FIELDS = {
    "metadata.name": "orcinus-worker-1",
    "metadata.namespace": "orcinus",
    "metadata.uid": "0b8f2a1e-6b0e-4f43-93a5-2f3cf6a5ea5c",
    "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']": "1",
    "spec.nodeName": "node-1",
    "status.podIP": "fd00:10:244:1::7",
}
"""Values that the downward API would give, in addition to the labels of the pod."""


class Manifests:
    """The objects that one composition renders to."""

    def __init__(self, objects: list[Object]) -> None:
        self.objects = objects

    def of(self, *kinds: str) -> list[Object]:
        """All objects of these kinds."""
        return [item for item in self.objects if item["kind"] in kinds]

    def get(self, kind: str, name: str) -> Object:
        """The one object of this kind and name."""
        (found,) = (item for item in self.of(kind) if item["metadata"]["name"] == name)
        return found

    def config(self, prefix: str) -> dict[str, str]:
        """Data of the ConfigMap whose name, apart from kustomize's hash, is this."""
        (found,) = (
            item
            for item in self.of("ConfigMap")
            if item["metadata"]["name"].rpartition("-")[0] == prefix
        )
        data: dict[str, str] = found["data"]
        return data

    def workloads(self) -> "list[Workload]":
        """Whatever makes pods."""
        found = [
            Workload(item, item["spec"]["template"])
            for item in self.of("Deployment", "DaemonSet", "Job")
        ]
        return found + [
            Workload(item, item["spec"]["leaderWorkerTemplate"]["workerTemplate"])
            for item in self.of("LeaderWorkerSet")
        ]

    def services(self) -> "list[Workload]":
        """Returns the workloads of our own processes."""
        return [found for found in self.workloads() if found.labels[NAME] == "orcinus"]

    def workload(self, component: str) -> "Workload":
        """The one of our services of that name."""
        (found,) = (item for item in self.services() if item.labels[COMPONENT] == component)
        return found


class Workload:
    """A Deployment or LeaderWorkerSet, and the pods it makes."""

    def __init__(self, item: Object, template: Object) -> None:
        self.item = item
        self.name: str = item["metadata"]["name"]
        self.labels: dict[str, str] = template["metadata"]["labels"]
        self.pod: Object = template["spec"]

    @property
    def n_pods(self) -> int | None:
        """Number of pods, or of pods in the group; None if it is left to an autoscaler."""
        spec = self.item["spec"]
        if self.item["kind"] == "LeaderWorkerSet":
            size: int = spec["leaderWorkerTemplate"]["size"]
            return size
        replicas: int | None = spec.get("replicas")
        return replicas

    @property
    def container(self) -> Object:
        """The one container that is not for initialisation."""
        (container,) = self.pod["containers"]
        found: Object = container
        return found

    @property
    def all_containers(self) -> list[Object]:
        """All containers, including init containers."""
        return [*self.pod.get("initContainers", []), *self.pod["containers"]]

    def ports(self) -> dict[str, int]:
        """Port numbers by name."""
        return {port["name"]: port["containerPort"] for port in self.container.get("ports", [])}

    def volume(self, name: str) -> Object:
        """The volume of that name."""
        (found,) = (item for item in self.pod["volumes"] if item["name"] == name)
        volume: Object = found
        return volume


def environment(manifests: Manifests, workload: Workload) -> dict[str, str]:
    """The variables of a service's container."""
    container = workload.container
    found: dict[str, str] = {}
    for source in container["envFrom"]:
        found |= manifests.get("ConfigMap", source["configMapRef"]["name"])["data"]
    for variable in container["env"]:
        value = _value(manifests, workload, variable)
        found[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda it: found[it[1]], value)
    return found


def _value(manifests: Manifests, workload: Workload, variable: dict[str, Any]) -> str:
    if "value" in variable:
        value: str = variable["value"]
        return value
    match variable["valueFrom"]:
        case {"fieldRef": {"fieldPath": path}}:
            of_pods = {f"metadata.labels['{key}']": value for key, value in workload.labels.items()}
            found: str = (FIELDS | of_pods)[path]
            return found
        case {"configMapKeyRef": {"name": name, "key": key}}:
            data: dict[str, str] = manifests.get("ConfigMap", name)["data"]
            return data[key]
    raise AssertionError(f"no value for {variable}")


@cache
def rendered(name: str) -> Manifests:
    """The composition of that name, as kubectl renders it."""
    return Manifests(list(yaml.load_all(render(COMPOSITIONS[name]), yaml.CSafeLoader)))


def render(composition: Composition) -> str:
    """Returns the output of `kubectl kustomize`.

    Raises:
        AssertionError: kubectl is missing, fails or warns.
    """
    if composition.is_local:
        return render_directory(K8S / composition.resource)
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made).resolve()
        to_k8s = Path(os.path.relpath(K8S, directory))
        kustomization: Object = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [str(to_k8s / composition.resource)],
            "components": [str(to_k8s / "components" / name) for name in composition.components],
            **composition.options,
        }
        if composition.n_stages is not None:
            kustomization["configMapGenerator"] = [
                {
                    "name": "orcinus-pipeline",
                    "behavior": "merge",
                    "literals": [f"ORCINUS_N_STAGES={composition.n_stages}"],
                }
            ]
        if composition.n_workers is not None:
            kustomization["replicas"] = [{"name": "orcinus-worker", "count": composition.n_workers}]
        (directory / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        return render_directory(directory)


def render_directory(directory: Path) -> str:
    """Returns the output of `kubectl kustomize` for a directory.

    Raises:
        AssertionError: kubectl is missing, fails or warns.
    """
    assert shutil.which("kubectl"), (
        "the manifests are rendered by kubectl (1.28 or newer): install it"
    )
    done = subprocess.run(
        ["kubectl", "kustomize", str(directory)],
        capture_output=True,
        text=True,
        timeout=KUSTOMIZE_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "kustomize warns"
    return done.stdout


def each_composition() -> pytest.MarkDecorator:
    """Runs a test once for every composition; it takes its name.

    Compositions of a single component are rendered where there is time. Those of several
    deployments have tests of their own.
    """
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(
                name, marks=pytest.mark.thorough if len(composition.components) == 1 else ()
            )
            for name, composition in COMPOSITIONS.items()
            if name not in SEVERAL
        ],
    )


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a selector of plain equalities selects labels; an empty one selects all."""
    return all(labels.get(key) == value for key, value in selector.items())


def walk(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields every key of a tree, at any depth, with its value."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key, inner
            yield from walk(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from walk(inner)


def main(directory: Path) -> None:
    """Writes every composition to a file."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for name, composition in COMPOSITIONS.items():
        file = directory / f"{name.replace('/', '-').replace(', ', '-').replace(' ', '-')}.yaml"
        file.write_text(render(composition), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
