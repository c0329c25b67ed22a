"""Writes the chart: templates of all objects, the values with their schema, and what Helm wants."""

import json
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from k8s.chart import places, templates
from k8s.chart.conditional import Listed, Mapped, Node, Part, Rendering, Rule, Scalar, combine
from k8s.chart.kustomize import Identity, render
from k8s.chart.switches import VARIANTS, in_order
from k8s.chart.values import all_values, defaults
from services.common.version import VERSION

STATIC = Path(__file__).parent / "static"
LONG_TEXT = 4_000
"""Characters of a text from which on it is a file of its own in the chart."""
SETTINGS = {
    "orcinus-pipeline": "pipeline",
    **{f"orcinus-{name}-settings": name for name in places.SERVICES},
}
_FIGURES = frozenset({"model-pvc", "weight-cache", "autoscaling", "monitoring"})
"""Components with figures that are values of the chart."""
_MOVES_FOLLOWERS = frozenset({"no-surge"})
"""Components with which other places follow a setting than without them."""
_CONDITIONS: Mapping[Identity, str] = {
    ("PersistentVolumeClaim", "orcinus-model"): "not .Values.model.claim.existing",
}
_METADATA = {
    "apiVersion": "v2",
    "name": "orcinus",
    "description": "Serves Transformer language models by iteration-level scheduling",
    "type": "application",
    "version": VERSION,
    "appVersion": VERSION,
    "kubeVersion": ">=1.27.0-0",
}


def write(directory: Path) -> None:
    """Writes the chart into `directory`, which is emptied first.

    Raises Unrendered if kubectl fails.
    """
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(STATIC, directory)
    for name, text in files().items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def files() -> dict[str, str]:
    """Returns the texts of all files that are made, by their paths in the chart."""
    combined = combine(_renderings())
    assert isinstance(combined, Mapped)
    made = {
        "Chart.yaml": yaml.safe_dump(_METADATA, sort_keys=False),
        "values.yaml": _values_text(),
        "values.schema.json": json.dumps(_schema(), indent=2) + "\n",
    }
    for part in combined.parts:
        if _identity(part)[0] != "Namespace":  # that of a release is there already
            made |= _object_files(part)
    return made


def _renderings() -> list[Rendering]:
    """Returns the marked objects of each set of components that is rendered."""
    follows = {
        components: places.probed(components | {"gpu"})
        for components in (frozenset(), _MOVES_FOLLOWERS)
    }
    renderings = []
    for components in VARIANTS:
        objects = render(in_order(components))
        places.mark(objects, follows[components & _MOVES_FOLLOWERS])
        renderings.append((components, objects))
    return renderings


def _schema() -> dict[str, Any]:
    made = all_values().model_json_schema()
    return {"$schema": "http://json-schema.org/draft-07/schema#", **made}


def _values_text() -> str:
    values = defaults(render(in_order(frozenset())), render(in_order(_FIGURES)))
    head = "# Values of the chart. The docs of deploying describe how they belong together.\n"
    return head + "\n".join(_value_lines(values, 0)) + "\n"


def _value_lines(values: BaseModel, indent: int) -> Iterator[str]:
    margin = " " * indent
    for name, field in type(values).model_fields.items():
        value = getattr(values, name)
        about = field.description or (value.__doc__ if isinstance(value, BaseModel) else "") or ""
        yield from _comment(about, margin)
        if isinstance(value, BaseModel):
            yield f"{margin}{field.alias or name}:"
            yield from _value_lines(value, indent + 2)
        else:
            yield f"{margin}{field.alias or name}: {json.dumps(value)}"


def _comment(text: str, margin: str) -> Iterator[str]:
    prefix = f"{margin}# "
    yield from textwrap.wrap(
        " ".join(text.split()), 100, initial_indent=prefix, subsequent_indent=prefix
    )


def _object_files(part: Part) -> dict[str, str]:
    """Returns the template of an object, and the files that it uses."""
    kind, name = identity = _identity(part)
    made = {}
    if name in SETTINGS:
        setting = SETTINGS[name]
        included = f'include "orcinus.data" (list . "{setting}")'
        part, data = _replaced(part, ("data",), _included("data", included))
        made[f"templates/_settings-{setting}.tpl"] = templates.definition(
            f"orcinus.settings.{setting}", data
        )
    elif kind == "ConfigMap":
        part, made = _with_files(part)
    service = name.removeprefix("orcinus-")
    if kind == "Deployment" and service in places.SERVICES:
        path = ("spec", "template", "spec", "containers", service, "resources")
        included = f'include "orcinus.resources" (list . "{service}")'
        part, resources = _replaced(part, path, _included("resources", included))
        made[f"templates/_resources-{service}.tpl"] = templates.definition(
            f"orcinus.resources.{service}", resources
        )
    title = f"{service}-{kind}".lower()
    made[f"templates/{title}.yaml"] = _HEAD + _with_condition(identity, templates.document(part))
    return made


_HEAD = "{{- /* Made by `python -m k8s.chart` of the kustomize manifests: change those. */ -}}\n"


def _identity(part: Part) -> Identity:
    assert isinstance(part.key, tuple)
    kind, name = part.key
    return str(kind), str(name)


def _with_condition(identity: Identity, text: str) -> str:
    kind, _ = identity
    policies = ".Values.networkPolicies.enabled" if kind == "NetworkPolicy" else None
    condition = _CONDITIONS.get(identity, policies)
    return text if condition is None else f"{{{{- if {condition} }}}}\n{text}{{{{- end }}}}\n"


def _included(field: str, expression: str) -> Scalar:
    lines = (f"{field}:", f"  {{{{- {expression} | nindent DEEPER }}}}")
    return Scalar([Rule(frozenset(), places.Block(lines))])


def _replaced(part: Part, path: tuple[str, ...], new: Scalar) -> tuple[Part, Node]:
    """Returns a part with another node at `path`, and the node that was there."""
    if not path:
        return Part(part.key, part.is_there, new), part.node
    assert isinstance(part.node, (Mapped, Listed))
    key, *below = path
    parts = list(part.node.parts)
    [index] = [index for index, inner in enumerate(parts) if inner.key == key]
    parts[index], old = _replaced(parts[index], tuple(below), new)
    return Part(part.key, part.is_there, type(part.node)(parts)), old


def _with_files(part: Part) -> tuple[Part, dict[str, str]]:
    """Returns a ConfigMap whose long texts are files of the chart, and these."""
    made = {}
    _, data = _replaced(part, ("data",), Scalar([]))
    assert isinstance(data, Mapped)
    for text in data.parts:
        match text.node:
            case Scalar([Rule(_, str() as content)]) if len(content) >= LONG_TEXT:
                path = f"files/{text.key}"
                made[path] = content
                file = places.Expression(f'.Files.Get "{path}" | toJson')
                new = Scalar([Rule(frozenset(), file)])
                part, _ = _replaced(part, ("data", str(text.key)), new)
    return part, made
