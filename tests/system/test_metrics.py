"""The metrics of services against what their clients saw, to the last token."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from orcinus.v1 import inference_pb2, inference_pb2_grpc

from tests.exposition import Samples
from tests.generation_options import generation_options
from tests.limits import HANG_S
from tests.system.stack import Stack, serving

pytestmark = [pytest.mark.system, pytest.mark.thorough]

MODEL = Path(__file__).parents[2] / "models" / "demo"
POOL = 12
LONG = 900
"""Tokens of an answer that outlasts what is done meanwhile."""

LIMIT_S = 60.0

NO_LIMITS = httpx.Limits(max_connections=None)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with serving(MODEL, stages=2, max_requests=POOL, metrics=True, kv_memory="64MiB") as it:
        yield it


class Clients:
    """Sends requests and notes what comes of them."""

    def __init__(self, stack: Stack, http: httpx.AsyncClient) -> None:
        self._stack = stack
        self._http = http
        self.statuses: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.n_cancelled = 0
        self.n_prompt_tokens = 0
        self.n_generated = 0

    async def complete(self, **body: Any) -> None:
        """Makes a call that its client waits for."""
        response = await self._http.post("/v1/completions", json=body)
        self.statuses[str(response.status_code)] += 1
        if response.status_code == 200:
            answer = response.json()
            self._take(answer["choices"], answer["usage"])

    async def stream(self, **body: Any) -> None:
        """Makes a call whose answer is a stream."""
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            self.statuses[str(response.status_code)] += 1
            async for chunk in _chunks(response):
                self._take(chunk["choices"], chunk["usage"])

    async def hang_up(self, when: asyncio.Event | None = None) -> None:
        """A client that goes away after its first token, and not before `when` is set."""
        body = {"prompt": "Once", "max_tokens": LONG, "stream": True, "min_tokens": LONG}
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            self.statuses["200"] += 1
            chunks = _chunks(response)  # whose end would be the stream's
            await anext(chunks)
            if when is not None:
                await when.wait()
        self.n_cancelled += 1

    async def generate(self, *, max_tokens: int) -> None:
        """A call over gRPC."""
        async with grpc.aio.insecure_channel(self._stack.grpc) as channel:
            response = await inference_pb2_grpc.InferenceServiceStub(channel).Generate(
                inference_pb2.GenerateRequest(
                    prompt=inference_pb2.Prompt(text="If the file"),
                    options=generation_options(max_tokens=max_tokens, min_tokens=max_tokens),
                )
            )
        self.statuses["OK"] += 1
        self.reasons["length"] += 1
        self.n_prompt_tokens += response.usage.prompt_tokens
        self.n_generated += response.usage.completion_tokens

    def _take(self, choices: list[dict[str, Any]], usage: dict[str, int] | None) -> None:
        reasons = (choice["finish_reason"] for choice in choices)
        self.reasons.update(reason for reason in reasons if reason is not None)
        if usage is not None:
            self.n_prompt_tokens += usage["prompt_tokens"]
            self.n_generated += usage["completion_tokens"]


async def _chunks(response: httpx.Response) -> Any:
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


async def at_rest(stack: Stack) -> Samples:
    """Returns the scheduler's metrics once nothing runs and all timings have come."""
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        samples = stack.metrics("scheduler")
        n_iterations = samples.sum("orcinus_iteration_seconds_count")
        if (
            samples.sum("orcinus_requests_waiting") + samples.sum("orcinus_requests_running") == 0
            and samples.sum("orcinus_iteration_overhead_seconds_count") == n_iterations
        ):
            return samples
        await asyncio.sleep(0.05)
    raise AssertionError("never at rest")


async def until_full(stack: Stack) -> None:
    """Waits until there is room for no other request."""
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        samples = await asyncio.to_thread(stack.metrics, "scheduler")  # as clients go on
        running = samples.sum("orcinus_requests_running")
        if samples.sum("orcinus_requests_waiting") + running == POOL:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("never full")


