"""Renders the base with components by `kubectl kustomize`, under names that can be told apart."""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

K8S = Path(__file__).parents[1]

PREFIX = "prefix-probe-"
"""Prefix of the names of all objects. Where kustomize puts it, names follow the release's name."""

NAMESPACE = "namespace-probe"
"""Namespace of all objects."""

HASH = re.compile(r"-[a-z0-9]{10}$")

Identity = tuple[str, str]
"""Kind and name of an object, the name without PREFIX."""

Objects = dict[Identity, dict[str, Any]]


class Unrendered(Exception):
    """kubectl is missing, or refuses the kustomization."""


def render(components: Iterable[str], options: Mapping[str, Any] | None = None) -> Objects:
    """Returns the objects of the base with `components`. `options` are further fields of the
    kustomization. The names of ConfigMaps have no hash.

    Raises Unrendered if kubectl fails.
    """
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made).resolve()
        to_k8s = Path(os.path.relpath(K8S, directory))
        kustomization = {
            "resources": [str(to_k8s / "base")],
            "components": [str(to_k8s / "components" / name) for name in components],
            "namePrefix": PREFIX,
            "namespace": NAMESPACE,
            **(options or {}),
        }
        if "mtls/cert-manager" in components:
            kustomization["replacements"] = _replacements()
        text = yaml.safe_dump(kustomization)
        (directory / "kustomization.yaml").write_text(text, encoding="utf-8")
        return _without_hashes(list(yaml.load_all(_kubectl(directory), yaml.CSafeLoader)))


def _replacements() -> Any:
    """Returns what makes the names in the public certificate follow the Service's."""
    overlay = K8S / "overlays" / "gpu" / "kustomization.yaml"
    return yaml.safe_load(overlay.read_text(encoding="utf-8"))["replacements"]


def _kubectl(directory: Path) -> str:
    try:
        done = subprocess.run(
            ["kubectl", "kustomize", str(directory)], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise Unrendered("the chart is made by kubectl (1.28 or newer), which is missing") from None
    if done.returncode:
        raise Unrendered(done.stderr.strip())
    return done.stdout


def _without_hashes(objects: list[dict[str, Any]]) -> Objects:
    names = {
        item["metadata"]["name"]: HASH.sub("", item["metadata"]["name"])
        for item in objects
        if item["kind"] == "ConfigMap"
    }
    renamed: list[dict[str, Any]] = [_replaced(item, names) for item in objects]
    return {(item["kind"], item["metadata"]["name"].removeprefix(PREFIX)): item for item in renamed}


def _replaced(value: Any, names: Mapping[str, str]) -> Any:
    match value:
        case dict():
            return {key: _replaced(inner, names) for key, inner in value.items()}
        case list():
            return [_replaced(inner, names) for inner in value]
        case str():
            return names.get(value, value)
        case _:
            return value
