"""What `docs/security.md` says of each port is what the manifests let through.

That processes listen there and nowhere else is for `tests/system/test_listeners.py`.
"""

from typing import Any

import pytest

from tests.k8s.manifests import COMPONENT, NAME, Manifests, Workload, rendered
from tests.k8s.test_policy import may_reach, policies_of
from tests.listeners import table

EVERYTHING = ["everything", "everything, lws", "all optional, 1.20"]
UNNAMED_PORT = 41234
"""A port that no manifest speaks of, as the kernel would choose it."""


def process(workload: Workload) -> str:
    """The process as the table calls it."""
    return workload.labels.get(COMPONENT, workload.labels[NAME])


def clients(manifests: Manifests, workload: Workload, port: int) -> set[str]:
    """Returns who may connect to a port, by the NetworkPolicies of both sides."""
    sources = manifests.workloads()
    found = {process(it) for it in sources if may_reach(manifests, it, workload, port)}
    for policy in policies_of(manifests, workload, "Ingress"):
        for rule in policy.get("ingress", []):
            if any(item["port"] == port for item in rule.get("ports", [])):
                found |= from_elsewhere(rule)
    return found


def from_elsewhere(rule: dict[str, Any]) -> set[str]:
    """Returns the clients outside the namespace that a rule lets in."""
    if "from" not in rule:
        return {"anyone"}
    return {"monitoring" for peer in rule["from"] if "namespaceSelector" in peer}


@pytest.mark.parametrize("name", EVERYTHING)
def test_the_table_has_every_port_that_manifests_name(name: str) -> None:
    manifests = rendered(name)
    listed = {(row.process, row.port) for row in table()}
    made = {(process(it), port) for it in manifests.workloads() for port in it.ports().values()}
    assert made == listed - {("worker", None)}


@pytest.mark.parametrize("name", EVERYTHING)
def test_policies_let_in_whom_the_table_names_and_nobody_else(name: str) -> None:
    manifests = rendered(name)
    workloads = {process(it): it for it in manifests.workloads()}
    for row in table():
        found = clients(manifests, workloads[row.process], row.port or UNNAMED_PORT)
        if row.process == "worker":
            # Workers reach each other at every port, for gloo and NCCL choose theirs.
            assert found - {"worker"} == row.clients - {"worker"}, row
            assert "worker" in found
        else:
            # What is open to anyone, pods of the namespace may not leave for.
            assert found == row.clients, row


@pytest.mark.parametrize("name", ["base", "overlays/demo"])
def test_without_components_nobody_reads_metrics(name: str) -> None:
    manifests = rendered(name)
    for workload in manifests.services():
        found = clients(manifests, workload, workload.ports()["metrics"])
        assert found == ({"worker"} if process(workload) == "worker" else set())


def test_the_table_says_of_every_listener_how_it_is_guarded() -> None:
    for row in table():
        assert row.without_mtls.startswith("plain"), row
        assert row.is_encrypted or row.with_mtls == row.without_mtls, row
