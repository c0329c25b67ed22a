"""Where values of the chart stand in the objects, as expressions in place of what kustomize has.

Places that follow a setting or a number are not named here: they are where a rendering with a
number that nothing else has, has that number.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k8s.chart.kustomize import Identity, Objects, render
from k8s.chart.switches import in_order

SERVICES = ("frontend", "scheduler", "worker")
OWN_IMAGES = "localhost/orcinus/"


@dataclass(frozen=True, slots=True)
class Expression:
    """A scalar that a template computes."""

    text: str


@dataclass(frozen=True, slots=True)
class Block:
    """Lines of a template that add fields to a mapping, or elements to a list, after all others.

    `INDENT` in a line stands for the number of spaces before the block, and `DEEPER` for two more.
    """

    lines: tuple[str, ...]


Path = tuple[str | int, ...]

_PROBES: Mapping[int, str] = {
    7001: 'include "orcinus.stages" .',
    7013: 'include "orcinus.workers" .',
    7019: ".Values.frontend.replicas",
    7027: ".Values.scheduler.replicas",
    7039: 'include "orcinus.setting" (list . "frontend" "ORCINUS_DRAIN_S")',
    7043: 'include "orcinus.setting" (list . "worker" "ORCINUS_TP_SIZE") | quote',
}
"""Expressions by the number that stands for their value."""


Followers = Mapping[tuple[Identity, Path], Expression]


def probed(components: frozenset[str]) -> Followers:
    """Returns the places whose content follows a setting or a number of replicas where `components`
    are used, and what makes it."""
    return {
        (identity, path): Expression(_PROBES[int(value)])
        for identity, item in _render_with_probes(components).items()
        if identity[0] != "ConfigMap"
        for path, value in _scalars(item)
        if str(value).isdecimal() and int(value) in _PROBES
    }


def _render_with_probes(components: frozenset[str]) -> Objects:
    settings = {
        "orcinus-pipeline": "ORCINUS_N_STAGES=7001",
        "orcinus-frontend-settings": "ORCINUS_DRAIN_S=7039",
        "orcinus-worker-settings": "ORCINUS_TP_SIZE=7043",
    }
    return render(
        in_order(components),
        {
            "configMapGenerator": [
                {"name": name, "behavior": "merge", "literals": [literal]}
                for name, literal in settings.items()
            ],
            "replicas": [
                {"name": "orcinus-worker", "count": 7013},
                {"name": "orcinus-frontend", "count": 7019},
                {"name": "orcinus-scheduler", "count": 7027},
            ],
        },
    )


def _scalars(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    match value:
        case dict():
            for key, inner in value.items():
                yield from _scalars(inner, (*path, key))
        case list():
            for index, inner in enumerate(value):
                yield from _scalars(inner, (*path, index))
        case _:
            yield path, value


def mark(objects: Objects, follows: Followers) -> None:
    """Puts expressions and blocks into the objects of a rendering where values of the chart are."""
    for (identity, path), expression in follows.items():
        if identity in objects:
            _set(objects[identity], path, expression)
    for identity, item in objects.items():
        for container in _containers(item):
            if container["image"].startswith(OWN_IMAGES):
                container["imagePullPolicy"] = Expression(".Values.image.pullPolicy")
        for change in _CHANGES.get(identity, ()):
            change(item)
    for service in SERVICES:
        _mark_pods(objects[("Deployment", f"orcinus-{service}")], service)


def _set(item: Any, path: Path, value: Any) -> None:
    """Sets what is at `path`, if something is."""
    *parents, last = path
    for key in parents:
        item = _inner(item, key)
    if isinstance(item, dict) and last in item:
        item[last] = value


def _inner(item: Any, key: str | int) -> Any:
    """Returns a field of a mapping or an element of a list; None if it is not there."""
    match item, key:
        case dict(), _:
            return item.get(key)
        case list(), int() if key < len(item):
            return item[key]
        case _:
            return None


def _containers(item: Mapping[str, Any]) -> list[dict[str, Any]]:
    pod = item["spec"]["template"]["spec"] if item["kind"] == "Deployment" else {}
    return [*pod.get("initContainers", []), *pod.get("containers", [])]


def _mark_pods(item: dict[str, Any], service: str) -> None:
    template = item["spec"]["template"]
    pod = template["spec"]
    [container] = [it for it in pod["containers"] if it["name"] == service]
    values = f".Values.{service}"
    annotations = template["metadata"].setdefault("annotations", {})
    for part in ("pipeline", service):
        digest = f'include "orcinus.data" (list . "{part}") | sha256sum'
        annotations[f"checksum/{part}"] = Expression(digest)
    annotations["block"] = _fields(f"{values}.podAnnotations")
    pod["block"] = Block(
        (*_field(f"{values}.nodeSelector").lines, *_field(".Values.image.pullSecrets").lines)
    )
    pod["tolerations"].append(_fields(f"{values}.tolerations"))
    container["env"].append(_fields(f"{values}.extraEnv"))
    container["volumeMounts"].append(_fields(f"{values}.extraVolumeMounts"))
    pod["volumes"].append(_fields(f"{values}.extraVolumes"))
    _mark_model(pod)
    _mark_shared_memory(pod)


_FIELD_NAMES = {"pullSecrets": "imagePullSecrets"}


def _fields(value: str) -> Block:
    """Returns the lines that add all of a value, if that is not empty."""
    lines = (f"{{{{- with {value} }}}}", "{{- toYaml . | nindent INDENT }}", "{{- end }}")
    return Block(lines)


def _field(value: str) -> Block:
    """Returns the lines that add a field with a value, if that is not empty."""
    name = value.rpartition(".")[2]
    return Block(
        (
            f"{{{{- with {value} }}}}",
            f"{_FIELD_NAMES.get(name, name)}:",
            "  {{- toYaml . | nindent DEEPER }}",
            "{{- end }}",
        )
    )


def _mark_model(pod: dict[str, Any]) -> None:
    for volume in pod["volumes"]:
        if isinstance(volume, Block) or volume["name"] != "model":
            continue
        if "persistentVolumeClaim" in volume:
            claim = Expression('include "orcinus.modelClaim" .')
            volume["persistentVolumeClaim"]["claimName"] = claim
        if "image" in volume:
            image = 'include "orcinus.image" (list . "demo-model" "")'
            volume["image"] = {
                "reference": Expression(f".Values.model.image | default ({image})"),
                "pullPolicy": Expression(".Values.image.pullPolicy"),
            }


def _mark_shared_memory(pod: dict[str, Any]) -> None:
    for volume in pod["volumes"]:
        if isinstance(volume, dict) and volume["name"] == "shm":
            size = json.dumps(volume["emptyDir"]["sizeLimit"])
            value = Expression(f".Values.worker.sharedMemory | default {size}")
            volume["emptyDir"]["sizeLimit"] = value


def _mark_claim(values: str) -> Callable[[dict[str, Any]], None]:
    def change(item: dict[str, Any]) -> None:
        item["spec"]["resources"]["requests"]["storage"] = Expression(f".Values.{values}.size")
        item["spec"]["block"] = Block(
            (
                f"{{{{- with .Values.{values}.storageClassName }}}}",
                "storageClassName: {{ . | quote }}",
                "{{- end }}",
            )
        )

    return change


def _mark_service(item: dict[str, Any]) -> None:
    item["metadata"]["block"] = Block(
        (
            "{{- with .Values.frontend.service.annotations }}",
            "annotations:",
            "  {{- toYaml . | nindent DEEPER }}",
            "{{- end }}",
        )
    )
    item["spec"]["type"] = Expression(".Values.frontend.service.type")


def _mark_autoscaler(item: dict[str, Any]) -> None:
    item["spec"]["minReplicas"] = Expression(".Values.autoscaling.minReplicas")
    item["spec"]["maxReplicas"] = Expression(".Values.autoscaling.maxReplicas")


def _mark_way_to_api_server(item: dict[str, Any]) -> None:
    anywhere = item["spec"].pop("egress")
    item["spec"]["block"] = Block(
        (
            "egress:",
            "  {{- range .Values.networkPolicies.apiServers }}",
            "  - to: [{ipBlock: {cidr: {{ .cidr | quote }}}}]",
            "    ports: [{protocol: TCP, port: {{ .port }}}]",
            "  {{- else }}",
            f"  {{{{- toYaml (fromYamlArray `{json.dumps(anywhere)}`) | nindent DEEPER }}}}",
            "  {{- end }}",
        )
    )


def _mark_scraper(item: dict[str, Any]) -> None:
    [rule] = item["spec"]["ingress"]
    [source] = rule["from"]
    labels = source["namespaceSelector"]["matchLabels"]
    labels["kubernetes.io/metadata.name"] = Expression(".Values.monitoring.namespace | quote")


def _mark_release(item: dict[str, Any]) -> None:
    item["metadata"]["labels"]["release"] = Expression(".Values.monitoring.release | quote")


_CHANGES: Mapping[Identity, Sequence[Callable[[dict[str, Any]], None]]] = {
    ("PersistentVolumeClaim", "orcinus-model"): [_mark_claim("model.claim")],
    ("PersistentVolumeClaim", "orcinus-weight-cache"): [_mark_claim("weightCache")],
    ("Service", "orcinus-frontend"): [_mark_service],
    ("HorizontalPodAutoscaler", "orcinus-frontend"): [_mark_autoscaler],
    ("NetworkPolicy", "orcinus-scheduler-api"): [_mark_way_to_api_server],
    ("NetworkPolicy", "orcinus-metrics"): [_mark_scraper],
    ("PodMonitor", "orcinus"): [_mark_release],
    ("PrometheusRule", "orcinus"): [_mark_release],
}
