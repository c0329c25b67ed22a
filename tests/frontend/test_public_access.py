"""API keys and TLS on the public ports, as clients of both protocols meet them."""

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import openai
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from orcinus.v1 import inference_pb2

from services.common import rpc
from services.common.by_model import for_all
from services.frontend.api_keys import hash_of
from services.frontend.frontend import Frontend
from services.frontend.grpc.inference_servicer import SERVICE
from services.frontend.settings import FrontendSettings
from tests.certificates import Authority, Pem, mount, serial_number_at
from tests.fake_scheduler import echo, keeps_quiet
from tests.frontend import checkpoints
from tests.frontend.conftest import InferenceClient, Site, running, soon
from tests.generation_options import generation_options
from tests.limits import HANG_S

ALICE = {"authorization": "Bearer alice's key"}
ALICE_METADATA = (("authorization", "Bearer alice's key"),)
PROMPT = {"prompt": "x", "max_tokens": 4}


def key_file(directory: Path, **limits: Any) -> Path:
    path = directory / "keys.json"
    alice = {"name": "alice", "sha256": hash_of("alice's key"), **limits}
    path.write_text(json.dumps({"keys": [alice]}))
    return path


@asynccontextmanager
async def locked(tmp_path: Path, **limits: Any) -> AsyncIterator[Site]:
    """A frontend that asks for keys."""
    settings: dict[str, Any] = {"api_keys_file": key_file(tmp_path, **limits), "drain_s": 0.0}
    async with running(tmp_path, **settings) as site:
        yield site


async def call_each(channel: Any, **call: Any) -> dict[str, grpc.StatusCode]:
    """Returns the status of a call of each public method."""
    statuses = {}
    for method in SERVICE.methods:
        make = channel.unary_stream if method.server_streaming else channel.unary_unary
        prompt = inference_pb2.Prompt(text="x")
        request = inference_pb2.GenerateRequest(prompt=prompt).SerializeToString()
        if method.name == "Tokenize":
            request = inference_pb2.TokenizeRequest(prompt=prompt).SerializeToString()
        if method.name in ("Detokenize", "DescribeModel"):
            request = b""
        answer = make(rpc.method_path(SERVICE, method.name))(
            request,
            timeout=HANG_S,
            **call,
        )
        try:
            if method.server_streaming:
                async for _ in answer:
                    pass
            else:
                await answer
        except grpc.aio.AioRpcError:
            pass
        statuses[method.name] = await answer.code()
    return statuses


