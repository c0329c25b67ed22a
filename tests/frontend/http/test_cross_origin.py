"""Pages of other origins: who is let in, and what their scripts may see."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.frontend.settings import FrontendSettings
from tests.frontend.conftest import running

PAGE = "https://page.example"
QUESTION = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,last-event-id,x-stainless-os",
}


async def test_named_origins_get_in_without_a_key_for_the_question(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('{"keys": []}')
    settings: dict[str, Any] = {"api_keys_file": keys, "cors_origins": (PAGE,)}
    async with running(tmp_path, **settings) as site:
        answer = await site.http.options("/v1/chat/completions", headers=QUESTION)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert (
            answer.headers["access-control-allow-headers"]
            == QUESTION["access-control-request-headers"]
        )
        refused = await site.http.post("/v1/completions", headers={"origin": PAGE}, json={})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == PAGE
        shown = refused.headers["access-control-expose-headers"]
        assert {"x-request-id", "retry-after", "x-orcinus-ignored-fields"} <= set(shown.split(", "))
        other = await site.http.options(
            "/v1/completions", headers=QUESTION | {"origin": "https://other.example"}
        )
        assert other.status_code == 400
        assert "access-control-allow-origin" not in other.headers


async def test_all_origins_get_in_where_all_may_and_none_unless_told(tmp_path: Path) -> None:
    async with running(tmp_path, cors_origins="*") as site:
        body = {"prompt": "x", "stream": True}
        answer = await site.http.post("/v1/completions", headers={"origin": PAGE}, json=body)
        assert answer.headers["access-control-allow-origin"] == "*"
        assert answer.text.endswith("data: [DONE]\n\n")
    async with running(tmp_path) as site:
        answer = await site.http.options("/v1/completions", headers=QUESTION)
        assert answer.status_code == 204
        assert not [name for name in answer.headers if name.startswith("access-control")]


TEXT, JSON = "text/plain;charset=UTF-8", "application/json; charset=utf-8"


@pytest.mark.parametrize(
    ("origins", "sent", "status"),
    [
        ("", {"origin": PAGE, "content-type": TEXT}, 400),
        ("", {"origin": PAGE}, 400),
        ("", {"origin": "null", "content-type": "application/x-www-form-urlencoded"}, 400),
        ("https://other.example", {"origin": PAGE, "content-type": TEXT}, 400),
        ("", {"origin": PAGE, "content-type": JSON}, 200),
        ("", {"content-type": TEXT}, 200),
        (PAGE, {"origin": PAGE, "content-type": TEXT}, 200),
        ("*", {"origin": PAGE, "content-type": TEXT}, 200),
    ],
    ids=["text", "no type", "form", "another", "asked", "no page", "let in", "all"],
)
async def test_pages_that_are_not_let_in_must_ask_first(
    tmp_path: Path, origins: str, sent: dict[str, str], status: int
) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "x"},
        "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
        "/tokenize": {"prompt": "x"},
    }
    async with running(tmp_path, cors_origins=origins) as site:
        for path, body in bodies.items():
            answer = await site.http.post(path, headers=sent, content=json.dumps(body))
            assert answer.status_code == status, answer.text
            assert (status == 200) is ("content-type" not in answer.text)


NEEDED = ["--model", "models/x", "--scheduler", "host:1"]


def test_origins_are_a_list_with_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    origins = ("https://a.example", "http://localhost:3000")
    monkeypatch.setenv("ORCINUS_CORS_ORIGINS", ", ".join(origins))
    assert FrontendSettings.load("frontend", NEEDED).cors_origins == origins
    monkeypatch.delenv("ORCINUS_CORS_ORIGINS")
    named = [*NEEDED, "--cors-origins", ",".join(origins)]
    assert FrontendSettings.load("frontend", named).cors_origins == origins
    with pytest.raises(SystemExit, match="cors_origins"):
        FrontendSettings.load("frontend", [*NEEDED, "--cors-origins", "page.example/path"])
