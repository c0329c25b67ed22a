"""What an API server would add to a list is written out, so that applying again changes nothing.

`kubectl apply` compares lists as wholes, or finds their elements by keys. An element without a
field that the server adds differs from what is there for ever, and one without a key cannot be
applied server-side by an old server at all.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from tests.k8s.manifests import each_composition, rendered
from tests.k8s.test_render import FOREIGN

DEFAULTED = {
    "fieldRef": "apiVersion",
    "strategy": "type",
    "serviceAccountToken": "expirationSeconds",
}
"""A field that the API server adds to an object of this name: in lists that are compared as wholes,
and in objects whose fields exclude one another."""

SCHEMAS = Path(kubernetes_validate.__file__).with_name("kubernetes-json-schema")


@cache
def definitions() -> dict[str, Any]:
    """The types of Kubernetes, by name."""
    text = (SCHEMAS / "v1.32.0-local" / "_definitions.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)["$defs"]
    return found


@cache
def types() -> dict[tuple[str, str], dict[str, Any]]:
    """The types of objects, by version and kind."""
    found = {}
    for schema in definitions().values():
        for kind in schema.get("x-kubernetes-group-version-kind", []):
            version = "/".join(part for part in (kind["group"], kind["version"]) if part)
            found[version, kind["kind"]] = schema
    return found


def omitted(value: Any, schema: dict[str, Any], path: str) -> Iterator[str]:
    """Returns the places in a value where a key of a list, or a default, is not written out."""
    if "$ref" in schema:
        schema = {**definitions()[schema["$ref"].rpartition("/")[2]], **schema}
    if isinstance(value, list):
        keys = schema.get("x-kubernetes-list-map-keys", [])
        for index, item in enumerate(value):
            yield from (f"{path}[{index}].{key}" for key in keys if key not in item)
            yield from omitted(item, schema.get("items", {}), f"{path}[{index}]")
    elif isinstance(value, dict):
        for name, inner in value.items():
            below = f"{path}.{name}"
            if name in DEFAULTED and DEFAULTED[name] not in inner:
                yield f"{below}.{DEFAULTED[name]}"
            yield from omitted(inner, schema.get("properties", {}).get(name, {}), below)


@each_composition()
def test_nothing_is_left_to_be_added(name: str) -> None:
    found: list[str] = []
    for item in rendered(name).objects:
        if item["kind"] not in FOREIGN:
            schema = types()[item["apiVersion"], item["kind"]]
            found += omitted(item, schema, f"{item['kind']} {item['metadata']['name']}")
    assert found == []


@each_composition()
def test_ports_of_policies_name_their_protocol(name: str) -> None:
    for policy in rendered(name).of("NetworkPolicy"):
        rules = [*policy["spec"].get("ingress", []), *policy["spec"].get("egress", [])]
        assert all("protocol" in port for rule in rules for port in rule.get("ports", []))


PROJECTED = {"downwardAPI": {"items": [{"path": "p", "fieldRef": {}}]}}


def in_pod(**spec: Any) -> dict[str, Any]:
    """Returns the `spec` of a Deployment whose pods have this one."""
    return {"template": {"spec": spec}}


@pytest.mark.parametrize(
    ("path", "spec"),
    [
        ("strategy.type", {"strategy": {"rollingUpdate": {"maxSurge": 1}}}),
        (
            "template.spec.containers[0].ports[0].protocol",
            in_pod(containers=[{"name": "a", "ports": [{"containerPort": 1}]}]),
        ),
        (
            "template.spec.volumes[0].projected.sources[0].downwardAPI.items[0].fieldRef.apiVersion",
            in_pod(volumes=[{"name": "v", "projected": {"sources": [PROJECTED]}}]),
        ),
    ],
)
def test_what_is_left_out_is_found(path: str, spec: dict[str, Any]) -> None:
    schema = types()["apps/v1", "Deployment"]
    assert list(omitted({"spec": spec}, schema, "it")) == [f"it.spec.{path}"]
