"""The port on which Prometheus asks."""

import socket
import threading

import httpx
import pytest
from opentelemetry import context, trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from prometheus_client import Counter, Histogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from services.common.address import parse
from services.common.health import LIVENESS, READINESS, Health
from services.common.metrics import HEALTH_PATH, exemplar, listening, new_registry

OPEN_METRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}

LIMIT_S = 30.0


def test_without_an_address_nobody_listens() -> None:
    with listening(None, new_registry()) as address:
        assert address is None


def test_a_free_port_is_taken_and_given_back() -> None:
    registry = new_registry()
    Counter("things_total", "Things.", registry=registry).inc(3)
    with listening("127.0.0.1:0", registry) as address:
        response = httpx.get(f"http://{address}/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        assert "things_total 3.0\n" in response.text
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://{address}/metrics")


def test_the_end_does_not_wait_until_a_thread_looks_for_it() -> None:
    def listen_once() -> None:
        with listening("localhost:0", new_registry(), poll_s=10 * LIMIT_S):
            pass

    ending = threading.Thread(target=listen_once, daemon=True)
    ending.start()
    ending.join(LIMIT_S)
    assert not ending.is_alive()


def test_a_client_that_says_nothing_is_cut_off() -> None:
    with listening("127.0.0.1:0", new_registry(), silence_limit_s=0.05) as address:
        assert address is not None
        with socket.create_connection(parse(address), LIMIT_S) as client:
            assert client.recv(1) == b""


@pytest.mark.parametrize("address", ["[::]:0", "0.0.0.0:0", "localhost:0"])
def test_both_families_of_addresses_are_answered(address: str) -> None:
    with listening(address, new_registry()) as bound:
        assert bound is not None
        for host in ("127.0.0.1", "[::1]"):
            url = f"http://{host}:{parse(bound).port}/metrics"
            assert httpx.get(url, trust_env=False).status_code == 200


def test_an_address_that_is_taken_is_named() -> None:
    with (
        listening("127.0.0.1:0", new_registry()) as address,
        pytest.raises(OSError, match=f"cannot listen on {address}"),
        listening(address, new_registry()),
    ):
        pass


def test_registries_know_nothing_of_one_another() -> None:
    first, second = new_registry(), new_registry()
    Counter("things_total", "Things.", registry=first)
    Counter("things_total", "Other things.", registry=second)


@pytest.mark.parametrize("is_sampled", [True, False], ids=["recorded", "not recorded"])
def test_an_observation_points_to_the_trace_that_is_recorded(is_sampled: bool) -> None:
    flags = TraceFlags(TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT)
    span = NonRecordingSpan(SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=flags))
    registry = new_registry()
    token = context.attach(trace.set_span_in_context(span))
    try:
        Histogram("wait_seconds", "Waits.", registry=registry).observe(0.1, exemplar())
    finally:
        context.detach(token)
    with listening("127.0.0.1:0", registry) as address:
        text = httpx.get(f"http://{address}/metrics", headers=OPEN_METRICS).text
    (family,) = (f for f in text_string_to_metric_families(text) if f.name == "wait_seconds")
    found = [sample.exemplar.labels for sample in family.samples if sample.exemplar]
    assert found == ([{"trace_id": f"{0xABC:032x}", "span_id": f"{0xDEF:016x}"}] * is_sampled)


def test_nothing_is_pointed_to_where_there_is_no_trace() -> None:
    assert exemplar() is None


async def test_health_is_told_by_its_names_beside_the_metrics() -> None:
    health = Health("orcinus.v1.TestService")
    await health.start()

    def statuses(address: str | None) -> list[int]:
        names = (LIVENESS, READINESS, "nonsense")
        return [httpx.get(f"http://{address}{HEALTH_PATH}{name}").status_code for name in names]

    with listening("127.0.0.1:0", new_registry(), is_healthy=health.is_healthy) as address:
        assert statuses(address) == [200, 503, 404]
        await health.set_ready(True)
        assert statuses(address) == [200, 200, 404]
