"""Unknown fields of bodies: ignored and named, once in the log, or refused."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from services.common import errors
from services.frontend.http.anthropic.request import MessagesBody
from services.frontend.http.bodies.client_fields import CLIENT_FIELDS
from services.frontend.http.bodies.reader import MAX_UNKNOWN, parse_body
from services.frontend.http.bodies.unknown_fields import HEADER, MAX_LOGGED, UnknownFields
from services.frontend.http.openai.chat_request import ChatBody
from services.frontend.http.openai.completion_request import CompletionBody
from services.frontend.http.responses.request import ResponsesBody
from tests.fake_scheduler import PIPELINE, says
from tests.frontend.conftest import Site, running

on_site = pytest.mark.asyncio(loop_scope="module")

EOS = PIPELINE.eos_token_ids[0]
USER = {"role": "user", "content": "hi"}


def unknown_in(kind: Any, **fields: Any) -> tuple[str, ...]:
    """Returns the names that are told of a body."""
    told: list[tuple[str, ...]] = []
    parse_body(kind, json.dumps(fields).encode(), told.append)
    return told[0] if told else ()


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"temprature": 1}, ("temprature",)),
        ({"stream": True, "stream_options": {"speed": 1}}, ("stream_options.speed",)),
        ({"messages": [USER]}, ("messages",)),
        ({"resumption": {"seed": 1, "token_ids": [], "id": 1}}, ("resumption.id",)),
        (
            {"response_format": {"type": "json_object", "a": 1}, "b": 2},
            ("b", "response_format.a"),
        ),
        ({"user": "ann", "metadata": {"a": "b"}}, ()),
    ],
    ids=str,
)
def test_unknown_fields_are_told_by_their_path(
    fields: dict[str, Any], names: tuple[str, ...]
) -> None:
    assert unknown_in(CompletionBody, prompt="x", **fields) == names


def test_places_in_lists_are_left_out() -> None:
    messages = [USER | {"mood": 1}, USER | {"mood": 2}]
    assert unknown_in(ChatBody, messages=messages) == ("messages.mood",)


def test_what_is_ignored_is_not_kept() -> None:
    body = parse_body(CompletionBody, b'{"prompt": "x", "to_request": "much", "stop": null}')
    assert not body.model_extra
    assert body.to_request().prompts == ("x",)


@pytest.mark.parametrize("place", ["top", "stream_options"])
def test_of_many_unknown_fields_few_are_named(place: str) -> None:
    many: dict[str, Any] = {f"{n}" * 9: n for n in range(30_000)}
    fields = many if place == "top" else {"stream": True, "stream_options": many}
    data = json.dumps({"prompt": "x"} | fields).encode()
    told: list[tuple[str, ...]] = []
    parse_body(CompletionBody, data, told.append)
    assert len(told[0]) == MAX_UNKNOWN
    assert len(", ".join(told[0])) < 2048


def request() -> Request:
    return Request({"type": "http", "headers": []})


def test_each_field_is_logged_once_at_info(caplog: pytest.LogCaptureFixture) -> None:
    unknown = UnknownFields()
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            unknown.found(request(), ("b", "a"))
            unknown.found(request(), ("a", "c"))
            unknown.found(request(), ("d\r\nd é",))
        lines = [record.getMessage() for record in caplog.records]
        assert [line.partition(": ")[2] for line in lines] == ["a", "b", "c", "d??d??"]
        assert {record.levelno for record in caplog.records} == {logging.INFO}
        for n in range(1000):
            unknown.found(request(), (f"name{n}",))
        assert len(caplog.records) == MAX_LOGGED


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (
            ResponsesBody,
            {
                "input": [
                    {
                        "type": "message",
                        "role": "assistant",
                        "id": "msg_1",
                        "status": "completed",
                        "phase": "final_answer",
                        "internal_chat_message_metadata_passthrough": {"turn_id": "1"},
                        "content": [
                            {"type": "output_text", "text": "x", "annotations": [], "logprobs": []}
                        ],
                    },
                    {"type": "additional_tools", "role": "developer", "tools": []},
                    {
                        "type": "tool_search_output",
                        "execution": "client",
                        "status": "completed",
                        "tools": [],
                    },
                ],
                "client_metadata": {"a": "b"},
                "stream_options": {"include_obfuscation": False},
                "text": {"verbosity": "low"},
                "reasoning": {"effort": "low", "summary": "auto"},
            },
        ),
        (
            ChatBody,
            {
                "messages": [USER],
                "verbosity": "low",
                "stream": True,
                "stream_options": {"include_usage": True, "include_obfuscation": False},
            },
        ),
        (
            MessagesBody,
            {
                "max_tokens": 1,
                "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
                        ],
                    }
                ],
                "tools": [
                    {"name": "f", "input_schema": {}, "cache_control": {"type": "ephemeral"}}
                ],
            },
        ),
    ],
    ids=["responses", "chat", "messages"],
)
def test_fields_that_clients_send_by_themselves_are_not_told(
    kind: Any, fields: dict[str, Any]
) -> None:
    assert unknown_in(kind, **fields) == ()
    assert unknown_in(kind, **fields, mood=1) == ("mood",)


def test_many_fields_of_clients_hide_no_unknown_field() -> None:
    inner = {
        path.removeprefix("input."): 1
        for path in CLIENT_FIELDS
        if path.startswith("input.") and path.count(".") == 1
    }
    assert len(inner) > MAX_UNKNOWN
    kept = {"type", "role", "name", "content"}
    item = {"role": "user", "content": "x"} | {k: v for k, v in inner.items() if k not in kept}
    unknown = unknown_in(ResponsesBody, input=[item | {"mood": 1}])
    assert "input.mood" in unknown
    assert not CLIENT_FIELDS.intersection(unknown)


@on_site
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": [USER]})],
    ids=["text", "chat"],
)
async def test_answers_name_what_was_ignored(
    site: Site, path: str, body: dict[str, Any], stream: bool
) -> None:
    site.scheduler.behaviour = says(*site.tokens("ok"), EOS)
    body = body | {"stream": stream, "max_tokens": 9}
    assert HEADER not in (await site.http.post(path, json=body)).headers
    response = await site.http.post(path, json=body | {"provider_options": {}, "a\r\nb: c": 1})
    assert response.status_code == 200
    assert response.headers[HEADER] == "a??b??c, provider_options"
    refused = await site.http.post(path, json=body | {"temprature": 1, "model": "another"})
    assert (refused.status_code, refused.headers[HEADER]) == (404, "temprature")


async def test_they_are_refused_if_the_operator_wants_so(tmp_path: Path) -> None:
    async with running(tmp_path, refuse_unknown_fields=True) as site:
        wrong: dict[str, dict[str, Any]] = {
            "temprature": {"temprature": 1},
            "stream_options.speed": {"stream": True, "stream_options": {"speed": 1}},
        }
        for field, fields in wrong.items():
            response = await site.http.post("/v1/completions", json={"prompt": "x"} | fields)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == field
        document = (await site.http.get("/openapi.json")).json()
        body = document["components"]["schemas"]["CompletionBody"]
        assert body["additionalProperties"] is False


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("truncate_prompt_tokens", 5),
        ("use_beam_search", True),
        ("length_penalty", 2.0),
    ],
    ids=str,
)
def test_known_fields_that_would_change_the_answer_are_refused(field: str, value: Any) -> None:
    data = json.dumps({"prompt": "x", field: value}).encode()
    with pytest.raises(errors.InvalidRequest, match="not supported yet") as caught:
        parse_body(CompletionBody, data)
    assert caught.value.field == field


EFFECTLESS: dict[str, Any] = {
    "user": "ann",
    "safety_identifier": "s",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "prompt_cache_key": "k",
    "request_id": "r",
    "spaces_between_special_tokens": False,
}


def test_fields_that_choose_no_token_do_nothing() -> None:
    for kind, least in ((CompletionBody, {"prompt": "x"}), (ChatBody, {"messages": [USER]})):
        plain, full = (
            parse_body(kind, json.dumps(least | more).encode()).to_request()
            for more in ({"seed": 1}, {"seed": 1} | EFFECTLESS)
        )
        assert plain == full
        assert unknown_in(kind, **least, **EFFECTLESS) == ()