async def status_of(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await soon(call)
    return caught.value


def whole(**options: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        prompt=inference_pb2.Prompt(text="x"),
        options=generation_options(max_tokens=4, **options),
    )


# Keys


HTTP_CALLS = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/test-model"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/input_tokens"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/score"),
    ("POST", "/v1/rerank"),
    ("POST", "/v2/rerank"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
]


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer guess"}], ids=["none", "wrong"])
async def test_without_a_key_http_calls_get_401(tmp_path: Path, headers: dict[str, str]) -> None:
    async with locked(tmp_path) as site:
        for method, path in HTTP_CALLS:
            response = await site.http.request(method, path, headers=headers, content=b"not JSON")
            assert response.status_code == 401, path
            assert response.headers["www-authenticate"] == "Bearer"
            error = response.json()["error"]
            if path.startswith("/v1/messages"):
                assert error["type"] == "authentication_error"
            else:
                assert error["code"] == "invalid_api_key"
                assert error["type"] == "invalid_request_error"
            assert "guess" not in error["message"]
        assert not site.scheduler.requests


async def test_those_are_all_paths_but_the_open_ones(tmp_path: Path) -> None:
    async with locked(tmp_path) as site:
        counted: Any = site.frontend._http._app
        paths = [re.sub("{.*}", "test-model", route.path) for route in counted._app.routes]
    assert sorted(paths) == sorted(
        [
            *("/docs", "/health", "/openapi.json", "/ready", "/serving", "/version"),
            *(path for _, path in HTTP_CALLS),
        ]
    )


async def test_without_a_key_grpc_calls_are_unauthenticated(tmp_path: Path) -> None:
    everything = dict.fromkeys((m.name for m in SERVICE.methods), grpc.StatusCode.UNAUTHENTICATED)
    async with locked(tmp_path) as site:
        channel = site.inference.channel
        assert await call_each(channel) == everything
        wrong = (("authorization", "Bearer guess"),)
        assert await call_each(channel, metadata=wrong) == everything
        assert not site.scheduler.requests


async def test_without_a_key_grpc_messages_are_not_received(tmp_path: Path) -> None:
    async with locked(tmp_path) as site:
        for method in SERVICE.methods:
            path = rpc.method_path(SERVICE, method.name)
            unsent: Any = site.inference.channel.stream_stream(path)()  # keeps its message back
            assert (await status_of(unsent.read())).code() is grpc.StatusCode.UNAUTHENTICATED
            call: Any = site.inference.channel.unary_unary(path)
            for message in (b"garbage", bytes(1_000_000)):
                assert (await status_of(call(message))).code() is grpc.StatusCode.UNAUTHENTICATED


async def test_with_a_key_everything_works(tmp_path: Path) -> None:
    everything = dict.fromkeys((method.name for method in SERVICE.methods), grpc.StatusCode.OK)
    no_vectors = dict.fromkeys(("Embed", "Score"), grpc.StatusCode.INVALID_ARGUMENT)
    async with locked(tmp_path) as site:
        statuses = await call_each(site.inference.channel, metadata=ALICE_METADATA)
        assert statuses == everything | no_vectors  # the model makes no vectors
        models = await site.http.get("/v1/models", headers=ALICE)
        assert models.json()["data"][0]["id"] == "test-model"
        for stream in (False, True):
            body = {**PROMPT, "stream": stream}
            response = await site.http.post("/v1/completions", json=body, headers=ALICE)
            assert response.status_code == 200
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
        response = await site.http.post("/v1/chat/completions", json=body, headers=ALICE)
        assert response.status_code == 200


async def test_health_and_reflection_ask_for_no_key(tmp_path: Path) -> None:
    async with locked(tmp_path) as site:
        assert (await site.http.get("/health")).status_code == 200
        assert (await site.http.get("/ready")).status_code == 200
        channel = site.inference.channel
        health = health_pb2_grpc.HealthStub(channel)
        await health.Check(health_pb2.HealthCheckRequest(), timeout=HANG_S)
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            timeout=HANG_S
        )
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        assert (await call.read()).list_services_response.service
        call.cancel()


async def test_openai_clients_understand(tmp_path: Path) -> None:
    async with locked(tmp_path, requests_per_minute=1) as site:
        clients = [
            openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key=key, max_retries=0)
            for key in ("a guess", "alice's key")
        ]
        guesser, alice = clients
        with pytest.raises(openai.AuthenticationError) as refused:
            await soon(guesser.completions.create(model="test-model", prompt="x"))
        assert refused.value.code == "invalid_api_key"
        await soon(alice.completions.create(model="test-model", prompt="x"))
        with pytest.raises(openai.RateLimitError):
            await soon(alice.completions.create(model="test-model", prompt="x"))
        for client in clients:
            await client.close()


async def test_calls_over_the_rate_are_told_when_to_come_back(tmp_path: Path) -> None:
    async with locked(tmp_path, requests_per_minute=2) as site:
        assert (await site.http.get("/v1/models", headers=ALICE)).status_code == 200
        metadata = ALICE_METADATA
        await soon(site.inference.generate(whole(), metadata=metadata))
        response = await site.http.get("/v1/models", headers=ALICE)
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(response.headers["retry-after"]) <= 30
        error = await status_of(site.inference.generate(whole(), metadata=metadata))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        retry = error_details_pb2.RetryInfo()
        assert rpc_status.from_call(error).details[0].Unpack(retry)
        assert 0 < retry.retry_delay.ToMilliseconds() <= 30_000


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
async def test_answers_count_until_they_end_or_their_client_goes_away(
    tmp_path: Path, protocol: str, is_stream: bool
) -> None:
    async with locked(tmp_path, max_in_flight=2) as site:
        site.scheduler.behaviour = keeps_quiet
        running_call = asyncio.ensure_future(_two_answers(site, protocol, is_stream=is_stream))
        (request, _) = await soon(site.scheduler.wait_requests(2))
        assert (await _one(site)).status_code == 429
        error = await status_of(site.inference.generate(whole(), metadata=ALICE_METADATA))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        running_call.cancel()
        await soon(request.cancelled.wait())
        site.scheduler.behaviour = echo
        async with asyncio.timeout(HANG_S):  # counted a moment longer than it runs
            while (await _one(site)).status_code == 429:
                await asyncio.sleep(0.01)
        await soon(_two_answers(site, protocol, is_stream=is_stream))
        assert (await _one(site)).status_code == 200


async def _one(site: Site) -> httpx.Response:
    return await site.http.post("/v1/completions", json=PROMPT, headers=ALICE)


