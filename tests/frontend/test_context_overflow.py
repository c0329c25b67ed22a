"""Prompts, and prompts with their answers, that are longer than the model's context: over HTTP in
the words that agents know, and over gRPC."""

import re
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from orcinus.v1 import inference_pb2

from tests.fake_scheduler import PIPELINE, FakeScheduler, says
from tests.frontend.conftest import Site, running
from tests.generation_options import generation_options

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXT = PIPELINE.max_model_len
EOS = PIPELINE.eos_token_ids[0]
WORDS = "word " * 500
"""A text of far more tokens than the context has."""


def turns(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


OPENAI: dict[str, Any] = {
    "text": ("/v1/completions", lambda text: {"prompt": text}),
    "texts": ("/v1/completions", lambda text: {"prompt": ["x", text]}),
    "chat": ("/v1/chat/completions", lambda text: {"messages": turns(text)}),
    "system": (
        "/v1/chat/completions",
        lambda text: {"messages": [{"role": "system", "content": text}, *turns("x")]},
    ),
    "answers": ("/v1/responses", lambda text: {"input": text}),
    "items": ("/v1/responses", lambda text: {"input": turns(text), "max_output_tokens": 9}),
}
TEXTS = {
    "words": WORDS,
    "a little": "a1" * CONTEXT,
    "too much for tokens": "x" * 90_000,
    "emoji": "🐋" * 200,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("kind", OPENAI)
async def test_openais_clients_see_that_the_context_is_exceeded(
    site: Site, kind: str, text: str
) -> None:
    path, body_of = OPENAI[kind]
    for is_streamed in (False, True):
        answer = await site.http.post(path, json=body_of(text) | {"stream": is_streamed})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["type"] == "invalid_request_error"
        assert f"maximum context length is {CONTEXT} tokens" in error["message"]


async def test_a_prompt_of_tokens_may_be_too_long_too(site: Site) -> None:
    answer = await site.http.post("/v1/completions", json={"prompt": [5] * CONTEXT})
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    answer = await site.http.post("/v1/completions", json={"prompt": [5] * (CONTEXT - 1)})
    assert answer.json()["usage"]["completion_tokens"] <= 1


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("place", ["messages", "system", "result"])
async def test_anthropics_clients_see_how_much_is_too_much(
    site: Site, place: str, text: str
) -> None:
    body: dict[str, Any] = {"max_tokens": 5, "messages": turns("x")}
    match place:
        case "messages":
            body["messages"] = turns(text)
        case "system":
            body["system"] = text
        case "result":
            call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
            result = {"type": "tool_result", "tool_use_id": "t", "content": text}
            body["messages"] += [
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [result]},
            ]
    answer = await site.http.post("/v1/messages", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    found = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", error["message"])
    assert found, error
    n_prompt, most = map(int, found.groups())
    assert n_prompt > most == CONTEXT - 1


@pytest.mark.parametrize("n_words", [1, 20, 24, 25, 26, 500, 9_000])
async def test_counting_has_no_limit_in_tokens(site: Site, n_words: int) -> None:
    text = "word " * n_words
    counted = await site.http.post("/v1/messages/count_tokens", json={"messages": turns(text)})
    rendered = f"[user] {text}\n[assistant] "
    expected = len(site.tokens("<|bos|>" + rendered)) - len(site.tokens("<|bos|>"))
    assert counted.status_code == 200, counted.text
    assert abs(counted.json()["input_tokens"] - expected) <= 1


async def test_counting_has_a_limit_in_characters(tmp_path: Path) -> None:
    async with running(tmp_path, max_body_bytes=2**23) as site:
        for n_characters, status in ((300_000, 200), (2_100_000, 400)):
            body = {"messages": turns("word " * (n_characters // 5))}
            counted = await site.http.post("/v1/messages/count_tokens", json=body)
            assert counted.status_code == status
        assert counted.json()["error"]["message"].startswith("prompt is too long: ")


Asked = tuple[str, dict[str, Any], str]

LIMITED: dict[str, Asked] = {
    "text": ("/v1/completions", {"prompt": "hello"}, "max_tokens"),
    "tokens": ("/v1/completions", {"prompt": [5, 6]}, "max_tokens"),
    "chat": ("/v1/chat/completions", {"messages": turns("hello")}, "max_tokens"),
    "newer": ("/v1/chat/completions", {"messages": turns("hello")}, "max_completion_tokens"),
    "answers": ("/v1/responses", {"input": "hello"}, "max_output_tokens"),
    "messages": ("/v1/messages", {"messages": turns("hello")}, "max_tokens"),
}


async def ask(site: Site, asked: Asked, max_tokens: int, **more: Any) -> httpx.Response:
    path, body, field = asked
    return await site.http.post(path, json=body | {field: max_tokens} | more)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("asked", LIMITED.values(), ids=LIMITED)
async def test_max_tokens_are_lowered_to_the_room(
    site: Site, asked: Asked, is_streamed: bool
) -> None:
    site.scheduler.behaviour = says(*site.tokens("hi"), EOS)
    for max_tokens in (CONTEXT, 32_000, 2**31 - 1):
        answer = await ask(site, asked, max_tokens, stream=is_streamed)
        assert answer.status_code == 200, answer.text
        submission = site.scheduler.requests[-1].submission
        assert submission.max_new_tokens == CONTEXT - len(submission.prompt_token_ids)


async def test_max_tokens_are_lowered_over_grpc(site: Site) -> None:
    site.scheduler.behaviour = says(*site.tokens("hi"), EOS)
    prompt = inference_pb2.Prompt(text="hello")
    options = generation_options(max_tokens=32_000)
    await site.inference.generate(inference_pb2.GenerateRequest(prompt=prompt, options=options))
    submission = site.scheduler.requests[-1].submission
    assert submission.max_new_tokens == CONTEXT - len(submission.prompt_token_ids)
    wrong = inference_pb2.GenerateRequest(prompt=inference_pb2.Prompt(text=WORDS))
    with pytest.raises(grpc.aio.AioRpcError, match="maximum context length is 128") as caught:
        await site.inference.generate(wrong)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_strict_max_tokens_are_refused(tmp_path: Path) -> None:
    async with running(tmp_path, strict_max_tokens=True) as site:
        site.scheduler.behaviour = says(*site.tokens("hi"), EOS)
        for kind, asked in LIMITED.items():
            assert (await ask(site, asked, 20)).status_code == 200
            error = (await ask(site, asked, CONTEXT)).json()["error"]
            if kind == "messages":
                assert "exceed context limit" in error["message"]
                assert f"+ {CONTEXT} > {CONTEXT}" in error["message"]
            else:
                assert (error["code"], error["param"]) == ("context_length_exceeded", asked[2])
                assert f"maximum context length is {CONTEXT} tokens" in error["message"]


async def test_an_ordinary_prompt_is_not_refused_for_its_characters(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 65536}')
    text = "hello world, " * 25_000  # three tokens for thirteen characters
    scheduler = FakeScheduler(pipeline=_with_context(2**17))
    async with running(tmp_path, scheduler, max_body_bytes=2**23) as site:
        site.scheduler.behaviour = says(*site.tokens("hi"), EOS)
        answer = await site.http.post("/v1/completions", json={"prompt": text})
        assert answer.status_code == 200, answer.text
        n_tokens = answer.json()["usage"]["prompt_tokens"]
        assert n_tokens == len(site.prompt_tokens(text))
        far_too_long = await site.http.post("/v1/completions", json={"prompt": "🐋" * 300_000})
        assert far_too_long.json()["error"]["code"] == "context_length_exceeded"


def _with_context(n_tokens: int) -> Any:
    described = type(PIPELINE)()
    described.CopyFrom(PIPELINE)
    described.max_model_len = n_tokens
    return described
