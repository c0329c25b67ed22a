"""A full pool over both protocols: new calls are refused before they cost anything, no others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from orcinus.v1 import inference_pb2, scheduler_pb2

from services.frontend.request.refusals import Refusal
from tests.fake_scheduler import FakeRequest, FakeScheduler, echo
from tests.frontend.conftest import Site, running, soon

LENGTH = scheduler_pb2.COMPLETION_REASON_LENGTH
PROMPT = inference_pb2.Prompt(text="x")
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 90000\r\n"


class OnePlace:
    """A behaviour: each request keeps the pool full until `leave` is set."""

    def __init__(self, scheduler: FakeScheduler) -> None:
        self._scheduler = scheduler
        self.leave = asyncio.Event()

    async def __call__(self, request: FakeRequest) -> None:
        self._scheduler.n_free = 0
        request.accept()
        request.tokens(5)
        await self.leave.wait()
        self._scheduler.n_free = 1
        request.last_token(6, LENGTH)


@asynccontextmanager
async def full(site: Site) -> AsyncIterator[OnePlace]:
    """A site that has been told that its pool is full, by a stream that has a token."""
    site.scheduler.behaviour = place = OnePlace(site.scheduler)
    call = site.inference.stream(
        inference_pb2.GenerateStreamRequest(
            prompt=PROMPT,
            options=inference_pb2.GenerationOptions(max_tokens=2, return_token_ids=True),
        )
    )
    assert list((await soon(call.read())).choice.token_ids) == [5]
    site.scheduler.behaviour = echo
    try:
        yield place
    finally:
        place.leave.set()
    while await soon(call.read()) is not grpc.aio.EOF:
        pass


async def post(site: Site, **headers: str) -> int:
    body = {"model": "test-model", "prompt": "x", "max_tokens": 1}
    return (await site.http.post("/v1/completions", json=body, headers=headers)).status_code


async def head_of_answer(site: Site, head: bytes) -> bytes:
    """Returns the head of the answer to a request whose body does not come."""
    reader, writer = await asyncio.open_connection(*site.frontend.http_address.rsplit(":", 1))
    writer.write(head + b"\r\n")
    answer = await soon(reader.readuntil(b"\r\n\r\n"))
    writer.close()
    return answer


async def status_of(call: Any) -> tuple[grpc.StatusCode, float]:
    """Returns the code with which a call fails, and when it is to be made again."""
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await soon(call)
    status = rpc_status.from_call(failed.value)
    retry = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(retry)
    return failed.value.code(), retry.retry_delay.ToTimedelta().total_seconds()


async def test_call_is_refused_before_its_body_until_there_is_a_place(tmp_path: Any) -> None:
    async with running(tmp_path) as site:
        async with full(site):
            answer = await head_of_answer(site, HEAD)
            assert answer.startswith(b"HTTP/1.1 429 ")
            assert b"retry-after: 1\r\n" in answer
            refused = (grpc.StatusCode.RESOURCE_EXHAUSTED, 1.0)
            request = inference_pb2.GenerateRequest(prompt=PROMPT)
            assert await status_of(site.inference.generate(request)) == refused
            stream = inference_pb2.GenerateStreamRequest(prompt=PROMPT)
            assert await status_of(site.inference.stream(stream).read()) == refused
            assert len(site.scheduler.requests) == 1
            assert site.frontend._refusals[Refusal.IN_FLIGHT] == 3
        assert await post(site) == 200


async def test_what_needs_no_place_is_not_refused(tmp_path: Any) -> None:
    async with running(tmp_path) as site, full(site):
        assert (await site.http.get("/v1/models")).status_code == 200
        assert (await soon(site.inference.describe_model())).model == "test-model"
        tokenized = inference_pb2.TokenizeRequest(prompt=PROMPT)
        assert (await soon(site.inference.tokenize(tokenized))).token_ids


async def test_stream_that_goes_on_is_not_refused(tmp_path: Any) -> None:
    async with running(tmp_path) as site, full(site):
        head = HEAD + b"Last-Event-ID: " + b"0" * 32 + b":1-1\r\nExpect: 100-continue\r\n"
        assert (await head_of_answer(site, head)).startswith(b"HTTP/1.1 100 ")
        resumed = inference_pb2.GenerateStreamRequest(
            prompt=PROMPT,
            options=inference_pb2.GenerationOptions(max_tokens=2, return_token_ids=True),
            resumption=inference_pb2.Resumption(
                request_id="0" * 32,
                seed=1,
                answers=[inference_pb2.AnswerSoFar(token_ids=[5])],
            ),
        )
        call = site.inference.stream(resumed)
        while await soon(call.read()) is not grpc.aio.EOF:
            pass
        assert site.frontend._refusals[Refusal.IN_FLIGHT] == 0


async def test_answers_of_a_call_that_runs_are_not_refused(tmp_path: Any) -> None:
    async with running(tmp_path, max_answers_at_once=1) as site:
        site.scheduler.behaviour = place = OnePlace(site.scheduler)
        options = inference_pb2.GenerationOptions(max_tokens=2, n=2)
        answering = asyncio.ensure_future(
            site.inference.generate(inference_pb2.GenerateRequest(prompt=PROMPT, options=options))
        )
        await soon(site.scheduler.wait_requests(1))
        assert len(site.scheduler.requests) == 1
        place.leave.set()
        assert len((await soon(answering)).choices) == 2


async def test_call_waits_for_the_next_pipeline_though_the_pool_was_full(tmp_path: Any) -> None:
    async with running(tmp_path, hold_s=5.0) as site, full(site):
        site.scheduler.close()
        await soon(site.model.scheduler.pipeline.wait_change())
        waiting = asyncio.ensure_future(post(site))
        await asyncio.sleep(0)
        while not site.model.service.n_waiting:
            assert not waiting.done()
            await asyncio.sleep(0.001)
        site.scheduler.n_free = 1
        site.scheduler.open()
        assert await soon(waiting) == 200


async def test_who_would_be_too_late_is_refused_in_both_protocols_before_its_body(
    tmp_path: Any,
) -> None:
    late = scheduler_pb2.REJECTION_REASON_TOO_LATE

    async def refuse(request: FakeRequest) -> None:
        request.reject(late, "too late", retry_after_s=3.0, account_s=0.8)

    async with running(tmp_path) as site:
        site.scheduler.behaviour = refuse
        assert await post(site) == 429
        answer = await head_of_answer(site, HEAD)
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"retry-after: 1\r\n" in answer
        code, retry_after_s = await status_of(
            site.inference.generate(inference_pb2.GenerateRequest(prompt=PROMPT))
        )
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 0 < retry_after_s <= 0.8
        assert len(site.scheduler.requests) == 1
        assert site.frontend._refusals[Refusal.TOO_LATE] == 3
        site.scheduler.behaviour = echo
        while await post(site) != 200:
            await asyncio.sleep(0.05)
