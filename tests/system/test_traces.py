"""Traces of real processes, at a real receiver: from the client's call to every stage of every
iteration, and back."""

import itertools
import json
import random
import signal
import threading
import uuid
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from orcinus.v1 import inference_pb2, inference_pb2_grpc

from services.common import semconv
from services.scheduler.settings import SchedulerSettings
from tests.limits import HANG_S
from tests.system.conftest import ALL_ITERATIONS_PER_S, tokens, write_model
from tests.system.stack import Stack, serving
from tests.trace_receiver import ReceivedSpan, TraceReceiver, trace_receiver

N_STAGES = 2
MAX_BATCH_TOKENS: int = SchedulerSettings.model_fields["max_batch_tokens"].default
CLIENT_SPAN = "b7ad6b7169203331"
PHASES = (semconv.QUEUE, semconv.PREFILL, semconv.DECODE)


@dataclass
class Traced:
    """A running system and where its spans go."""

    stack: Stack
    receiver: TraceReceiver


@pytest.fixture
def quiet(two_stages: Stack, receiver: TraceReceiver) -> Traced:
    """The traced stack, with nothing received yet."""
    receiver.settle(0.3)
    receiver.clear()
    return Traced(two_stages, receiver)


@dataclass(frozen=True)
class Ask:
    """A client's call, and the trace it belongs to."""

    prompt: tuple[int, ...]
    n_tokens: int
    trace_id: str
    over_grpc: bool = False
    stream: bool = False

    @property
    def n_prefills(self) -> int:
        """Iterations that its prompt takes, if it is alone."""
        return -(-len(self.prompt) // MAX_BATCH_TOKENS)

    @property
    def n_rides(self) -> int:
        """Iterations in all."""
        return self.n_prefills + self.n_tokens - 1

    @property
    def phases(self) -> tuple[str, ...]:
        """The names of the spans in which it is at the scheduler."""
        return PHASES if self.n_tokens > 1 else PHASES[:-1]

    @property
    def n_spans(self) -> int:
        """Spans of its own: those of the call, of the request, and of its phases."""
        return 2 + len(self.phases)

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{CLIENT_SPAN}-01"

    def __call__(self, stack: Stack) -> None:
        if self.over_grpc:
            self._call_grpc(stack)
        else:
            body = {
                "prompt": list(self.prompt),
                "max_tokens": self.n_tokens,
                "ignore_eos": True,
                "stream": self.stream,
            }
            response = stack.post(
                "/v1/completions", body, headers={"traceparent": self.traceparent}
            )
            assert response.status_code == 200, response.text

    def _call_grpc(self, stack: Stack) -> None:
        message: dict[str, Any] = {
            "prompt": inference_pb2.Prompt(
                token_ids=inference_pb2.TokenIds(ids=self.prompt),
            ),
            "options": inference_pb2.GenerationOptions(max_tokens=self.n_tokens, ignore_eos=True),
        }
        metadata = (("traceparent", self.traceparent),)
        with grpc.insecure_channel(stack.grpc) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            if self.stream:
                request = inference_pb2.GenerateStreamRequest(**message)
                list(stub.GenerateStream(request, metadata=metadata, timeout=HANG_S))
            else:
                stub.Generate(
                    inference_pb2.GenerateRequest(**message), metadata=metadata, timeout=HANG_S
                )

    @property
    def server_span(self) -> str:
        if not self.over_grpc:
            return "POST /v1/completions"
        method = "GenerateStream" if self.stream else "Generate"
        return f"orcinus.v1.InferenceService/{method}"


def new_trace() -> str:
    return uuid.uuid4().hex


class Collected:
    """Spans, by what they belong to."""

    def __init__(self, spans: list[ReceivedSpan]) -> None:
        self.spans = spans
        self.by_id = {span.span_id: span for span in spans}
        assert len(self.by_id) == len(spans)
        self.children: dict[str, list[ReceivedSpan]] = defaultdict(list)
        for span in spans:
            self.children[span.parent_id].append(span)
        self.iterations = [span for span in spans if span.name == semconv.ITERATION]

    def of(self, trace_id: str) -> dict[str, ReceivedSpan]:
        """The spans of one request's trace, by name."""
        mine = [span for span in self.spans if span.trace_id == trace_id]
        assert len({span.name for span in mine}) == len(mine), [span.name for span in mine]
        return {span.name: span for span in mine}


def check_tree(collected: Collected) -> None:
    """No orphans; children within their parents; stages begin within their iteration, and run one
    iteration at a time."""
    for span in collected.spans:
        assert not span.is_error, span
        if span.parent_id in ("", CLIENT_SPAN):
            continue
        parent = collected.by_id[span.parent_id]
        assert parent.trace_id == span.trace_id
        assert parent.start_ns <= span.start_ns <= span.end_ns, (parent, span)
        # A stage's clock may be read late, and its call that sends activations may come back when
        # the next stage has computed with them.
        is_stage = semconv.STAGE_INDEX in span.attributes
        assert (span.start_ns if is_stage else span.end_ns) <= parent.end_ns, (parent, span)
    for iteration in collected.iterations:
        stages = sorted(
            span.attributes[semconv.STAGE_INDEX] for span in collected.children[iteration.span_id]
        )
        assert stages == list(range(N_STAGES))
    for stage_index in range(N_STAGES):
        busy = sorted(
            (span.start_ns + int(1e9 * span.attributes[semconv.QUEUE_WAIT]), span.end_ns)
            for span in collected.spans
            if span.attributes.get(semconv.STAGE_INDEX) == stage_index
        )
        for (_, end), (start, _) in itertools.pairwise(busy):
            assert end <= start + 1000, "a rank does one thing at a time"


def check_request(collected: Collected, ask: Ask) -> None:
    """Exactly the spans of one request, and links that lead to its iterations and back."""
    spans = collected.of(ask.trace_id)
    request = next(name for name in spans if name.startswith("text_completion "))
    phases = ask.phases
    assert set(spans) == {ask.server_span, request, *phases}
    assert spans[ask.server_span].parent_id == CLIENT_SPAN
    assert spans[request].parent_id == spans[ask.server_span].span_id
    for phase in phases:
        assert spans[phase].parent_id == spans[request].span_id
    usage = spans[request].attributes
    assert usage[semconv.INPUT_TOKENS] == len(ask.prompt)
    assert usage[semconv.OUTPUT_TOKENS] == ask.n_tokens
    [(event, at_ns)] = spans[semconv.PREFILL].events
    assert (event, at_ns) == (semconv.FIRST_TOKEN, spans[semconv.PREFILL].end_ns)
    n_rides = {semconv.PREFILL: ask.n_prefills, semconv.DECODE: ask.n_tokens - 1}
    n_tokens = {semconv.PREFILL: len(ask.prompt), semconv.DECODE: ask.n_tokens - 1}
    for phase in phases[1:]:
        assert len(spans[phase].links) == n_rides[phase]
        n_linked = 0
        for link in spans[phase].links:
            iteration = collected.by_id[link.span_id]
            assert (iteration.name, iteration.trace_id) == (semconv.ITERATION, link.trace_id)
            [back] = [
                link.attributes
                for link in iteration.links
                if (link.trace_id, link.span_id) == (ask.trace_id, spans[request].span_id)
            ]
            assert back[semconv.REQUEST_ID] == spans[phase].attributes[semconv.REQUEST_ID]
            assert back[semconv.IS_PREFILL] is (phase == semconv.PREFILL)
            n_linked += back[semconv.N_TOKENS]
        assert n_linked == n_tokens[phase]


def run(traced: Traced, asks: list[Ask]) -> Collected:
    """Asks all at once; everything that was recorded of it."""
    with ThreadPoolExecutor(len(asks)) as threads:
        list(threads.map(lambda ask: ask(traced.stack), asks))
    traced.receiver.wait_for(lambda spans: is_complete(spans, asks))
    return Collected(traced.receiver.settle(0.3))


def is_complete(spans: list[ReceivedSpan], asks: list[Ask]) -> bool:
    """Whether each request has its own spans, and the iterations, and their stages, make up all its
    rides."""
    n_of_trace = Counter(span.trace_id for span in spans)
    iterations = [span for span in spans if span.name == semconv.ITERATION]
    n_stages = sum(span.name == semconv.STAGE for span in spans)
    rides = sum(span.attributes[semconv.N_REQUESTS] for span in iterations)
    return (
        rides == sum(ask.n_rides for ask in asks)
        and n_stages == N_STAGES * len(iterations)
        and all(n_of_trace[ask.trace_id] >= ask.n_spans for ask in asks)
    )


@pytest.mark.parametrize(
    ("n_tokens", "over_grpc", "stream"),
    [
        pytest.param(1, False, False, id="1-http-whole"),
        pytest.param(7, True, False, id="7-grpc-whole"),
        pytest.param(7, False, True, id="7-http-stream"),
        pytest.param(1, True, True, id="1-grpc-stream"),
    ],
)
def test_a_request_has_exactly_its_spans(
    quiet: Traced, n_tokens: int, over_grpc: bool, stream: bool
) -> None:
    ask = Ask((5, 6, 7, 8), n_tokens, new_trace(), over_grpc, stream)
    collected = run(quiet, [ask])
    check_tree(collected)
    check_request(collected, ask)
    assert len(collected.iterations) == n_tokens
    names = Counter(span.name for span in collected.spans)
    assert names[semconv.STAGE] == N_STAGES * n_tokens
    assert len(collected.spans) == ask.n_spans + n_tokens * (1 + N_STAGES)
    assert {span.service for span in collected.spans} == {
        "orcinus-frontend",
        "orcinus-scheduler",
        "orcinus-worker",
    }
    numbers = [span.attributes[semconv.ITERATION_NUMBER] for span in collected.iterations]
    assert sorted(numbers) == list(range(min(numbers), min(numbers) + n_tokens))


def test_32_mixed_requests_have_exactly_their_spans(quiet: Traced) -> None:
    choice = random.Random(3)
    asks = [
        Ask(
            tuple(tokens(choice, 60)),
            choice.choice([1, 2, 5, 12, 30]),
            new_trace(),
            over_grpc=bool(index % 2),
            stream=bool(index % 3),
        )
        for index in range(32)
    ]
    collected = run(quiet, asks)
    check_tree(collected)
    for ask in asks:
        check_request(collected, ask)
    n_requests = sum(ask.n_spans for ask in asks)
    n_iterations = len(collected.iterations)
    assert len(collected.spans) == n_requests + n_iterations * (1 + N_STAGES)
    attributes = [span.attributes for span in collected.iterations]
    n_rides = sum(ask.n_tokens for ask in asks)
    n_tokens = sum(len(ask.prompt) + ask.n_tokens - 1 for ask in asks)
    assert sum(item[semconv.N_REQUESTS] for item in attributes) == n_rides
    assert sum(item[semconv.BATCH_N_TOKENS] for item in attributes) == n_tokens
    assert sum(item[semconv.N_PREFILLS] for item in attributes) == 32
    assert sum(len(span.links) for span in collected.iterations) == n_rides
    assert max(item[semconv.IN_FLIGHT] for item in attributes) == N_STAGES
    assert 1 < max(item[semconv.N_REQUESTS] for item in attributes) <= 2


def test_what_a_client_does_not_record_leaves_no_span_anywhere(quiet: Traced) -> None:
    headers = {"traceparent": f"00-{new_trace()}-{CLIENT_SPAN}-00"}
    body = {"prompt": [5, 6, 7], "max_tokens": 20, "ignore_eos": True}
    assert quiet.stack.post("/v1/completions", body, headers=headers).status_code == 200
    assert not [
        span for span in quiet.receiver.settle(0.5) if semconv.IS_SLOW not in span.attributes
    ]


def write_large_model(directory: Path) -> Path:
    """A model whose iterations take long beside what control costs; its weights are made up."""
    write_model(directory, num_hidden_layers=8)
    (directory / "model.safetensors").unlink()
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config |= {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}
    config |= {"num_key_value_heads": 16, "head_dim": 64}
    path.write_text(json.dumps(config))
    return directory


@pytest.mark.thorough
def test_compute_and_waits_make_up_the_iteration(tmp_path: Path) -> None:
    """The last stage waits for the others: what it says of its waits and of its computing is the
    whole iteration, but for the plan's way to it and the result's way back. These take a
    millisecond or two on loopback, and ten where ranks and tests fight for the processors; so the
    model and its prompt are large enough for that to be less than a twentieth."""
    with (
        trace_receiver() as receiver,
        serving(
            write_large_model(tmp_path),
            stages=N_STAGES,
            load_format="random",
            traced_iterations_per_s=ALL_ITERATIONS_PER_S,
            kv_memory="64MiB",
            environment=receiver.environment,
        ) as stack,
    ):
        traced = Traced(stack, receiver)
        run(traced, [Ask((5,) * 20, 3, new_trace())])
        receiver.clear()
        ask = Ask((6,) * 800, 4, new_trace())  # of which nothing is cached
        collected = run(traced, [ask])
    check_tree(collected)
    check_request(collected, ask)
    whole, first, last = Spent(), Spent(), Spent()
    for iteration in collected.iterations:
        whole.add(iteration)
        stages = collected.children[iteration.span_id]
        for stage in stages:
            spent = sum(stage.attributes[part] for part in Spent.PARTS)
            assert spent == pytest.approx(stage.seconds, abs=1e-5)
        for total, stage in zip(
            (first, last),
            sorted(stages, key=lambda span: span.attributes[semconv.STAGE_INDEX]),
            strict=True,
        ):
            total.add(stage)
    assert 0.95 * whole.seconds <= last.seconds <= whole.seconds
    assert first.of(semconv.RECEIVE_WAIT) < 0.01 * first.seconds, "nobody is before it"
    waits = last.of(semconv.QUEUE_WAIT) + last.of(semconv.RECEIVE_WAIT)
    assert waits > 0.8 * first.of(semconv.COMPUTE), "it waits while the first one computes"


class Spent:
    """The time that spans took in all, and on what."""

    PARTS = (semconv.QUEUE_WAIT, semconv.RECEIVE_WAIT, semconv.COMPUTE, semconv.SEND_WAIT)

    def __init__(self) -> None:
        self.seconds = 0.0
        self._parts: Counter[str] = Counter()

    def add(self, span: ReceivedSpan) -> None:
        self.seconds += span.seconds
        self._parts.update({part: span.attributes.get(part, 0.0) for part in self.PARTS})

    def of(self, part: str) -> float:
        return self._parts[part]


@pytest.mark.thorough
def test_a_request_whose_pipeline_is_lost_shows_both_epochs_in_its_trace(model: Path) -> None:
    n_tokens = 1500
    with (
        trace_receiver() as receiver,
        serving(
            model,
            stages=2,
            traced_iterations_per_s=ALL_ITERATIONS_PER_S,
            environment=receiver.environment,
            fail_fast=False,
        ) as stack,
    ):
        trace_id = new_trace()
        body = {"prompt": [5, 6], "max_tokens": n_tokens, "ignore_eos": True, "stream": True}
        headers = {"traceparent": f"00-{trace_id}-{CLIENT_SPAN}-01"}
        with httpx.stream(
            "POST", f"{stack.http}/v1/completions", json=body, headers=headers, timeout=HANG_S
        ) as response:
            lines = response.iter_lines()
            next(lines)
            stack.kill("services.worker.rank", 1)
            assert "data: [DONE]" in list(lines)
        spans = receiver.settle(0.5)
    mine = [span for span in spans if span.trace_id == trace_id]
    phases = (semconv.PREFILL, semconv.DECODE, semconv.SUSPENDED)
    named = {name: [span for span in mine if span.name == name] for name in phases}
    [suspended] = named[semconv.SUSPENDED]
    assert suspended.attributes[semconv.REQUEST_LOSSES] == 1
    for spans_of_phase in (named[semconv.PREFILL], named[semconv.DECODE]):
        assert sorted(span.attributes[semconv.EPOCH] for span in spans_of_phase) == [1, 2]
    decoded = [span.attributes[semconv.N_TOKENS] for span in named[semconv.DECODE]]
    assert sum(decoded) == n_tokens - 2, "the first token of each epoch is the prefill's"
    recomputed = max(span.attributes[semconv.N_TOKENS] for span in named[semconv.PREFILL])
    assert recomputed == 2 + 1 + min(decoded, key=lambda n: abs(n + 3 - recomputed))
    assert not any(span.is_error for span in mine)
    lost = [span for span in spans if span.name == semconv.ITERATION and span.is_error]
    assert lost, "the iteration that was under way"
    assert all(span.attributes[semconv.ERROR_TYPE] == "PipelineLost" for span in lost)


class HangingReceiver(TraceReceiver):
    """Takes what it is sent and never answers."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def Export(self, request: Any, context: Any) -> Any:
        self.release.wait(60)
        return super().Export(request, context)


@pytest.mark.thorough
def test_a_collector_that_hangs_is_not_waited_for(model: Path) -> None:
    hanging = HangingReceiver()
    with trace_receiver(hanging) as receiver:
        sizes = {"OTEL_BSP_MAX_QUEUE_SIZE": "64", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "64"}
        environment = receiver.environment | sizes
        with serving(
            model, stages=2, traced_iterations_per_s=ALL_ITERATIONS_PER_S, environment=environment
        ) as stack:
            for _ in range(3):  # each makes more spans than a queue and a batch hold
                stack.complete([5, 6, 7], max_tokens=150, ignore_eos=True)
            stack.send_signal(signal.SIGTERM)
            assert stack.wait() == 0
            assert not stack.survivors()
        hanging.release.set()
