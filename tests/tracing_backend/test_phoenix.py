"""A real tracing backend, Arize Phoenix, stores the spans of whole requests, and finds them again.

It keeps neither links nor resources of spans; the receiver of `tests/system/test_traces.py` does.
"""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.common import semconv
from tests.addresses import free_address
from tests.system.conftest import ALL_ITERATIONS_PER_S
from tests.system.stack import Stack, serving
from tests.system.test_traces import (
    CLIENT_SPAN,
    N_STAGES,
    PHASES,
    Ask,
    Collected,
    check_tree,
    new_trace,
)
from tests.trace_receiver import ReceivedSpan

pytestmark = pytest.mark.phoenix

MODEL = Path(__file__).parents[2] / "models" / "demo"
START_TIMEOUT_S = 180
STOP_TIMEOUT_S = 20
ARRIVAL_TIMEOUT_S = 20
PAGE = 1000
PHOENIX_TOTAL = "llm.token_count.total"
"""An attribute of Phoenix's own, which it makes of those that the conventions for generative AI
name."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Phoenix:
    """A running Phoenix."""

    address: str
    """Address at which Phoenix takes spans, over OTLP and gRPC."""
    api: httpx.Client

    def spans(self, **filters: str) -> list[ReceivedSpan]:
        """Returns the spans that a query finds."""
        response = self.api.get("/v1/projects/default/spans", params={"limit": PAGE, **filters})
        if response.status_code == 404:  # no span has come yet
            return []
        page = response.raise_for_status().json()
        assert page["next_cursor"] is None
        return [_span(row) for row in page["data"]]

    def wait_for(self, n_spans: int) -> list[ReceivedSpan]:
        """All spans, when there are so many."""
        deadline = time.monotonic() + ARRIVAL_TIMEOUT_S
        while len(spans := self.spans()) < n_spans:
            assert time.monotonic() < deadline, [span.name for span in spans]
            time.sleep(0.2)
        return spans


@pytest.fixture(scope="module")
def phoenix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Phoenix]:
    """A Phoenix on loopback, that forgets everything afterwards."""
    directory = tmp_path_factory.mktemp("phoenix")
    api, address = free_address(), free_address()
    environment = {
        "PHOENIX_WORKING_DIR": str(directory),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": api.rpartition(":")[2],
        "PHOENIX_GRPC_PORT": address.rpartition(":")[2],
        "PHOENIX_TELEMETRY_ENABLED": "false",
        "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
        "PHOENIX_DISABLE_AGENT_ASSISTANT": "true",  # it has a shell
        "PHOENIX_ENABLE_MCP_SERVER": "false",
    }
    with (directory / "output").open("w") as output:
        process = subprocess.Popen(
            ["phoenix", "serve"],
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        with httpx.Client(base_url=f"http://{api}", timeout=10) as client:
            wait_until_up(client, process, directory / "output")
            yield Phoenix(address, client)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        process.kill()
        process.wait()


def wait_until_up(client: httpx.Client, process: subprocess.Popen[bytes], output: Path) -> None:
    """Waits until it answers; fails with what it has printed."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if client.get("/healthz").status_code == 200:
                return
        time.sleep(0.2)
    raise AssertionError(f"Phoenix is not up:\n{output.read_text()}")


@pytest.fixture(scope="module")
def stack(phoenix: Phoenix) -> Iterator[Stack]:
    """Two stages whose spans go there."""
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{phoenix.address}",
        "OTEL_BSP_SCHEDULE_DELAY": "50",
    }
    with serving(
        MODEL,
        stages=N_STAGES,
        traced_iterations_per_s=ALL_ITERATIONS_PER_S,
        environment=environment,
    ) as running:
        yield running


