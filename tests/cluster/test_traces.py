"""Spans of pods: by the component `tracing`, from the services to whoever is behind the collector's
Service, with the names of the pods in them.

The processes are the ones that `tests/system/test_traces.py` holds to their spans. Here it is their
deployment: environment, Services, and that one trace runs through pods on different nodes. Clocks
of nodes are compared, so these have to be right, or the nodes of one machine.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from services.common import semconv
from tests.cluster.cluster import FRONTEND, NAMESPACE, OVERLAYS, Cluster, Pod
from tests.cluster.conftest import Figures, deployment
from tests.system.test_traces import N_STAGES, Ask, Collected, check_request, check_tree, new_trace
from tests.trace_receiver import ReceivedSpan, TraceReceiver

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

ARRIVAL_TIMEOUT_S = 60
COMPONENTS = ("frontend", "scheduler", "worker")


@pytest.fixture(scope="module")
def deployed(cluster: Cluster, figures: Figures) -> Iterator[Cluster]:
    """The demo with traces, serving."""
    yield from deployment(cluster, OVERLAYS / "traced", figures)


@pytest.fixture(scope="module")
def traced(deployed: Cluster) -> Cluster:
    """The same, when spans have come from every pod that requests go through."""
    expected = speakers(deployed)
    deployed.until(
        lambda: are_heard(deployed, expected),
        timeout_s=ARRIVAL_TIMEOUT_S,
        what="spans of every pod",
    )
    return deployed


def speakers(cluster: Cluster) -> list[Pod]:
    """The pods that have spans: all but the standby."""
    leader = cluster.leader()
    return [
        pod
        for component in COMPONENTS
        for pod in cluster.pods(component)
        if component != "scheduler" or pod.name == leader
    ]


def are_heard(cluster: Cluster, pods: list[Pod]) -> bool:
    """Whether each has sent spans by now; if not, another request may bring it to speak."""
    if {span.resource["k8s.pod.uid"] for span in received(cluster)} >= {pod.uid for pod in pods}:
        return True
    cluster.complete("Hello", max_tokens=1)
    return False


def received(cluster: Cluster) -> list[ReceivedSpan]:
    """All spans so far."""
    receiver = TraceReceiver()
    *lines, _ = cluster.in_namespace("logs", "deployment/otel-collector").split("\n")
    for line in lines:  # without one that is still being written
        message = trace_service_pb2.ExportTraceServiceRequest()
        receiver.Export(json_format.Parse(line, message), None)
    return receiver.spans


def followed(spans: list[ReceivedSpan], trace_id: str) -> list[ReceivedSpan]:
    """The spans of a request's trace, and of the iterations that they have links to."""
    mine = [span for span in spans if span.trace_id == trace_id]
    iterations = {link.trace_id for span in mine for link in span.links}
    return mine + [span for span in spans if span.trace_id in iterations]


def test_a_request_is_followed_through_pods_on_different_nodes(traced: Cluster) -> None:
    ask = Ask((5, 6, 7, 8), n_tokens=7, trace_id=new_trace())
    n_expected = 5 + ask.n_tokens * (1 + N_STAGES)
    body: dict[str, Any] = {
        "prompt": list(ask.prompt),
        "max_tokens": ask.n_tokens,
        "ignore_eos": True,
    }
    headers = {"traceparent": ask.traceparent}
    answer = traced.ask("complete", host=FRONTEND, port=8000, body=body, headers=headers)
    assert answer["status"] == 200, answer
    traced.until(
        lambda: len(followed(received(traced), ask.trace_id)) >= n_expected,
        timeout_s=ARRIVAL_TIMEOUT_S,
        what="the spans of a request",
    )
    spans = followed(received(traced), ask.trace_id)
    assert len(spans) == n_expected
    collected = Collected(spans)
    check_tree(collected)
    check_request(collected, ask)
    workers = traced.pods("worker")
    n_nodes = len(traced.kubectl("get", "nodes", "-o", "name").split())
    assert len({worker.node for worker in workers}) == min(N_STAGES, n_nodes)
    stages = {
        (span.attributes[semconv.STAGE_INDEX], span.resource["k8s.pod.uid"])
        for iteration in collected.iterations
        for span in collected.children[iteration.span_id]
    }
    assert stages == {(index, worker.uid) for index, worker in enumerate(workers)}


def test_spans_say_whose_they_are(traced: Cluster) -> None:
    pods = {(component, pod.uid): pod for component in COMPONENTS for pod in traced.pods(component)}
    spans = received(traced)
    for span in spans:
        told = span.resource
        component = told["k8s.container.name"]
        pod = pods[component, told["k8s.pod.uid"]]
        expected = {
            "service.name": f"orcinus-{component}",
            "service.namespace": NAMESPACE,
            "service.instance.id": pod.uid,
            "k8s.pod.name": pod.name,
            "k8s.namespace.name": NAMESPACE,
            "k8s.node.name": pod.node,
        }
        assert {name: told.get(name) for name in expected} == expected
    assert {span.service for span in spans} == {f"orcinus-{name}" for name in COMPONENTS}
