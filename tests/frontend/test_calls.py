"""What clients say of their calls beside the body, in both protocols: names and deadlines; and that
waiting streams show signs of life."""

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from orcinus.v1 import inference_pb2, scheduler_pb2

from services.frontend.request.request_id import is_request_id
from tests.fake_scheduler import (
    FakeRequest,
    FakeScheduler,
    echo,
    finds,
    keeps_quiet,
    stalls_after,
)
from tests.frontend.conftest import Site, running, soon
from tests.limits import HANG_S

pytestmark = pytest.mark.asyncio(loop_scope="module")

NAME = "client-7"


async def complete(site: Site, headers: dict[str, str], **body: Any) -> httpx.Response:
    return await site.http.post("/v1/completions", json={"prompt": "x"} | body, headers=headers)


def request(**fields: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(prompt=inference_pb2.Prompt(text="x"), **fields)


def stream_request(**fields: Any) -> inference_pb2.GenerateStreamRequest:
    return inference_pb2.GenerateStreamRequest(prompt=inference_pb2.Prompt(text="x"), **fields)


async def cancelled_request(site: Site) -> FakeRequest:
    """The one request, once the scheduler has been told to end it."""
    (submitted,) = await soon(site.scheduler.wait_requests())
    await soon(submitted.cancelled.wait())
    return submitted


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/completions", {"prompt": "x"}),
        ("POST", "/v1/completions", {"prompt": "x", "stream": True}),
        ("POST", "/v1/completions", {}),
        ("GET", "/v1/models", None),
        ("GET", "/nowhere", None),
        ("GET", "/health", None),
    ],
    ids=["whole", "stream", "error", "models", "no-path", "health"],
)
async def test_every_http_answer_has_the_client_s_name_or_ours(
    site: Site, method: str, path: str, body: Any
) -> None:
    named = await site.http.request(method, path, json=body, headers={"x-request-id": NAME})
    assert named.headers.get_list("x-request-id") == [NAME]
    for headers in ({}, {"x-request-id": "has spaces"}):
        unnamed = await site.http.request(method, path, json=body, headers=headers)
        assert is_request_id(unnamed.headers["x-request-id"])


async def test_our_name_is_that_of_the_answer(site: Site) -> None:
    answer = await complete(site, {})
    assert answer.json()["id"] == f"cmpl-{answer.headers['x-request-id']}"
    named = await complete(site, {"x-request-id": NAME})
    assert is_request_id(named.json()["id"].removeprefix("cmpl-"))


async def test_grpc_has_the_name_before_answers_and_with_errors(site: Site) -> None:
    metadata = (("x-request-id", NAME),)
    call = site.inference.generate(request(), metadata=metadata)
    await call
    assert dict(await call.initial_metadata())["x-request-id"] == NAME
    unnamed = site.inference.generate(request())
    answer = await unnamed
    assert dict(await unnamed.initial_metadata())["x-request-id"] == answer.request_id
    stream = site.inference.stream(stream_request(), metadata=metadata)
    await stream.read()
    assert dict(await stream.initial_metadata())["x-request-id"] == NAME
    stream.cancel()
    wrong = request(options=inference_pb2.GenerationOptions(max_tokens=-1))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await site.inference.generate(wrong, metadata=metadata)
    trailing = dict(caught.value.trailing_metadata())
    assert trailing["x-request-id"] == NAME
    assert "grpc-status-details-bin" in trailing


