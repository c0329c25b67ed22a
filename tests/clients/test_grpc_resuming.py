"""Streams over gRPC against real frontends: they go on whatever happens to the connection."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from orcinus.v1 import inference_pb2, inference_pb2_grpc, scheduler_pb2
from orcinus_client import InvalidRequest, Overloaded, Retry, TimedOut
from orcinus_client.grpc import CHANNEL_OPTIONS, async_generate_stream, generate_stream

from tests.clients.test_resuming import cutting_proxy
from tests.fake_scheduler import keeps_quiet, loses_pipeline_after, rejects, says, stalls_after
from tests.frontend.conftest import Site, running, soon

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "one 世 two 🐋 three"
Response = inference_pb2.GenerateStreamResponse


def request_of(**options: Any) -> inference_pb2.GenerateStreamRequest:
    """A request whose seed the server draws."""
    return inference_pb2.GenerateStreamRequest(
        prompt=inference_pb2.Prompt(text="x"),
        options=inference_pb2.GenerationOptions(**{"max_tokens": 100, **options}),
    )


Stream = Callable[..., Any]


def in_a_thread(
    request: inference_pb2.GenerateStreamRequest, *addresses: str, **limits: Any
) -> list[Response]:
    """All messages of a stream, as a program with threads reads them."""
    channels = [grpc.insecure_channel(it, (*CHANNEL_OPTIONS, OWN)) for it in addresses]
    stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
    try:
        return list(generate_stream(request, *stubs, **limits))
    finally:
        for channel in channels:
            channel.close()


OWN = ("grpc.use_local_subchannel_pool", 1)
"""Gives each channel a connection of its own."""


async def in_a_task(
    request: inference_pb2.GenerateStreamRequest, *addresses: str, **limits: Any
) -> list[Response]:
    """All messages of a stream, as a program with asyncio reads them."""
    channels = [grpc.aio.insecure_channel(it, (*CHANNEL_OPTIONS, OWN)) for it in addresses]
    stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
    try:
        return [it async for it in async_generate_stream(request, *stubs, **limits)]
    finally:
        for channel in channels:
            await channel.close()


@pytest.fixture(params=["threads", "asyncio"])
def read(request: pytest.FixtureRequest) -> Stream:
    """Reads a stream by one of the two clients."""
    if request.param == "asyncio":
        return in_a_task
    return lambda *arguments, **limits: asyncio.to_thread(in_a_thread, *arguments, **limits)


def texts_of(responses: list[Response]) -> dict[int, str]:
    """The text of each answer."""
    texts: dict[int, str] = {}
    for response in responses:
        if response.HasField("choice"):
            index = response.choice.index
            texts[index] = texts.get(index, "") + response.choice.text
    return texts


async def test_a_frontend_that_dies_in_the_middle_leaves_no_trace(
    site: Site, tmp_path: Path, read: Stream
) -> None:
    said = site.tokens(TEXT)
    site.scheduler.behaviour = says(*said)
    request = request_of(max_tokens=len(said), n=2)
    async with running(tmp_path, drain_s=0.0) as dying:
        dying.scheduler.behaviour = stalls_after(*said[:3])
        addresses = (it.frontend.grpc_address for it in (dying, site))
        reading = asyncio.ensure_future(read(request, *addresses))
        await soon(dying.scheduler.wait_requests(2))
        while any(it.n_tokens < 3 for it in dying.scheduler.requests):
            await asyncio.sleep(0.01)
        dying.stop.set()
        found = await soon(reading)
    assert texts_of(found) == {0: TEXT, 1: TEXT}
    assert len({it.request_id for it in found}) == 1
    assert found[-1].usage.completion_tokens == 2 * len(said)
    seeds = {it.submission.sampling.seed for it in site.scheduler.requests[-2:]}
    assert found[0].seed in seeds


@pytest.mark.parametrize("n_bytes", [100, 400, 700])
async def test_cut_after_any_byte_leaves_no_trace(site: Site, n_bytes: int, read: Stream) -> None:
    said = site.tokens(TEXT)
    site.scheduler.behaviour = says(*said)
    async with cutting_proxy(site.frontend.grpc_address, n_bytes) as broken:
        addresses = (broken.removeprefix("http://"), site.frontend.grpc_address)
        found = await soon(read(request_of(max_tokens=len(said)), *addresses))
    assert texts_of(found) == {0: TEXT}


async def test_a_frontend_that_gives_up_names_what_has_come(site: Site, tmp_path: Path) -> None:
    said = site.tokens(TEXT)
    async with running(tmp_path) as other:
        site.scheduler.behaviour = loses_pipeline_after(*said[:3])
        other.scheduler.behaviour = says(*said)
        addresses = (it.frontend.grpc_address for it in (site, other))
        found = await soon(in_a_task(request_of(max_tokens=len(said)), *addresses))
        (request,) = other.scheduler.requests
    assert list(request.submission.generated_token_ids) == list(said[:3])
    assert texts_of(found) == {0: TEXT}


async def test_errors_of_a_request_are_not_tried_again(site: Site, read: Stream) -> None:
    n_before = len(site.scheduler.requests)
    addresses = (site.frontend.grpc_address, "127.0.0.1:1")
    with pytest.raises(InvalidRequest) as refused:
        await soon(read(request_of(max_tokens=-1), *addresses))
    assert refused.value.field == "max_tokens"
    assert len(site.scheduler.requests) == n_before


async def test_a_full_pool_says_when_to_try_again(site: Site) -> None:
    site.scheduler.behaviour = rejects(scheduler_pb2.REJECTION_REASON_POOL_FULL)
    with pytest.raises(Overloaded) as refused:
        await soon(in_a_task(request_of(), site.frontend.grpc_address, retry=Retry(max_failures=1)))
    assert refused.value.retry_after_s is not None
    assert refused.value.retry_after_s > 0


async def test_the_time_of_a_stream_includes_all_attempts(site: Site, read: Stream) -> None:
    site.scheduler.behaviour = keeps_quiet
    with pytest.raises(TimedOut):
        await soon(read(request_of(), site.frontend.grpc_address, timeout_s=0.2))


async def test_a_stream_needs_a_stub() -> None:
    with pytest.raises(ValueError, match="stub"):
        list(generate_stream(request_of()))
