"""The metrics that a frontend keeps of calls, by how they end."""

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from services.common import errors
from services.frontend.api_keys import ApiKeys
from services.frontend.observing.metrics import CountedApp, FrontendMetrics
from services.frontend.request.conversation import ChatMessage, Conversation
from services.frontend.request.finish_reason import FinishReason
from services.frontend.request.generation_request import GenerationOptions, GenerationRequest
from services.frontend.request.refusals import Refusal
from services.frontend.request.resumption import AnswerSoFar, Resumption
from tests.exposition import Samples

DURATION = "gen_ai_server_request_duration_seconds_count"
FIRST_TOKEN = "gen_ai_server_time_to_first_token_seconds_count"
PER_TOKEN = "gen_ai_server_time_per_output_token_seconds_count"
USAGE = "orcinus_usage_tokens_total"
CHECKED = "orcinus_frontend_values_checked_total"


class World:
    """Metrics of a frontend that a test plays."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = FrontendMetrics(self.registry)

    @property
    def samples(self) -> Samples:
        return Samples.of(self.registry)


def request(n: int = 1) -> GenerationRequest:
    return GenerationRequest(prompts=("a",), options=GenerationOptions(n=n))


def test_a_complete_call_counts_its_answers_and_its_usage() -> None:
    it = World()
    with it.metrics.call(request(n=2), model="demo") as call:
        call.n_prompt_tokens = 5
        for index, n_tokens in ((0, 4), (1, 1)):
            call.took_tokens(index)
            call.finished(index, FinishReason.STOP, n_tokens=n_tokens)
    samples = it.samples
    assert samples.sum(DURATION, error_type="", gen_ai_request_model="demo") == 1
    assert samples.sum(FIRST_TOKEN, gen_ai_operation_name="text_completion") == 1
    assert samples.sum(PER_TOKEN) == 1  # an answer of one token has no second one
    assert samples.sum(USAGE, gen_ai_token_type="input") == 5
    assert samples.sum(USAGE, gen_ai_token_type="output") == 5
    assert samples.sum("orcinus_frontend_answers_finished_total", reason="stop") == 2


def test_values_that_were_checked_are_counted_by_result() -> None:
    it = World()
    with it.metrics.call(request(n=4), model="demo") as call:
        call.checked_values += [True, False, None, True]
    results = {name: it.samples.sum(CHECKED, result=name) for name in ("valid", "invalid")}
    assert results == {"valid": 2, "invalid": 1}
    assert it.samples.sum(CHECKED, result="unknown") == 1


def test_conversations_are_chat() -> None:
    it = World()
    turns = Conversation((ChatMessage("user", "hi"),))
    chat = GenerationRequest(prompts=(turns,), options=GenerationOptions())
    with it.metrics.call(chat, model="demo"):
        pass
    assert it.samples.sum(DURATION, gen_ai_operation_name="chat") == 1


@pytest.mark.parametrize(
    ("error", "error_type"),
    [
        (errors.InvalidRequest("n", "is bad"), "InvalidRequest"),
        (errors.PoolFull("full", retry_after_s=1), "PoolFull"),
        (errors.Unavailable("gone"), "Unavailable"),
        (asyncio.CancelledError(), "RequestCancelled"),
        (GeneratorExit(), "RequestCancelled"),
        (RuntimeError("bug"), "_OTHER"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_a_call_that_fails_has_no_usage(error: BaseException, error_type: str) -> None:
    it = World()

    def fail() -> None:
        with it.metrics.call(request(), model="") as call:
            call.n_prompt_tokens = 5
            raise error

    with pytest.raises(type(error)):
        fail()
    assert it.samples.sum(DURATION, error_type=error_type) == it.samples.sum(DURATION) == 1
    assert it.samples.sum(USAGE) == 0


def test_a_resumed_call_counts_all_tokens_and_times_its_own() -> None:
    it = World()
    so_far = (AnswerSoFar((7,) * 3), AnswerSoFar((7,) * 5, is_finished=True))
    resumption = Resumption(request_id="0" * 32, seed=1, answers=so_far)
    with it.metrics.call(replace(request(n=2), resumption=resumption), model="demo") as call:
        call.finished(1, FinishReason.LENGTH, n_tokens=5, n_resumed=5)
        call.took_tokens(0)
        call.finished(0, FinishReason.STOP, n_tokens=4, n_resumed=3)
    assert it.samples.sum("orcinus_frontend_answers_resumed_total") == 2
    assert it.samples.sum("orcinus_frontend_answers_finished_total") == 2
    assert it.samples.sum(USAGE, gen_ai_token_type="output") == 9
    assert PER_TOKEN not in it.samples.names  # no answer got a second token in this call


def test_a_call_that_ends_without_all_answers_was_given_up() -> None:
    it = World()
    with it.metrics.call(request(n=2), model="demo") as call:
        call.took_tokens(0)
        call.finished(0, FinishReason.LENGTH, n_tokens=3)
    assert it.samples.sum(DURATION, error_type="RequestCancelled") == 1
    assert it.samples.sum(FIRST_TOKEN) == 1
    assert it.samples.sum("orcinus_frontend_answers_finished_total") == 0


class Ended:
    """The context of a call that is over, as far as it is asked."""

    def __init__(self, time_left: float | None = None) -> None:
        self._time_left = time_left

    def time_remaining(self) -> float | None:
        return self._time_left


@pytest.mark.parametrize(
    ("error", "context", "code"),
    [
        (errors.PoolFull("full", retry_after_s=1), Ended(), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (asyncio.CancelledError(), Ended(), grpc.StatusCode.CANCELLED),
        (asyncio.CancelledError(), Ended(-1), grpc.StatusCode.DEADLINE_EXCEEDED),
        (RuntimeError("bug"), Ended(), grpc.StatusCode.INTERNAL),
    ],
    ids=["refused", "cancelled", "too late", "bug"],
)
def test_grpc_calls_are_counted_by_status(
    error: BaseException, context: Any, code: grpc.StatusCode
) -> None:
    it = World()
    around = it.metrics.counted(None)
    with around("orcinus.v1.InferenceService/Generate", context):
        pass
    with (
        pytest.raises(type(error)),
        around("orcinus.v1.InferenceService/Generate", context),
    ):
        raise error
    calls = "orcinus_frontend_grpc_calls_total"
    assert it.samples.sum(calls, method="Generate", code="OK") == 1
    assert it.samples.sum(calls, method="Generate", code=code.name) == 1


class Route:
    path = "/v1/models/{model:path}"


@pytest.mark.parametrize(
    ("scope", "answer", "labels"),
    [
        ({"route": Route()}, 404, {"route": Route.path, "status": "404"}),
        ({"path": "/made/up"}, 404, {"route": "other", "status": "404"}),
        ({"route": Route()}, None, {"route": Route.path, "status": "499"}),
    ],
    ids=["ours", "made up", "never answered"],
)
async def test_http_requests_are_counted_by_route_and_status(
    scope: dict[str, Any], answer: int | None, labels: dict[str, str]
) -> None:
    it = World()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if answer is not None:
            await send({"type": "http.response.start", "status": answer})

    async def send(message: Any) -> None:
        pass

    await CountedApp(app, it.metrics)(scope, send, send)  # type: ignore[arg-type]
    assert it.samples.sum("orcinus_frontend_http_requests_total", **labels) == 1


def test_a_key_that_nobody_has_is_a_refusal(tmp_path: Any) -> None:
    file = tmp_path / "keys.json"
    file.write_text('{"keys": []}')
    keys = ApiKeys(file)
    for authorization in (None, "Bearer x"):
        with pytest.raises(errors.Unauthenticated):
            keys.admit(authorization)
    assert keys.refusals[Refusal.UNKNOWN_KEY] == 2
