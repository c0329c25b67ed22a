"""GET /metrics on the port of the API."""

from pathlib import Path

import pytest

from services.frontend.api_keys import ApiKey, hash_of
from tests.frontend.conftest import Site, running

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_there_are_no_metrics_on_the_apis_port_by_default(site: Site) -> None:
    assert (await site.http.get("/metrics")).status_code == 404
    assert "/metrics" not in (await site.http.get("/openapi.json")).json()["paths"]


async def test_a_setting_serves_metrics_on_the_apis_port(tmp_path: Path) -> None:
    async with running(tmp_path, api_metrics=True) as site:
        await site.http.post("/v1/completions", json={"prompt": "x"})
        answer = await site.http.get("/metrics")
        assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (
            200,
            "text/plain",
        )
        assert "orcinus_frontend_" in answer.text
        asked = {"accept": "application/openmetrics-text; version=1.0.0"}
        opened = await site.http.get("/metrics", headers=asked)
        assert opened.headers["content-type"].startswith("application/openmetrics-text")
        assert opened.text.rstrip().endswith("# EOF")
        assert "/metrics" in (await site.http.get("/openapi.json")).json()["paths"]


async def test_metrics_need_a_key_where_the_api_does(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    entry = ApiKey(name="alice", sha256=hash_of("secret"))
    keys.write_text(f'{{"keys": [{entry.model_dump_json(exclude_none=True)}]}}')
    async with running(tmp_path, api_metrics=True, api_keys_file=keys) as site:
        assert (await site.http.get("/metrics")).status_code == 401
        shown = {"authorization": "Bearer secret"}
        assert (await site.http.get("/metrics", headers=shown)).status_code == 200