async def load(stack: Stack) -> Clients:
    """Makes 100 calls, which ask for 105 answers: fewer at a time than there is room for, and at
    last as many as there is room for with 18 more, for which there is none."""
    text = "The model is sharded across"
    some: dict[str, Any] = {"prompt": text, "temperature": 0.8}
    room = asyncio.Semaphore(POOL // 3)
    async with httpx.AsyncClient(base_url=stack.http, timeout=HANG_S, limits=NO_LIMITS) as http:
        clients = Clients(stack, http)

        async def one(call: Any) -> None:
            async with room:
                await call

        await asyncio.gather(
            *(
                one(clients.complete(**some, seed=n, max_tokens=n + 1, min_tokens=n + 1))
                for n in range(20)
            ),
            *(one(clients.stream(**some, seed=n, max_tokens=20 + n)) for n in range(10)),
            *(one(clients.complete(**some, seed=n, n=2, max_tokens=8)) for n in range(5)),
            *(one(clients.generate(max_tokens=3)) for _ in range(5)),
            *(
                one(clients.complete(prompt=text, max_tokens=9, stop_token_ids=[n], top_k=1))
                for n in range(5)
            ),
            *(one(clients.hang_up()) for _ in range(10)),
            *(one(clients.complete(prompt=text, max_tokens=-1 - n)) for n in range(10)),
            *(one(clients.complete(prompt=text, max_tokens=2, model="other")) for _ in range(5)),
        )
        await at_rest(stack)
        all_are_refused = asyncio.Event()
        busy = asyncio.gather(*(clients.hang_up(all_are_refused) for _ in range(POOL)))
        await until_full(stack)
        await asyncio.gather(*(clients.complete(**some, max_tokens=5) for _ in range(30 - POOL)))
        all_are_refused.set()
        await busy
    return clients


async def test_after_a_hundred_requests_everything_adds_up(stack: Stack) -> None:
    before = stack.metrics("scheduler")
    assert before.sum("orcinus_requests_accepted_total") == 0
    clients = await load(stack)
    assert sum(clients.statuses.values()) == 100
    n_full, n_wrong = clients.statuses["429"], clients.statuses["400"] + clients.statuses["404"]
    assert (n_full, n_wrong) == (30 - POOL, 15)
    n_answers = sum(clients.reasons.values())

    scheduler = await at_rest(stack)
    assert scheduler.sum("orcinus_requests_accepted_total") == n_answers + clients.n_cancelled
    for reason in ("stop", "length"):
        n_finished = scheduler.sum("orcinus_requests_finished_total", reason=reason)
        assert n_finished == clients.reasons[reason]
    assert scheduler.sum("orcinus_requests_cancelled_total") == clients.n_cancelled == 10 + POOL
    assert scheduler.sum("orcinus_requests_failed_total") == 0
    assert scheduler.sum("orcinus_requests_rejected_total") <= n_full  # frontends refuse first
    assert scheduler.sum("orcinus_kv_cache_usage_ratio") == 0

    frontend = stack.metrics("frontend")
    assert frontend.sum("orcinus_frontend_refusals_total", reason="in_flight") == n_full
    check_frontend(frontend, clients)
    check_tokens(scheduler, frontend, clients)
    check_iterations(scheduler, [stack.metrics(f"stage {index}") for index in range(2)])


def check_frontend(samples: Samples, clients: Clients) -> None:
    """Calls as the frontend saw them."""
    for status in ("200", "400", "404", "429"):
        n_requests = samples.sum("orcinus_frontend_http_requests_total", status=status)
        assert n_requests == clients.statuses[status], status
    n_calls = samples.sum("orcinus_frontend_grpc_calls_total", method="Generate", code="OK")
    assert n_calls == clients.statuses["OK"]
    for reason in ("stop", "length"):
        n_finished = samples.sum("orcinus_frontend_answers_finished_total", reason=reason)
        assert n_finished == clients.reasons[reason]
    duration = "gen_ai_server_request_duration_seconds_count"
    n_complete = clients.statuses["200"] + clients.statuses["OK"] - clients.n_cancelled
    assert samples.sum(duration, error_type="") == n_complete
    assert samples.sum(duration, error_type="PoolFull") <= clients.statuses["429"]
    assert samples.sum(duration, error_type="RequestCancelled") == clients.n_cancelled
    n_with_tokens = samples.sum("gen_ai_server_time_to_first_token_seconds_count")
    assert n_with_tokens == n_complete + clients.n_cancelled
    assert samples.sum("orcinus_frontend_answers_in_flight") == 0
    assert samples.sum("orcinus_frontend_answers_held") == 0


def check_tokens(scheduler: Samples, frontend: Samples, clients: Clients) -> None:
    """Both services against the usages that clients were told."""
    assert frontend.sum("orcinus_usage_tokens_total", gen_ai_token_type="input") == (
        clients.n_prompt_tokens
    )
    assert frontend.sum("orcinus_usage_tokens_total", gen_ai_token_type="output") == (
        clients.n_generated
    )
    generated = "orcinus_request_generation_tokens_sum"
    by_reason = {reason: scheduler.sum(generated, reason=reason) for reason in ("stop", "length")}
    assert sum(by_reason.values()) == clients.n_generated
    assert scheduler.sum(generated) == scheduler.sum("orcinus_generation_tokens_total")
    assert scheduler.sum(generated, reason="cancelled") >= clients.n_cancelled
    assert scheduler.sum("orcinus_request_prompt_tokens_sum") == scheduler.sum(
        "orcinus_prompt_tokens_total"
    )


def check_iterations(scheduler: Samples, stages: list[Samples]) -> None:
    """All services have seen the same iterations."""
    n_iterations = scheduler.sum("orcinus_iteration_seconds_count")
    for index, stage in enumerate(stages):
        n_timed = scheduler.sum("orcinus_stage_compute_seconds_count", stage=str(index))
        assert n_timed == n_iterations
        assert stage.sum("orcinus_worker_plans_total") == n_iterations
        assert stage.sum("orcinus_worker_epoch") == scheduler.sum("orcinus_pipeline_epoch") == 1
        n_bytes = stage.sum("orcinus_worker_weights_bytes")
        assert stage.sum("orcinus_worker_weights_loaded_bytes") == n_bytes > 0
        assert stage.sum("orcinus_worker_ranks_alive") == 1
    overhead = scheduler.sum("orcinus_iteration_overhead_seconds_sum")
    taken = scheduler.sum("orcinus_iteration_seconds_sum")
    assert 0 < overhead < taken  # which is also the wait for a turn, and computation
    assert overhead < taken
    n_sampled = scheduler.sum("orcinus_generation_tokens_total")
    assert scheduler.sum("orcinus_iteration_batch_tokens_sum") >= n_sampled
