"""Clients load and unload adapters over HTTP: which callers may, what is checked, and which callers
see them."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from orcinus.v1 import scheduler_pb2

from services.common.adapters import adapter_traits
from services.frontend.api_keys import hash_of
from tests.fake_scheduler import PIPELINE, FakeScheduler, says, sha256
from tests.frontend.conftest import Site, running, soon

pytestmark = pytest.mark.asyncio(loop_scope="module")

LOADING = scheduler_pb2.PipelineDescription()
LOADING.CopyFrom(PIPELINE)
LOADING.traits.update(adapter_traits({"fixed": "f" * 64}, max_loaded=4))

KEYS: dict[str, dict[str, Any]] = {
    "manager": {"manage": True},
    "client": {},
    "other": {"models": ["another-model"], "manage": True},
    "tenant": {"models": ["law"]},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    directory = tmp_path_factory.mktemp("loaded-adapters")
    keys = directory / "keys.json"
    entries = [{"name": name, "sha256": hash_of(name), **its} for name, its in KEYS.items()]
    keys.write_text(json.dumps({"keys": entries}))
    scheduler = FakeScheduler(says(20, 21, 1), pipeline=LOADING)
    async with running(directory, scheduler, api_keys_file=keys) as site:
        yield site


async def post(site: Site, path: str, body: dict[str, Any], key: str = "manager") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return await soon(site.http.post(path, json=body, headers=headers))


async def load(site: Site, name: str, key: str = "manager", **fields: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": f"/adapters/{name}", **fields}
    return await post(site, "/v1/load_lora_adapter", body, key)


async def unload(site: Site, name: str, key: str = "manager") -> httpx.Response:
    return await post(site, "/v1/unload_lora_adapter", {"lora_name": name}, key)


async def complete(site: Site, model: str, key: str) -> httpx.Response:
    return await post(site, "/v1/completions", {"model": model, "prompt": "hello"}, key)


async def names(site: Site, key: str) -> dict[str, str | None]:
    headers = {"authorization": f"Bearer {key}"}
    response = await soon(site.http.get("/v1/models", headers=headers))
    return {one["id"]: one.get("parent") for one in response.json()["data"]}


async def test_a_loaded_adapter_is_used_by_its_name_until_it_is_unloaded(site: Site) -> None:
    response = await load(site, "law", base_model_name="test-model")
    assert response.json() == {"object": "adapter", "id": "law", "is_loaded": True}
    assert await names(site, "client") == {
        "test-model": None, "fixed": "test-model", "law": "test-model",
    }  # fmt: skip
    assert (await complete(site, "law", "client")).status_code == 200
    adapter = site.scheduler.requests[-1].submission.adapter
    assert (adapter.name, adapter.digest) == ("law", sha256("/adapters/law"))
    assert (await unload(site, "law")).json()["is_loaded"] is False
    assert (await complete(site, "law", "client")).status_code == 404
    assert "law" not in await names(site, "client")


async def test_a_key_needs_the_right_to_manage(site: Site) -> None:
    for response in (await load(site, "law", "client"), await unload(site, "fixed", "client")):
        assert response.status_code == 403
        assert "manage" in response.text
    assert "law" not in site.scheduler.adapters.digests
    body = {"lora_name": "law", "lora_path": "/a"}
    assert (await soon(site.http.post("/v1/load_lora_adapter", json=body))).status_code == 401


async def test_a_key_for_other_models_manages_nothing_here(site: Site) -> None:
    assert (await load(site, "law", "other")).status_code == 404
    assert (await unload(site, "fixed", "other")).status_code == 404


async def test_a_key_may_be_limited_to_adapters(site: Site) -> None:
    await load(site, "law")
    await load(site, "medicine")
    assert await names(site, "tenant") == {"law": "test-model"}
    assert (await complete(site, "law", "tenant")).status_code == 200
    for model in ("medicine", "test-model", "fixed", "none"):
        refused = await complete(site, model, "tenant")
        assert refused.status_code == 404
        assert "medicine" not in refused.text.replace(f"'{model}'", "")
    assert (await complete(site, "", "tenant")).status_code in (400, 404)
    await unload(site, "law")
    await unload(site, "medicine")
    assert await names(site, "tenant") == {}


@pytest.mark.parametrize(
    ("fields", "status", "field"),
    [
        ({"base_model_name": "another-model"}, 404, "model"),
        ({"lora_name": ""}, 400, "lora_name"),
        ({"lora_name": "test-model"}, 400, "lora_name"),
        ({"lora_path": ""}, 400, "lora_path"),
        ({"lora_path": 5}, 400, "lora_path"),
    ],
)
async def test_wrong_fields_are_named(
    site: Site, fields: dict[str, Any], status: int, field: str
) -> None:
    response = await load(site, "law", **fields)
    assert response.status_code == status
    assert response.json()["error"]["param"] == field
    assert not [one for one in site.scheduler.adapters.digests if one == "law"]


async def test_a_failure_of_the_workers_is_told(site: Site) -> None:
    site.scheduler.adapter_failure = "adapter law: adapter_config.json does not exist"
    response = await load(site, "law")
    site.scheduler.adapter_failure = ""
    assert response.status_code == 400
    assert "adapter_config.json does not exist" in response.json()["error"]["message"]


async def test_what_was_never_loaded_cannot_be_unloaded(site: Site) -> None:
    response = await unload(site, "nothing")
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "lora_name"


async def test_the_next_scheduler_gets_the_list(site: Site) -> None:
    await load(site, "kept")
    site.scheduler.adapters = type(site.scheduler.adapters)()  # a leader that knows nothing
    n_connections = site.scheduler.n_connections
    site.scheduler.drop_connections()
    await soon(site.scheduler.wait_connections(n_connections + 1))
    await soon(site.model.scheduler.pipeline.wait_open())
    assert (await complete(site, "kept", "client")).status_code == 200
    assert list(site.scheduler.adapters.digests) == ["kept"]
    await unload(site, "kept")


async def test_loading_is_off_unless_the_workers_allow_it(tmp_path: Path) -> None:
    async with running(tmp_path, FakeScheduler()) as site:
        response = await load(site, "law")
        assert response.status_code == 403
        assert "allowed_adapter_sources" in response.text
