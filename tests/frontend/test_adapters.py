"""Requests that select an adapter by its name, over all protocols."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from orcinus.v1 import inference_pb2, scheduler_pb2

from services.common.adapters import adapter_traits
from services.receipts.keys import new_key
from services.receipts.receipt import AdapterRecord, Receipt
from tests.fake_scheduler import PIPELINE, FakeRequest, FakeScheduler, says
from tests.frontend.conftest import Site, running, soon
from tests.receipts.made import ARITHMETIC

pytestmark = pytest.mark.asyncio(loop_scope="module")

EOS = PIPELINE.eos_token_ids[0]
DIGEST = "d" * 64
TRAITS = {
    **ARITHMETIC,
    "weights": "a" * 64,
    "configuration": "b" * 16,
    "max_model_len": "256",
    **adapter_traits({"law": DIGEST, "org/medicine": "e" * 64, "test-model": "f" * 64}),
}
WITH_ADAPTERS = scheduler_pb2.PipelineDescription()
WITH_ADAPTERS.CopyFrom(PIPELINE)
WITH_ADAPTERS.traits.update(TRAITS)

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {**CHAT, "max_tokens": 9},
}


async def answers(request: FakeRequest) -> None:
    request.accept()
    request.built_by("b1", **TRAITS)
    await says(20, 21, EOS)(request)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    directory = tmp_path_factory.mktemp("adapters")
    keys = directory / "keys.pem"
    keys.write_bytes(new_key())
    scheduler = FakeScheduler(answers, pipeline=WITH_ADAPTERS)
    async with running(directory, scheduler, receipts="on_request", receipt_keys_file=keys) as site:
        yield site


def selected(site: Site) -> tuple[str, str]:
    """The adapter of the last submission."""
    adapter = site.scheduler.requests[-1].submission.adapter
    return adapter.name, adapter.digest


@pytest.mark.parametrize("path", ROUTES)
async def test_a_request_selects_an_adapter_as_a_model(site: Site, path: str) -> None:
    response = await soon(site.http.post(path, json={**ROUTES[path], "model": "law"}))
    assert response.status_code == 200, response.text
    assert response.json()["model"] == "law"
    assert selected(site) == ("law", DIGEST)
    for name in ("test-model", *([""] if path != "/v1/messages" else [])):
        response = await soon(site.http.post(path, json={**ROUTES[path], "model": name}))
        assert response.json()["model"] == "test-model"
        assert not site.scheduler.requests[-1].submission.HasField("adapter")


@pytest.mark.parametrize("path", ROUTES)
async def test_an_unknown_adapter_is_an_unknown_model(site: Site, path: str) -> None:
    response = await soon(site.http.post(path, json={**ROUTES[path], "model": "laws"}))
    assert response.status_code == 404
    assert "laws" in response.text


async def test_grpc_selects_an_adapter_too(site: Site) -> None:
    prompt = inference_pb2.Prompt(text="hello")
    request = inference_pb2.GenerateRequest(model="org/medicine", prompt=prompt)
    assert (await soon(site.inference.generate(request))).model == "org/medicine"
    assert selected(site) == ("org/medicine", "e" * 64)
    request.model = "medicine"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await soon(site.inference.generate(request))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_models_are_listed_with_their_adapters(site: Site) -> None:
    listed = (await soon(site.http.get("/v1/models"))).json()["data"]
    assert [(entry["id"], entry.get("parent")) for entry in listed] == [
        ("test-model", None),
        ("law", "test-model"),
        ("org/medicine", "test-model"),
    ]
    one = (await soon(site.http.get("/v1/models/org/medicine"))).json()
    assert (one["parent"], one["max_model_len"]) == ("test-model", PIPELINE.max_model_len)


async def test_receipts_name_the_adapter(site: Site) -> None:
    for model, expected in (("law", AdapterRecord(name="law", digest=DIGEST)), ("", None)):
        body = {"prompt": "hello", "model": model, "receipt": True}
        response = await soon(site.http.post("/v1/completions", json=body))
        receipt = Receipt.model_validate(response.json()["choices"][0]["receipt"], strict=False)
        assert receipt.model.name == "test-model"
        assert receipt.model.adapter == expected
        assert receipt.arithmetic[0].adapters == TRAITS["adapters"]
