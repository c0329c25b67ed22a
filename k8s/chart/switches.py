"""The components that the chart has, and which of them are rendered together."""

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Switch:
    """A kustomize component, and the condition on the chart's values that it is used under."""

    component: str
    condition: str
    needs: frozenset[str] = frozenset()
    """Components without which this one is never used."""


def _value(component: str) -> str:
    first, *others = re.split("[-/]", component)
    return first + "".join(word.capitalize() for word in others)


def _optional(component: str) -> Switch:
    return Switch(component, f".Values.components.{_value(component)}")


MODEL_SWITCHES = {
    "claim": Switch("model-pvc", '(eq .Values.model.from "claim")'),
    "fetch": Switch("model-fetch", '(eq .Values.model.from "fetch")'),
    "image": Switch("model-image", '(eq .Values.model.from "image")'),
}
"""The component of each place that a checkpoint comes from, by the value `model.from`."""

CERTIFICATES = Switch(
    "mtls/cert-manager", ".Values.components.certManager", needs=frozenset({"mtls"})
)

OPTIONAL: Mapping[str, Switch] = {
    **{
        _value(name): _optional(name)
        for name in ("weight-cache", "mtls", "tensor-parallel", "gpu", "monitoring", "tracing")
    },
    "certManager": CERTIFICATES,
    **{
        _value(name): _optional(name)
        for name in (
            *(
                "page",
                "receipts",
                "priority",
                "autoscaling",
                "hard-spread",
                "cpu-limits",
                "openshift",
            ),
            *("istio", "linkerd", "pipeline-autoscaling", "no-surge", "pod-deletion-cost"),
        )
    },
}
"""Components that a value below `components` switches on, by that value."""

SWITCHES: Mapping[str, Switch] = {
    switch.component: switch for switch in (*MODEL_SWITCHES.values(), *OPTIONAL.values())
}
"""All components of the chart, in the order in which an overlay lists them."""

ALWAYS = ("stages", "drain")
"""Components that make values of the chart follow settings; an overlay lists them last."""

LEFT_OUT = {"lws", "kubernetes-1.20"}
"""Components that the chart has not: one replaces a kind by another one, and one is for clusters
that are older than the chart supports."""

AFTER_STAGES = ("pipeline-autoscaling", "no-surge")
"""Components that an overlay lists after `stages`."""

_TOGETHER = (
    {"model-fetch", "openshift"},
    {"tensor-parallel", "gpu"},
    {"tensor-parallel", "cpu-limits"},
    {"gpu", "cpu-limits"},
    {"mtls", "istio"},
    {"tracing", "openshift"},
    {"tracing", "mtls"},
    {"tensor-parallel", "gpu", "cpu-limits"},  # after the pairs, over which it wins
)

VARIANTS: tuple[frozenset[str], ...] = (
    frozenset(),
    *(frozenset({name}) | switch.needs for name, switch in SWITCHES.items()),
    *(frozenset(together) for together in _TOGETHER),
)
"""Sets of components that are rendered: each alone, and those that change the same places."""


def in_order(components: frozenset[str]) -> list[str]:
    """Returns the components in the order in which an overlay lists them, with those that every
    deployment has."""
    chosen = [name for name in SWITCHES if name in components and name not in AFTER_STAGES]
    return [*chosen, *ALWAYS, *(name for name in AFTER_STAGES if name in components)]
