"""Every two components that fit together render to what Kubernetes takes."""

import re
from itertools import combinations

import pytest
import yaml

from tests.k8s.manifests import K8S, Composition, Manifests, render
from tests.k8s.test_render import FOREIGN, VERSIONS, validate
from tests.k8s.test_written_out import omitted, types

pytestmark = pytest.mark.thorough

PAGE = (K8S.parent / "docs" / "operations" / "deploy.md").read_text(encoding="utf-8")
ORDER = re.findall(
    r"^\| `([a-z0-9.-]+)` \|", PAGE.partition("## All components")[2].partition("\n## ")[0], re.M
)
"""Components in the order in which an overlay lists them."""

APART = [
    {"model-pvc", "model-fetch"},
    {"model-pvc", "model-image"},
    {"model-fetch", "model-image"},
    {"istio", "linkerd"},
    {"hard-spread", "kubernetes-1.20"},
    {"lws", "pipeline-autoscaling"},
    *(
        {name, "kubernetes-1.20"}
        for name in ("openshift", "istio", "linkerd", "model-image", "lws")
    ),
]
"""Components that exclude one another: two places of the checkpoint, two meshes, old clusters with
what they do not have, and a scale of a Deployment that `lws` replaces. (`model-fetch` brings
`model-pvc` along.)"""

PAIRS = [pair for pair in combinations(ORDER, 2) if set(pair) not in APART]


def test_the_page_lists_every_component_once() -> None:
    there = {path.name for path in (K8S / "components").iterdir()}
    assert sorted(ORDER) == sorted(there)


@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
def test_kubernetes_knows_every_field(pair: tuple[str, str]) -> None:
    text = render(Composition("base", pair))
    manifests = Manifests(list(yaml.load_all(text, yaml.CSafeLoader)))
    names = [(item["kind"], item["metadata"]["name"]) for item in manifests.objects]
    assert len(set(names)) == len(names)
    assert {it.labels["app.kubernetes.io/component"] for it in manifests.services()} == {
        "frontend",
        "scheduler",
        "worker",
    }
    for item in manifests.objects:
        if item["kind"] not in FOREIGN:
            for version in VERSIONS:
                validate(item, version)
            assert not list(omitted(item, types()[item["apiVersion"], item["kind"]], "it"))
