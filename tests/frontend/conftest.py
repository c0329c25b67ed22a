"""A frontend on real sockets, in front of fake schedulers whose behaviour a test sets."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio
import httpx
import pytest
import pytest_asyncio
from orcinus.v1 import inference_pb2

from services.common import rpc, tracing
from services.common.tracing import Tracing
from services.frontend.frontend import Frontend
from services.frontend.grpc.inference_servicer import SERVICE
from services.frontend.link.backoff import Backoff
from services.frontend.link.scheduler_client import SchedulerClient
from services.frontend.models.served_model import ServedModel
from services.frontend.request.refusals import Refusals
from services.frontend.settings import FrontendSettings
from services.frontend.text.tokenizer import Tokenizer
from tests.fake_scheduler import FakeScheduler, echo
from tests.frontend import checkpoints
from tests.limits import HANG_S

EAGER = Backoff(first_s=0.01, max_s=0.05)

Result = TypeVar("Result")


async def soon(waiting: Awaitable[Result]) -> Result:
    """Awaits `waiting` and returns its result. Raises TimeoutError if the result takes too long."""
    async with asyncio.timeout(HANG_S):
        return await waiting


@asynccontextmanager
async def client_of(
    address: str,
    connect: rpc.Connect = rpc.connect,
    *,
    resume_s: float = 0.0,
    refusals: Refusals | None = None,
    on_tokens: Callable[[], None] = lambda: None,
) -> AsyncIterator[SchedulerClient]:
    """Yields a running `SchedulerClient` that tries to connect to the scheduler at `address`. The
    address may stand for several schedulers, of which one leads."""
    client = SchedulerClient(
        address,
        connect=connect,
        backoff=EAGER,
        resume_s=resume_s,
        on_tokens=on_tokens,
        refusals=refusals,
    )
    running = asyncio.ensure_future(client.run())
    try:
        yield client
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@asynccontextmanager
async def connected(
    scheduler: FakeScheduler, *, resume_s: float = 0.0
) -> AsyncIterator[SchedulerClient]:
    """Starts a scheduler, and yields a `SchedulerClient` that is connected to it."""
    async with client_of(await scheduler.start(), resume_s=resume_s) as client:
        await soon(client.pipeline.wait_open())
        yield client
    await scheduler.stop()


async def start_all(*schedulers: FakeScheduler) -> str:
    """Starts schedulers, and returns an address that stands for all of them."""
    addresses = [await scheduler.start() for scheduler in schedulers]
    return addresses[0] if len(addresses) == 1 else f"ipv4:{','.join(addresses)}"


class InferenceClient:
    """A client of the public gRPC API. A request may be a message, or bytes that are sent
    unchanged."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    def generate(self, request: inference_pb2.GenerateRequest, **call: Any) -> Any:
        """Requests a whole answer."""
        return self._unary("Generate", inference_pb2.GenerateResponse)(request, **call)

    def tokenize(self, request: inference_pb2.TokenizeRequest) -> Any:
        """Requests the tokens of a prompt."""
        return self._unary("Tokenize", inference_pb2.TokenizeResponse)(request)

    def detokenize(self, request: inference_pb2.DetokenizeRequest) -> Any:
        """Requests the text of tokens."""
        return self._unary("Detokenize", inference_pb2.DetokenizeResponse)(request)

    def describe_model(self, model: str = "") -> Any:
        """Requests the description of a model."""
        method = self._unary("DescribeModel", inference_pb2.DescribeModelResponse)
        return method(inference_pb2.DescribeModelRequest(model=model))

    def stream(self, request: inference_pb2.GenerateStreamRequest, **call: Any) -> Any:
        """Requests a streamed answer."""
        method = self.channel.unary_stream(
            rpc.method_path(SERVICE, "GenerateStream"),
            request_serializer=_serialise,
            response_deserializer=inference_pb2.GenerateStreamResponse.FromString,
        )
        return method(request, **call)

    def _unary(self, method: str, response: Any) -> Any:
        return self.channel.unary_unary(
            rpc.method_path(SERVICE, method),
            request_serializer=_serialise,
            response_deserializer=response.FromString,
        )


