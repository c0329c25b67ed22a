"""The gRPC API under clients that send slowly, too much or nothing more, and that do not read."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from orcinus.v1 import inference_pb2

from services.frontend.api_keys import hash_of
from services.frontend.frontend import Frontend
from services.frontend.grpc.field_count import has_more_fields
from services.frontend.grpc.transfers import (
    MAX_FIELDS,
    MAX_UNREAD_CALLS,
    WRITES_AT_ONCE,
    Transfers,
)
from services.frontend.request.memory_budget import MemoryBudget
from services.frontend.request.refusals import Refusal, Refusals
from tests.fake_scheduler import keeps_quiet, says, stalls_after
from tests.frontend.conftest import Site, running, soon
from tests.http2_client import Http2Client, framed
from tests.limits import HANG_S

GENERATE, STREAM, TOKENIZE = (
    f"/orcinus.v1.InferenceService/{method}"
    for method in ("Generate", "GenerateStream", "Tokenize")
)
DESCRIBE = "/orcinus.v1.InferenceService/DescribeModel"
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
EXCEEDED = grpc.StatusCode.DEADLINE_EXCEEDED.value[0]

UNLIMITED: dict[str, Any] = {"body_limit_s": 1000.0, "send_limit_s": 1000.0}
"""Clients may take longer than any test."""

PROMPT = inference_pb2.Prompt(text="x")


def generate() -> bytes:
    return inference_pb2.GenerateRequest(prompt=PROMPT).SerializeToString()


async def is_answered(site: Site) -> bool:
    """Whether an honest client, on a connection of its own, gets an answer."""
    answer = await soon(site.inference.generate(inference_pb2.GenerateRequest(prompt=PROMPT)))
    return bool(answer.choices[0].text)


def refused(frontend: Frontend, reason: Refusal) -> int:
    return frontend._refusals[reason]


async def until(is_true: Any) -> None:
    async with asyncio.timeout(HANG_S):
        while not is_true():
            await asyncio.sleep(0.01)


async def test_a_message_that_stops_half_way_is_given_up(tmp_path: Path) -> None:
    async with running(tmp_path, body_limit_s=0.2) as site:
        async with Http2Client.connected(site.frontend.grpc_address) as slow:
            streams = [slow.begin(path) for path in (GENERATE, STREAM, TOKENIZE, REFLECT)]
            for stream in streams:
                slow.send(stream, framed(b"x" * 1000)[:500])
            for stream in streams:
                assert (await slow.wait_over(stream)).status == EXCEEDED
        assert refused(site.frontend, Refusal.BODY_TIMEOUT) == len(streams)
        assert await is_answered(site)
        await until(lambda: site.frontend._budget.n_bytes == 0)


async def test_slow_uploads_do_not_hold_up_honest_calls(tmp_path: Path) -> None:
    # Room for two messages at a time, which forty want.
    async with (
        running(tmp_path, max_in_flight_bytes=200_000, body_limit_s=2 * HANG_S) as site,
        Http2Client.connected(site.frontend.grpc_address) as slow,
    ):
        for _ in range(40):
            slow.send(slow.begin(GENERATE), framed(b"x" * 1000)[:500])
        await until(lambda: refused(site.frontend, Refusal.MEMORY))  # they compete already
        assert await is_answered(site), "before the time of any of them is up"


async def test_uploads_count_as_answers_of_their_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(
        json.dumps({"keys": [{"name": "slow", "max_in_flight": 2, "sha256": hash_of("secret")}]})
    )
    async with (
        running(tmp_path, api_keys_file=keys) as site,
        Http2Client.connected(site.frontend.grpc_address) as slow,
    ):
        key = [("authorization", "Bearer secret")]
        uploads = [slow.begin(GENERATE, metadata=key) for _ in range(3)]
        answer = await slow.wait_over(uploads[-1])
        assert answer.status == EXHAUSTED
        assert not any(slow.answers[stream].is_over for stream in uploads[:-1])
        assert refused(site.frontend, Refusal.KEY_IN_FLIGHT) == 1
        describing = slow.call(DESCRIBE, b"", metadata=key)  # it uploads nothing
        assert (await slow.wait_over(describing)).status == 0
        slow.h2.send_data(uploads[0], framed(generate()), end_stream=True)
        slow.flush()
        assert (await slow.wait_over(uploads[0])).status == 0
        assert (await slow.wait_over(slow.call(GENERATE, generate(), metadata=key))).status == 0


async def test_a_stream_that_is_not_read_gives_back_what_it_holds(tmp_path: Path) -> None:
    async with (
        running(tmp_path, send_limit_s=0.1) as site,
        Http2Client.connected(site.frontend.grpc_address, window=0) as deaf,
    ):
        site.scheduler.behaviour = stalls_after(*site.tokens("abc"))
        stream = deaf.call(STREAM, generate())
        (request,) = await soon(site.scheduler.wait_requests())
        await soon(request.cancelled.wait())
        await until(lambda: site.frontend._admission.n_in_flight == 0)
        assert refused(site.frontend, Refusal.UNREAD) == 1
        assert 0 < site.frontend._budget.n_bytes < 100_000  # what gRPC still has of it
        deaf.open_window(stream, 10_000)
        answer = await deaf.wait_over(stream)
        assert answer.status == EXCEEDED
        assert len(answer.messages) == 1
        await until(lambda: site.frontend._budget.n_bytes == 0)


async def test_a_stream_whose_client_goes_while_it_is_unread_ends(tmp_path: Path) -> None:
    async with (
        running(tmp_path) as site,
        Http2Client.connected(site.frontend.grpc_address, window=0) as deaf,
    ):
        site.scheduler.behaviour = stalls_after(*site.tokens("abc"))
        stream = deaf.call(STREAM, generate())
        (request,) = await soon(site.scheduler.wait_requests())
        deaf.reset(stream)
        await soon(request.cancelled.wait())
        await until(lambda: site.frontend._admission.n_in_flight == 0)


async def test_a_client_that_reads_slowly_gets_all_of_it(tmp_path: Path) -> None:
    async with (
        running(tmp_path, send_limit_s=0.5) as site,
        Http2Client.connected(site.frontend.grpc_address, window=0) as slow,
    ):
        site.scheduler.behaviour = says(*site.tokens("abcdefgh"))
        stream = slow.call(STREAM, generate())
        began = asyncio.get_running_loop().time()
        async with asyncio.timeout(HANG_S):
            while not slow.answers[stream].is_over:
                slow.open_window(stream, 20)  # several times for each message
                await asyncio.sleep(0.05)
        assert slow.answers[stream].status == 0
        assert asyncio.get_running_loop().time() - began > 0.5


async def test_a_connection_of_unread_answers_gets_no_more(tmp_path: Path) -> None:
    async with (
        running(tmp_path, send_limit_s=0.05) as site,
        Http2Client.connected(site.frontend.grpc_address, window=0) as deaf,
    ):
        unread = [
            deaf.call(path, generate()) for path in (GENERATE, STREAM) * (MAX_UNREAD_CALLS // 2)
        ]
        await until(lambda: refused(site.frontend, Refusal.UNREAD) == MAX_UNREAD_CALLS)
        answer = await deaf.wait_over(deaf.call(GENERATE, generate()))
        assert answer.status == EXHAUSTED
        assert "not read" in answer.metadata["grpc-message"]
        assert await is_answered(site)
        for stream in unread:
            deaf.reset(stream)
        await until(lambda: site.frontend._budget.n_bytes == 0)
        answer = await deaf.wait_over(deaf.call(TOKENIZE, b"bad"))
        assert answer.status == grpc.StatusCode.INVALID_ARGUMENT.value[0]


class Writes:
    """A call's context in gRPC, and the number of the pass in which it was told to write."""

    def __init__(self, passes: list[int]) -> None:
        self._passes = passes
        self.written_in: int | None = None

    def __getattr__(self, _: str) -> Any:
        return lambda *_: None  # it has no metadata, no peer and no time

    async def send_initial_metadata(self, _: object) -> None: ...

    async def write(self, _: object) -> None:
        self.written_in = len(self._passes)