@pytest.mark.parametrize("n_cached", [0, 1])
async def test_usage_says_what_a_cache_had_of_the_prompt(site: Site, n_cached: int) -> None:
    site.scheduler.behaviour = finds(n_cached, echo)
    said = {"cached_tokens": n_cached}
    answer = (await complete(site, {}, n=2, max_tokens=3)).json()
    assert answer["usage"]["prompt_tokens_details"] == said
    stream = (
        await complete(site, {}, stream=True, stream_options={"include_usage": True})
    ).text.split("\n\n")
    last = json.loads(stream[-3].removeprefix("data: "))
    assert last["usage"]["prompt_tokens_details"] == said
    assert (await site.inference.generate(request())).usage.cached_tokens == n_cached
    turns = [{"role": "user", "content": "x"}]
    response = (await site.http.post("/v1/responses", json={"input": "x"})).json()
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == n_cached
    body = {"model": "test-model", "max_tokens": 4, "messages": turns}
    usage = (await site.http.post("/v1/messages", json=body)).json()["usage"]
    assert usage["cache_read_input_tokens"] == n_cached
    n_prompt = len(site.scheduler.requests[-1].submission.prompt_token_ids)
    assert usage["input_tokens"] == n_prompt - n_cached


async def test_of_several_answers_those_tokens_count_that_none_computed(site: Site) -> None:
    counts = iter([3, 1, 2, 2])

    async def behave(request: FakeRequest) -> None:
        await finds(next(counts), echo)(request)

    site.scheduler.behaviour = behave
    body = {"prompt": ["hello", "world"], "n": 2, "max_tokens": 3}
    answer = await complete(site, {}, **body)
    assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 1 + 2}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
        (
            "/v1/messages",
            {"max_tokens": 4, "model": "", "messages": [{"role": "user", "content": "x"}]},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_every_route_takes_the_salt_of_the_cache_and_leaves_it_out(
    site: Site, path: str, body: dict[str, Any]
) -> None:
    for fields, told in (
        ({}, ("", False)),
        ({"cache_salt": "ours", "cache_prompt": True}, ("ours", False)),
        ({"cache_prompt": False}, ("", True)),
    ):
        assert (await site.http.post(path, json=body | fields)).status_code == 200
        submission = site.scheduler.requests[-1].submission
        assert (submission.cache_salt, submission.is_uncached) == told
    refused = await site.http.post(path, json=body | {"cache_salt": "s" * 257})
    assert refused.status_code == 400
    assert "cache_salt" in refused.text


async def test_deadline_ends_a_whole_answer_and_its_request(site: Site) -> None:
    site.scheduler.behaviour = stalls_after(*site.tokens("ab"))
    answer = await complete(site, {"x-request-timeout": "1"}, max_tokens=9)
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "timed_out")
    await cancelled_request(site)
    assert site.frontend._admission.n_in_flight == 0


async def test_a_client_does_not_try_again_after_its_own_deadline(site: Site) -> None:
    site.scheduler.behaviour = stalls_after(*site.tokens("ab"))
    deadline = {"x-request-timeout": "1"}
    async with openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="none") as client:
        with pytest.raises(openai.APIStatusError):
            await client.completions.create(
                model="test-model", prompt="x", max_tokens=9, extra_headers=deadline
            )
    assert len(site.scheduler.requests) == 1


async def test_the_scheduler_is_told_how_long_a_request_may_take(site: Site) -> None:
    site.scheduler.behaviour = keeps_quiet
    asking = [
        asyncio.ensure_future(complete(site, {"x-request-timeout": "60"})),
        asyncio.ensure_future(site.inference.generate(request(), timeout=60)),
        asyncio.ensure_future(complete(site, {})),
    ]
    async with asyncio.timeout(HANG_S):
        while len(site.scheduler.requests) < len(asking):
            await asyncio.sleep(0.01)
    limits = [
        one.submission.time_left.ToSeconds() if one.submission.HasField("time_left") else None
        for one in site.scheduler.requests
    ]
    assert sum(limit is None for limit in limits) == 1
    assert all(limit is None or 50 <= limit <= 60 for limit in limits)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