async def _two_answers(site: Site, protocol: str, *, is_stream: bool) -> None:
    if protocol == "http":
        body = {**PROMPT, "n": 2, "stream": is_stream}
        response = await site.http.post("/v1/completions", json=body, headers=ALICE)
        assert response.status_code == 200
    elif is_stream:
        request = inference_pb2.GenerateStreamRequest(
            prompt=whole().prompt, options=whole(n=2).options
        )
        async for _ in site.inference.stream(request, metadata=ALICE_METADATA):
            pass
    else:
        await site.inference.generate(whole(n=2), metadata=ALICE_METADATA)


# TLS


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def public_dir(authority: Authority, directory: Path) -> Pem:
    """A certificate for clients that go by address, as mounted for the public ports."""
    pem = authority.issue("127.0.0.1", "localhost")
    mount(directory, {"tls.crt": pem.certificate, "tls.key": pem.key})
    return pem


def trusting(authority: Authority) -> ssl.SSLContext:
    """A client's context."""
    return ssl.create_default_context(cadata=authority.certificate.decode())


@asynccontextmanager
async def encrypted(tmp_path: Path, **settings: Any) -> AsyncIterator[Site]:
    """A frontend with TLS on both public ports."""
    public: dict[str, Any] = {"public_tls_dir": tmp_path / "public", "drain_s": 0.0}
    async with running(tmp_path, **public, **settings) as site:
        yield site


async def test_both_protocols_are_served_over_tls_and_only_so(
    authority: Authority, tmp_path: Path
) -> None:
    public_dir(authority, tmp_path / "public")
    async with encrypted(tmp_path, api_keys_file=key_file(tmp_path)) as site:
        url = f"https://{site.frontend.http_address}/v1"
        http = openai.DefaultAsyncHttpxClient(verify=trusting(authority))
        async with openai.AsyncOpenAI(
            base_url=url, api_key="alice's key", max_retries=0, http_client=http
        ) as client:
            answer = await soon(client.completions.create(model="test-model", prompt="x"))
            assert answer.choices[0].text
            stream = await soon(
                client.completions.create(model="test-model", prompt="x", stream=True)
            )
            assert [chunk async for chunk in stream]
        credentials = grpc.ssl_channel_credentials(authority.certificate)
        async with rpc.connect(site.frontend.grpc_address, credentials=credentials) as channel:
            inference = InferenceClient(channel)
            await soon(inference.generate(whole(), metadata=ALICE_METADATA))
            error = await status_of(inference.generate(whole()))
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(httpx.TransportError):
            await site.http.get("/health")
        error = await status_of(site.inference.generate(whole(), metadata=ALICE_METADATA))
        assert error.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_renewed_certificate_is_for_new_connections(
    authority: Authority, tmp_path: Path, host: str
) -> None:
    trust = trusting(authority)

    async def shown(address: str) -> int:
        return await soon(asyncio.to_thread(serial_number_at, address, trust, name=host))

    first = public_dir(authority, tmp_path / "public")
    async with encrypted(tmp_path) as site:
        ports = (site.frontend.http_address, site.frontend.grpc_address)
        async with httpx.AsyncClient(base_url=f"https://{ports[0]}", verify=trust) as client:
            assert (await client.get("/health")).status_code == 200
            assert [await shown(port) for port in ports] == [first.serial_number] * 2
            renewed = public_dir(authority, tmp_path / "public")
            assert [await shown(port) for port in ports] == [renewed.serial_number] * 2
            mount(tmp_path / "public", {"tls.crt": b"half a certif", "tls.key": renewed.key})
            assert [await shown(port) for port in ports] == [renewed.serial_number] * 2
            assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("settings", "file"),
    [
        ({"public_tls_dir": "nothing"}, "nothing/tls.crt"),
        ({"api_keys_file": "keys.json"}, "keys.json"),
    ],
    ids=["tls", "keys"],
)
async def test_missing_files_are_named_at_the_start(
    tmp_path: Path, settings: dict[str, str], file: str
) -> None:
    checkpoints.write_checkpoint(tmp_path, chat_template=None)
    with pytest.raises(OSError, match=file):
        Frontend(
            FrontendSettings(
                model=for_all(tmp_path),
                scheduler=for_all("127.0.0.1:1"),
                http_address="127.0.0.1:0",
                grpc_address="127.0.0.1:0",
                **{name: tmp_path / path for name, path in settings.items()},  # type: ignore[arg-type]
            )
        )