def test_a_backend_stores_what_requests_did_and_finds_it(phoenix: Phoenix, stack: Stack) -> None:
    asks = [
        Ask((5, 6, 7, 8), 7, new_trace()),
        Ask((9, 8, 7), 5, new_trace(), over_grpc=True, stream=True),
        Ask((11, 12, 13, 14, 15), 1, new_trace(), stream=True),
    ]
    for ask in asks:
        ask(stack)
    n_iterations = sum(ask.n_tokens for ask in asks)
    n_expected = sum(map(n_request_spans, asks)) + n_iterations * (1 + N_STAGES)
    collected = Collected(phoenix.wait_for(n_expected))
    assert len(collected.spans) == n_expected
    check_tree(collected)
    for ask in asks:
        check_request(phoenix, ask)
    check_iterations(collected, asks)
    prefills = phoenix.spans(name=semconv.ITERATION, attribute=f"{semconv.N_PREFILLS}:1")
    assert len(prefills) == len(asks)


def n_request_spans(ask: Ask) -> int:
    """The call, the request and its phases; one token is the prefill's."""
    return 5 if ask.n_tokens > 1 else 4


def check_request(phoenix: Phoenix, ask: Ask) -> None:
    """A query for the client's trace finds all of the request, and for the answer's id, it."""
    spans = Collected(phoenix.spans(trace_id=ask.trace_id)).of(ask.trace_id)
    assert len(spans) == n_request_spans(ask)
    server = spans[ask.server_span]
    assert server.parent_id == CLIENT_SPAN
    [request] = [span for span in spans.values() if span.parent_id == server.span_id]
    assert request.name.startswith("text_completion ")
    assert request.attributes[semconv.INPUT_TOKENS] == len(ask.prompt)
    assert request.attributes[semconv.OUTPUT_TOKENS] == ask.n_tokens
    assert request.attributes[semconv.FINISH_REASONS] == ["length"]
    assert request.attributes[PHOENIX_TOTAL] == len(ask.prompt) + ask.n_tokens
    answer = request.attributes[semconv.RESPONSE_ID]
    assert phoenix.spans(attribute=f"{semconv.RESPONSE_ID}:{answer}") == [request]
    phases = {span.name: span for span in spans.values() if span.parent_id == request.span_id}
    assert set(phases) == set(PHASES if ask.n_tokens > 1 else PHASES[:-1])
    assert len({span.attributes[semconv.REQUEST_ID] for span in phases.values()}) == 1
    prefill = phases[semconv.PREFILL]
    assert prefill.events == [(semconv.FIRST_TOKEN, prefill.end_ns)]


def check_iterations(collected: Collected, asks: list[Ask]) -> None:
    """One for each token, in the order of their numbers, each with what every stage did."""
    iterations = sorted(collected.iterations, key=lambda span: span.start_ns)
    told = [span.attributes for span in iterations]
    first = told[0][semconv.ITERATION_NUMBER]
    assert [item[semconv.ITERATION_NUMBER] for item in told] == [
        first + index for index in range(len(told))
    ]
    assert [item[semconv.BATCH_N_TOKENS] for item in told] == [
        n_tokens for ask in asks for n_tokens in [len(ask.prompt)] + [1] * (ask.n_tokens - 1)
    ]
    for span in iterations:
        assert span.parent_id == ""
        for stage in collected.children[span.span_id]:
            assert stage.attributes[semconv.COMPUTE] > 0


def _span(row: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        service="",
        resource={},
        name=row["name"],
        kind=0,
        trace_id=row["context"]["trace_id"],
        span_id=row["context"]["span_id"],
        parent_id=row["parent_id"] or "",
        start_ns=_nanoseconds(row["start_time"]),
        end_ns=_nanoseconds(row["end_time"]),
        attributes=row["attributes"],
        events=[(event["name"], _nanoseconds(event["timestamp"])) for event in row["events"]],
        links=[],
        is_error=row["status_code"] == "ERROR",
    )


def _nanoseconds(time: str) -> int:
    return (datetime.fromisoformat(time) - EPOCH) // timedelta(microseconds=1) * 1000