def _serialise(message: Any) -> bytes:
    """Returns the bytes of a message. Bytes are returned unchanged, since a client may send any
    bytes."""
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())


@dataclass(frozen=True, slots=True)
class Site:
    """A frontend, its first fake scheduler, and clients of the frontend."""

    frontend: Frontend
    scheduler: FakeScheduler
    tokenizer: Tokenizer
    http: httpx.AsyncClient
    inference: InferenceClient
    stop: asyncio.Event

    @property
    def url(self) -> str:
        """URL of the OpenAI API."""
        return f"http://{self.frontend.http_address}"

    @property
    def model(self) -> ServedModel:
        """The first model that the frontend serves."""
        return next(iter(self.frontend._models))

    def tokens(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of a text without special tokens, for example as an answer of the
        scheduler."""
        return self.tokenizer.to_tokens(text, add_special_tokens=False)

    def prompt_tokens(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of a text as a prompt, with special tokens."""
        return self.tokenizer.to_tokens(text)


@asynccontextmanager
async def running(
    directory: Path,
    *schedulers: FakeScheduler,
    template: str | None = checkpoints.CHAT_TEMPLATE,
    is_open: bool = True,
    traces: Tracing = tracing.OFF,
    **settings: Any,
) -> AsyncIterator[Site]:
    """Yields a frontend in front of `schedulers`, by default of one new fake scheduler. If
    `is_open`, first waits until the frontend is connected.

    By default, the frontend does not hold requests while there is no pipeline.
    """
    tokenizer = checkpoints.write_checkpoint(directory, chat_template=template)
    schedulers = schedulers or (FakeScheduler(),)
    settings = {"model": directory, "scheduler": await start_all(*schedulers), **settings}
    async with in_front_of(
        schedulers, tokenizer, is_open=is_open, traces=traces, **settings
    ) as site:
        yield site


@asynccontextmanager
async def in_front_of(
    schedulers: Sequence[FakeScheduler],
    tokenizer: Tokenizer,
    *,
    is_open: bool = True,
    traces: Tracing = tracing.OFF,
    **settings: Any,
) -> AsyncIterator[Site]:
    """Yields a frontend in front of schedulers that have been started. The schedulers are stopped
    at the end. The `Site` has the first scheduler and `tokenizer`."""
    frontend = Frontend(
        FrontendSettings(
            **{
                "http_address": "127.0.0.1:0",
                "grpc_address": "127.0.0.1:0",
                "max_body_bytes": 100_000,
                "hold_s": 0.0,
                "resume_s": 0.0,
                **settings,
            }
        ),
        traces,
    )
    await frontend.answer_probes()
    stop = asyncio.Event()
    serving = asyncio.ensure_future(frontend.run(stop))
    http = httpx.AsyncClient(base_url=f"http://{frontend.http_address}", timeout=HANG_S)
    async with http, rpc.connect(frontend.grpc_address) as channel:
        site = Site(frontend, schedulers[0], tokenizer, http, InferenceClient(channel), stop)
        try:
            if is_open:
                await soon(frontend.wait_ready())
            yield site
        finally:
            stop.set()
            async with asyncio.timeout(HANG_S):
                await serving
            for scheduler in schedulers:
                await scheduler.stop()


@pytest.fixture(scope="session")
def anthropic() -> Any:
    """Anthropic's library. It takes a second to import, so only tests that use it import it."""
    import anthropic

    return anthropic


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """A frontend that all tests of a module share."""
    async with running(tmp_path_factory.mktemp("checkpoint"), tool_parser="hermes") as site:
        yield site


@pytest_asyncio.fixture(loop_scope="module")
async def site(shared_site: Site, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Site]:
    """The frontend of the module. After each test, checks that all requests have ended and no error
    was logged."""
    shared_site.scheduler.behaviour = echo
    shared_site.scheduler.requests.clear()
    yield shared_site
    for request in shared_site.scheduler.requests:
        async with asyncio.timeout(HANG_S):
            await request.ended.wait()
    complaints = [r for r in caplog.get_records("call") if r.levelno >= logging.ERROR]
    assert not complaints, [record.getMessage() for record in complaints]
