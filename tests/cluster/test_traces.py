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
from tests.cluster.cluster import FRONTEND, HANG_S, NAMESPACE, OVERLAYS, Cluster, NotYet, Pod
from tests.cluster.conftest import deployment, spread
from tests.cluster.figures import Figures
from tests.system.test_traces import N_STAGES, Ask, Collected, check_request, check_tree, new_trace
from tests.trace_receiver import ReceivedSpan, TraceReceiver

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(HANG_S)]

ARRIVAL_TIMEOUT_S = 60
"""After which a request's spans are not waited for any more, and another request is made."""
COMPONENTS = ("frontend", "scheduler", "worker")


@pytest.fixture(scope="module")
def deployed(cluster: Cluster, figures: Figures) -> Iterator[Cluster]:
    """The demo with traces, serving."""
    yield from deployment(cluster, OVERLAYS / "traced", figures)


@pytest.fixture(scope="module")
def traced(deployed: Cluster) -> Cluster:
    """The demo with traces on different nodes, after spans have come from every pod that requests
    go through."""
    assert spread(deployed)
    deployed.until(lambda: are_heard(deployed), what="spans of every pod")
    return deployed


def speakers(cluster: Cluster) -> list[Pod]:
    """The pods that have spans: all but the standby."""
    return [cluster.leading_pod(), *cluster.pods("frontend"), *cluster.pods("worker")]


def are_heard(cluster: Cluster) -> bool:
    """Whether each has sent spans by now; if not, another request may bring it to speak."""
    heard = {span.resource["k8s.pod.uid"] for span in received(cluster)}
    if heard >= {pod.uid for pod in speakers(cluster)}:
        return True
    cluster.complete("Hello", max_tokens=1)
    return False


def received(cluster: Cluster) -> list[ReceivedSpan]:
    """All spans so far, each once: what was not acknowledged in time is sent again."""
    receiver = TraceReceiver()
    log = cluster.insist(lambda: cluster.in_namespace("logs", "deployment/otel-collector"))
    *lines, _ = log.split("\n")
    for line in lines:  # without one that is still being written
        if line.startswith("{"):  # and without what gRPC says itself
            message = trace_service_pb2.ExportTraceServiceRequest()
            receiver.Export(json_format.Parse(line, message), None)
    return list({(span.trace_id, span.span_id): span for span in receiver.spans}.values())


def followed(spans: list[ReceivedSpan], trace_id: str) -> list[ReceivedSpan]:
    """The spans of a request's trace, and of the iterations that they have links to."""
    mine = [span for span in spans if span.trace_id == trace_id]
    iterations = {link.trace_id for span in mine for link in span.links}
    return mine + [span for span in spans if span.trace_id in iterations]


def ask_and_follow(cluster: Cluster) -> tuple[Ask, list[ReceivedSpan]]:
    """A request and all its spans.

    Raises:
        NotYet: it was not answered, or its spans have not come: senders do not wait for a collector
            that is busy.
    """
    ask = Ask((5, 6, 7, 8), n_tokens=7, trace_id=new_trace())
    body: dict[str, Any] = {
        "prompt": list(ask.prompt),
        "max_tokens": ask.n_tokens,
        "ignore_eos": True,
    }
    headers = {"traceparent": ask.traceparent}
    answer = cluster.ask_once("complete", host=FRONTEND, port=8000, body=body, headers=headers)
    if answer["status"] != 200:
        raise NotYet(f"the answer was {answer}")
    n_expected = 5 + ask.n_tokens * (1 + N_STAGES)
    cluster.until(
        lambda: len(followed(received(cluster), ask.trace_id)) >= n_expected,
        timeout_s=ARRIVAL_TIMEOUT_S,
        what="the spans of a request",
    )
    spans = followed(received(cluster), ask.trace_id)
    assert len(spans) == n_expected
    return ask, spans


def test_a_request_is_followed_through_pods_on_different_nodes(traced: Cluster) -> None:
    ask, spans = traced.insist(lambda: ask_and_follow(traced))
    collected = Collected(spans)
    check_tree(collected)
    check_request(collected, ask)
    stages = {
        (span.attributes[semconv.STAGE_INDEX], span.resource["k8s.pod.uid"])
        for iteration in collected.iterations
        for span in collected.children[iteration.span_id]
    }
    assert sorted(index for index, _ in stages) == [0, 1]
    assert {uid for _, uid in stages} == {worker.uid for worker in traced.pods("worker")}


def test_spans_say_whose_they_are(traced: Cluster) -> None:
    owners = {
        pod.uid: (component, pod) for component in COMPONENTS for pod in traced.pods(component)
    }
    spans = [span for span in received(traced) if span.resource["k8s.pod.uid"] in owners]
    for span in spans:
        told = span.resource
        component, pod = owners[told["k8s.pod.uid"]]
        expected = {
            "service.name": f"orcinus-{component}",
            "service.namespace": NAMESPACE,
            "service.instance.id": pod.uid,
            "k8s.container.name": component,
            "k8s.pod.name": pod.name,
            "k8s.namespace.name": NAMESPACE,
            "k8s.node.name": pod.node,
        }
        assert {name: told.get(name) for name in expected} == expected
    assert {span.service for span in spans} == {f"orcinus-{name}" for name in COMPONENTS}