async def test_a_request_that_the_scheduler_gives_up_in_time_has_timed_out(site: Site) -> None:
    async def gives_up(request: FakeRequest) -> None:
        request.complete(scheduler_pb2.COMPLETION_REASON_TIMED_OUT)

    site.scheduler.behaviour = gives_up
    answer = await complete(site, {"x-request-timeout": "60"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "timed_out")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await site.inference.generate(request(), timeout=HANG_S)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_deadline_ends_a_stream_with_an_event(site: Site) -> None:
    site.scheduler.behaviour = stalls_after(*site.tokens("ab"))
    answer = await complete(site, {"x-request-timeout": "1"}, stream=True, max_tokens=9)
    assert answer.status_code == 200
    *_, text, error, end = answer.text.split("\n\n")
    assert json.loads(text.removeprefix("data: "))["choices"][0]["text"] == "b"
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "timed_out"
    assert end == ""
    await cancelled_request(site)


async def test_request_that_ends_in_time_is_whole(site: Site) -> None:
    answer = await complete(site, {"x-request-timeout": "60"}, max_tokens=2)
    assert answer.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_wrong_deadline_is_refused_by_name(site: Site, stream: bool) -> None:
    answer = await complete(site, {"x-request-timeout": "soon"}, stream=stream)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-request-timeout"


async def test_time_while_a_request_is_held_counts(tmp_path: Path) -> None:
    scheduler = FakeScheduler(pipeline=None)
    async with running(tmp_path, scheduler, is_open=False, hold_s=HANG_S) as site:
        await soon(scheduler.wait_connections(1))
        late = [complete(site, {"x-request-timeout": "0.1"}, stream=b) for b in (False, True)]
        for answer in await asyncio.gather(*late):
            assert answer.status_code == 408
            assert answer.headers["x-should-retry"] == "false"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await site.inference.generate(request(), timeout=0.1)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(HANG_S):
            while site.frontend._admission.n_in_flight or site.frontend._budget.n_bytes:
                await asyncio.sleep(0.01)


async def test_the_server_s_own_limit_holds_in_both_protocols(tmp_path: Path) -> None:
    async with running(tmp_path, FakeScheduler(keeps_quiet), max_request_s=0.2) as site:
        answer = await complete(site, {"x-request-timeout": "60"})
        assert answer.status_code == 408
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await site.inference.generate(request(), timeout=HANG_S)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "took longer than it may" in str(caught.value.details())


async def test_accepted_stream_has_its_headers_before_its_first_token(site: Site) -> None:
    site.scheduler.behaviour = keeps_quiet
    body = {"prompt": "x", "stream": True}
    async with site.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        (submitted,) = site.scheduler.requests
        assert submitted.n_tokens == 0


async def test_the_official_client_takes_comments_between_events_with_ids(tmp_path: Path) -> None:
    """It fails at an empty line after a comment, once it has seen an id."""
    body = {"prompt": "x", "stream": True, "max_tokens": 2, "return_token_ids": True}
    go_on = asyncio.Event()

    async def pauses(submitted: FakeRequest) -> None:
        submitted.accept()
        submitted.tokens(7)
        await go_on.wait()
        submitted.last_token(8, scheduler_pb2.COMPLETION_REASON_LENGTH)

    async with running(tmp_path, FakeScheduler(pauses), comment_s=0.05) as site:
        lines: list[str] = []
        async with site.http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                lines.append(line)
                has_event = any(one.startswith("id: ") for one in lines)
                if has_event and line == ": keep-alive":
                    go_on.set()
        event = next(i for i, line in enumerate(lines) if line.startswith("id: "))
        between = lines[lines.index("", event) + 1 :]
        comments = list(itertools.takewhile(": keep-alive".__eq__, between))
        assert comments
        assert between[len(comments)].startswith("id: ")
        extra = {"return_token_ids": True}
        async with openai.AsyncOpenAI(
            base_url=f"{site.url}/v1", api_key="none", max_retries=0
        ) as client:
            go_on.clear()
            stream = await client.completions.create(
                model="test-model", prompt="x", stream=True, max_tokens=2, extra_body=extra
            )
            reasons = []
            async for chunk in stream:
                reasons.append(chunk.choices[0].finish_reason)
                asyncio.get_running_loop().call_later(0.2, go_on.set)  # after some comments
        assert reasons[-1] == "length"
        assert len(reasons) > 1