async def test_few_of_the_messages_of_streams_are_written_in_a_pass() -> None:
    refusals, passes = Refusals(), list[int]()
    transfers = Transfers(
        MemoryBudget(2**30, refusals=refusals),
        refusals,
        max_message_bytes=2**20,
        receive_limit_s=HANG_S,
        send_limit_s=HANG_S,
        clock=lambda: 0.0,  # else a pass that took long would allow the next one more
    )
    calls = [Writes(passes) for _ in range(3 * WRITES_AT_ONCE)]

    async def answer(call: Writes) -> None:
        exchange = transfers.exchange(call)
        await exchange.write(b"message")
        exchange.close()

    tasks = [asyncio.ensure_future(answer(call)) for call in calls]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        passes.append(0)
        assert len(passes) < 100
    await asyncio.gather(*tasks)
    numbers = [call.written_in for call in calls]
    assert numbers == sorted(numbers, key=lambda number: -1 if number is None else number)
    assert max(Counter(numbers).values()) == WRITES_AT_ONCE


async def test_a_message_of_very_many_fields_is_not_parsed(tmp_path: Path) -> None:
    async with running(tmp_path) as site:
        data = inference_pb2.GenerateRequest(
            options=inference_pb2.GenerationOptions(stop=["x"] * (MAX_FIELDS + 1))
        ).SerializeToString()
        assert has_more_fields(data, inference_pb2.GenerateRequest, MAX_FIELDS)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await soon(site.inference.generate(inference_pb2.GenerateRequest.FromString(data)))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "fields" in (caught.value.details() or "")


async def test_tokens_beyond_the_models_are_refused_as_they_came(tmp_path: Path) -> None:
    async with running(tmp_path) as site:
        prompt = inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=[1] * 10_000))
        for call in (
            site.inference.generate(inference_pb2.GenerateRequest(prompt=prompt)),
            site.inference.tokenize(inference_pb2.TokenizeRequest(prompt=prompt)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await soon(call)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "10000 tokens" in (caught.value.details() or "")


async def test_it_stops_in_time_whatever_clients_leave_undone(tmp_path: Path) -> None:
    async with (
        running(tmp_path, linger_s=0.2, drain_s=0.2, **UNLIMITED) as site,
        Http2Client.connected(site.frontend.grpc_address, window=0) as deaf,
    ):
        watch = deaf.call("/grpc.health.v1.Health/Watch")
        site.scheduler.behaviour = keeps_quiet
        deaf.send(deaf.begin(GENERATE), framed(b"x" * 1000)[:500])
        deaf.call(STREAM, generate())
        await soon(site.scheduler.wait_requests())
        assert not deaf.answers[watch].is_over
        site.stop.set()
        await deaf.wait_closed()
