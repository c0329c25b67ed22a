"""What is rendered by Helm and by kustomize: values, and the kustomization that means the same."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from k8s.chart.switches import OPTIONAL
from tests.k8s.manifests import COMPOSITIONS, OTHER_HOST, OTHER_NAMESPACE, Composition

IMAGES = {"image": {"tag": "dev"}}
"""Values by which images are called as in the base."""


@dataclass(frozen=True, slots=True)
class Case:
    """Values of the chart, and what kustomize is told instead."""

    composition: Composition
    values: Mapping[str, Any]
    release: str = "orcinus"
    namespace: str = "orcinus"


def switched_on(*components: str) -> dict[str, bool]:
    """Returns the values that switch components on."""
    names = {switch.component: name for name, switch in OPTIONAL.items()}
    return {names[component]: True for component in components}


def of_components(*components: str) -> Case:
    """Returns the case of the base with components, of which one may say where the model is."""
    model = [name for name in components if name.startswith("model-")]
    sources = {"model-pvc": "claim", "model-fetch": "fetch", "model-image": "image"}
    others = [name for name in components if name not in model]
    values = {
        "components": switched_on(*others),
        "model": {"from": sources[model[0]] if model else "demo"},
    }
    return Case(Composition("base", components), values)


def _settings(name: str, *literals: str) -> dict[str, Any]:
    return {"configMapGenerator": [{"name": name, "behavior": "merge", "literals": list(literals)}]}


_EVERYTHING = COMPOSITIONS["everything"]

CASES: Mapping[str, Case] = {
    "base": Case(Composition("base"), {}),
    "demo": Case(
        Composition("overlays/demo"),
        {
            "components": {"page": True},
            "worker": {"resources": {"requests": {"cpu": "250m"}}},
        },
    ),
    "everything": Case(
        _EVERYTHING,
        {
            "model": {"from": "claim"},
            "stages": 4,
            "components": switched_on(
                *(it for it in _EVERYTHING.components if it not in ("model-pvc", "stages"))
            ),
        },
    ),
    "3 stages, a spare": Case(
        Composition("base", ("stages",), n_stages=3, n_workers=7),
        {"stages": 3, "pipelines": 2, "spares": 1},
    ),
    "another namespace": Case(
        COMPOSITIONS["another namespace"],
        {"components": {"mtls": True, "certManager": True}, "listenHost": OTHER_HOST},
        namespace=OTHER_NAMESPACE,
    ),
    "another release": Case(
        Composition("base", ("monitoring",), options={"namePrefix": "mine-"}),
        {"components": {"monitoring": True}},
        release="mine",
    ),
    "a model from S3": Case(
        Composition(
            "base",
            ("model-fetch", "../../tests/k8s/chart/s3"),
        ),
        {
            "model": {
                "from": "fetch",
                "source": "s3://bucket/a-model/",
                "region": "eu-central-1",
                "endpoint": "https://storage.example",
            }
        },
    ),
    "streams drain for an hour": Case(
        Composition(
            "base",
            ("drain",),
            options=_settings("orcinus-frontend-settings", "ORCINUS_DRAIN_S=3600"),
        ),
        {"settings": {"frontend": {"ORCINUS_DRAIN_S": 3600}}},
    ),
    "large numbers": Case(
        Composition(
            "base",
            options=_settings(
                "orcinus-scheduler-settings",
                "ORCINUS_MAX_BATCH_TOKENS=1048576",
                "ORCINUS_POD_DELETION_COST=true",
            ),
        ),
        {
            "settings": {
                "scheduler": {
                    "ORCINUS_MAX_BATCH_TOKENS": 1048576,
                    "ORCINUS_POD_DELETION_COST": True,
                }
            }
        },
    ),
}
"""Cases by name. The tags of their images are those of the base."""
