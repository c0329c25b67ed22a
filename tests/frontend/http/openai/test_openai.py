"""The OpenAI API over real sockets: shapes, streams, errors, and clients that go away."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from orcinus.v1 import scheduler_pb2

from tests.fake_scheduler import (
    PIPELINE,
    keeps_quiet,
    loses_pipeline_after,
    rejects,
    says,
    stalls_after,
)
from tests.frontend.conftest import Site
from tests.limits import HANG_S

pytestmark = pytest.mark.asyncio(loop_scope="module")

EOS = PIPELINE.eos_token_ids[0]
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


async def post(site: Site, path: str, **body: Any) -> httpx.Response:
    return await site.http.post(f"/v1/{path}", json=body)


async def complete(site: Site, prompt: Any = "hello", **body: Any) -> Any:
    response = await post(site, "completions", prompt=prompt, **body)
    assert response.status_code == 200, response.text
    return response.json()


async def chat(site: Site, messages: Any = HELLO, **body: Any) -> Any:
    response = await post(site, "chat/completions", messages=messages, **body)
    assert response.status_code == 200, response.text
    return response.json()


async def events(site: Site, path: str, **body: Any) -> list[Any]:
    """The data of a stream's events, `[DONE]` as it is."""
    lines = (await post(site, path, stream=True, **body)).text.splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


async def send_completion(site: Site, *, stream: bool) -> asyncio.StreamWriter:
    """Sends a request over a connection of its own and reads nothing."""
    host, _, port = site.frontend.http_address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"prompt": "x", "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    return writer


def error_of(response: httpx.Response) -> Any:
    """The error, if it has OpenAI's shape."""
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


async def test_completion_has_the_shape_of_openai(site: Site) -> None:
    site.scheduler.behaviour = says(*site.tokens(" world"), EOS)
    answer = await complete(site, "hello", model="test-model", max_tokens=20)
    n_prompt, n_answer = len(site.prompt_tokens("hello")), len(site.tokens(" world")) + 1
    assert answer.pop("id").startswith("cmpl-")
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "object": "text_completion",
        "model": "test-model",
        "choices": [{"index": 0, "text": " world", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": n_prompt,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens": n_answer,
            "total_tokens": n_prompt + n_answer,
        },
    }


async def test_chat_has_the_shape_of_openai(site: Site) -> None:
    site.scheduler.behaviour = says(*site.tokens("hi"))
    answer = await chat(site, max_completion_tokens=2)
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hi", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]


async def test_chat_is_written_with_the_template_and_no_second_bos(site: Site) -> None:
    await chat(site, [{"role": "system", "content": "be nice"}, *HELLO], max_tokens=1)
    prompt = list(site.scheduler.requests[0].submission.prompt_token_ids)
    written = "[system] be nice\n[user] hello\n[assistant] "
    assert prompt == [*site.prompt_tokens(""), *site.tokens(written)]


async def test_chat_may_use_all_that_is_left(site: Site) -> None:
    site.scheduler.behaviour = says(EOS)
    await chat(site)
    submission = site.scheduler.requests[0].submission
    assert len(submission.prompt_token_ids) + submission.max_new_tokens == PIPELINE.max_model_len


async def test_sampling_reaches_the_scheduler(site: Site) -> None:
    await complete(
        site,
        temperature=0.5,
        top_k=-1,
        top_p=0.25,
        min_p=0.125,
        presence_penalty=-0.5,
        frequency_penalty=1.5,
        repetition_penalty=1.25,
        seed=7,
        min_tokens=2,
        stop_token_ids=[9],
        n=2,
    )
    first, second = (request.submission.sampling for request in site.scheduler.requests)
    assert (first.temperature, first.top_k, first.top_p, first.min_p) == (0.5, -1, 0.25, 0.125)
    penalties = first.presence_penalty, first.frequency_penalty, first.repetition_penalty
    assert penalties == (-0.5, 1.5, 1.25)
    assert (first.seed, second.seed) == (7, 8)
    assert first.min_tokens == 2
    assert list(first.stop_token_ids) == [EOS, 9]


async def test_negative_seed_is_taken(site: Site) -> None:
    await complete(site, seed=-1, n=2)
    seeds = [request.submission.sampling.seed for request in site.scheduler.requests]
    assert seeds == [-1, 0]


async def test_seeds_of_answers_wrap_around(site: Site) -> None:
    await complete(site, seed=2**63 - 1, n=2)
    seeds = [request.submission.sampling.seed for request in site.scheduler.requests]
    assert seeds == [2**63 - 1, -(2**63)]


async def test_ignored_eos_does_not_stop(site: Site) -> None:
    site.scheduler.behaviour = says(EOS, EOS, *site.tokens("a"))
    answer = await complete(site, ignore_eos=True, max_tokens=3)
    assert answer["choices"][0]["text"] == "a"
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("seed", [7, None], ids=["given", "drawn"])
async def test_every_answer_has_a_seed_of_its_own(site: Site, seed: int | None) -> None:
    await complete(site, ["a", "b"], n=2, seed=seed, max_tokens=1)
    seeds = [request.submission.sampling.seed for request in site.scheduler.requests]
    first = seeds[0] if seed is None else seed
    assert seeds == [first, first + 1, first + 2, first + 3]


async def test_prompts_and_their_answers_are_numbered(site: Site) -> None:
    prompts = [list(site.tokens(text)) for text in ("ab", "cd")]
    answer = await complete(site, prompts, n=2, max_tokens=2)
    choices = [(choice["index"], choice["text"]) for choice in answer["choices"]]
    assert choices == [(0, "ab"), (1, "ab"), (2, "cd"), (3, "cd")]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (4, 8, 12)


async def test_token_ids_are_returned_if_wanted(site: Site) -> None:
    said = (*site.tokens("hi"), EOS)
    site.scheduler.behaviour = says(*said)
    choice = (await complete(site, return_token_ids=True))["choices"][0]
    assert choice["token_ids"] == list(said)
    assert choice["prompt_token_ids"] == list(site.prompt_tokens("hello"))
    answer = await chat(site, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == list(said)
    assert answer["prompt_token_ids"][0] == site.prompt_tokens("")[0]


async def test_echo_puts_the_prompt_before_the_answer(site: Site) -> None:
    site.scheduler.behaviour = says(*site.tokens("!"))
    answer = await complete(site, ["one", "two"], echo=True, max_tokens=1)
    assert [choice["text"] for choice in answer["choices"]] == ["one!", "two!"]
    tokens = await complete(site, list(site.tokens("three")), echo=True, max_tokens=1)
    assert tokens["choices"][0]["text"] == "three!"
    streamed = await events(site, "completions", prompt="one", echo=True, max_tokens=1)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed[:-1]) == "one!"


async def test_stop_string_cuts_the_answer_and_cancels(site: Site) -> None:
    site.scheduler.behaviour = stalls_after(*site.tokens("one STOP two"))
    answer = await complete(site, stop=["STOP"], max_tokens=50)
    assert answer["choices"][0]["text"] == "one "
    assert answer["choices"][0]["finish_reason"] == "stop"
    async with asyncio.timeout(HANG_S):
        await site.scheduler.requests[0].cancelled.wait()


async def test_answer_that_ended_by_a_stop_string_does_not_fail_with_the_pipeline(
    site: Site,
) -> None:
    first_failed = asyncio.Event()

    async def behave(request: Any) -> None:
        request.accept()
        if request.request_id.endswith("-0"):
            request.tokens(*site.tokens("one STOP"))
            request.tokens(*site.tokens(" two"))
            request.complete(scheduler_pb2.COMPLETION_REASON_UNAVAILABLE, "stage 1 was lost")
            first_failed.set()
        else:
            await first_failed.wait()
            await says(*site.tokens("done"), EOS)(request)

    site.scheduler.behaviour = behave
    answer = await complete(site, n=2, stop=["STOP"], max_tokens=50)
    assert [choice["text"] for choice in answer["choices"]] == ["one ", "done"]


async def test_events_are_lines_for_clients_that_know_many_ends_of_lines(site: Site) -> None:
    said = "a\u2028b\u0085c世"
    site.scheduler.behaviour = says(*site.tokens(said), EOS)
    chunks = await events(site, "completions", prompt="x", max_tokens=50)  # splits as Python does
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == said


async def test_completion_stream_has_the_shape_of_openai(site: Site) -> None:
    site.scheduler.behaviour = says(*site.tokens("世a"), EOS)
    chunks = await events(
        site, "completions", prompt="x", stream_options={"include_usage": True}, max_tokens=20
    )
    assert chunks.pop() == "[DONE]"
    usage = chunks.pop()
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(site.tokens("世a")) + 1
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert {chunk["id"] for chunk in chunks} == {usage["id"]}
    assert all(chunk["usage"] is None for chunk in chunks)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["世", "a", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]


async def test_chat_stream_begins_with_the_role(site: Site) -> None:
    site.scheduler.behaviour = says(*site.tokens("ab"))
    chunks = await events(site, "chat/completions", messages=HELLO, max_tokens=2)
    assert chunks.pop() == "[DONE]"
    assert "usage" not in chunks[0]
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": "", "refusal": None},
        {"content": "a"},
        {"content": "b"},
        {},
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_streamed_tokens_are_all_there(site: Site) -> None:
    said = (*site.tokens("世界"), EOS)
    site.scheduler.behaviour = says(*said)
    chunks = await events(site, "completions", prompt="x", return_token_ids=True)
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert [token for choice in choices for token in choice["token_ids"]] == list(said)
    assert choices[0]["prompt_token_ids"] == list(site.prompt_tokens("x"))
    assert all("prompt_token_ids" not in choice for choice in choices[1:])


async def test_models_are_listed(site: Site) -> None:
    listed = (await site.http.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["test-model"]
    assert (await site.http.get("/v1/models/test-model")).json() == listed["data"][0]
    missing = await site.http.get("/v1/models/some/other")
    assert missing.status_code == 404
    assert error_of(missing)["code"] == "model_not_found"


async def test_health_and_readiness(site: Site) -> None:
    assert (await site.http.get("/health")).status_code == 200
    assert (await site.http.get("/ready")).status_code == 200
    serving = await site.http.get("/serving")
    assert (serving.status_code, serving.json()) == (200, {"status": "serving"})


@pytest.mark.parametrize("path", ["/health", "/ready", "/serving", "/v1/models"])
async def test_head_is_answered_without_a_body(site: Site, path: str) -> None:
    response = await site.http.head(path)
    assert response.status_code == 200
    assert response.content == b""


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, ""),
        ({"echo": True}, "x"),
        ({"echo": True, "logprobs": 1}, "x"),
        ({"logprobs": 2}, ""),
        ({"n": 3}, ""),
        ({"stop": ["x"], "temperature": 0}, ""),
        ({"max_tokens": 0.0}, ""),
    ],
    ids=str,
)
async def test_a_completion_may_have_no_tokens(site: Site, body: dict[str, Any], text: str) -> None:
    site.scheduler.behaviour = says(*site.tokens("hello"))
    asked = {"prompt": "x", "max_tokens": 0} | body
    answer = await complete(site, **asked)
    assert [choice["text"] for choice in answer["choices"]] == [text] * body.get("n", 1)
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"]["completion_tokens"] == 0
    *chunks, done = await events(site, "completions", **asked)
    assert done == "[DONE]"
    assert {choice["text"] for chunk in chunks for choice in chunk["choices"]} == {text}


@pytest.mark.parametrize(
    ("text", "more", "n_shown"),
    [
        ("hello", {}, -1),
        ("", {}, -1),
        ("hello", {"top_logprobs": 2}, -1),
        ("a1b2c3", {"max_tokens": 2}, 2),
        ("hello", {"include_stop_str_in_output": True}, None),
        ("hello", {"return_token_ids": True}, -1),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
async def test_log_probabilities_of_a_chat_are_of_its_content(
    site: Site, text: str, more: dict[str, Any], n_shown: int | None, is_streamed: bool
) -> None:
    said = (*site.tokens(text), EOS)
    site.scheduler.behaviour = says(*said)
    body = {"logprobs": True, **more}
    if is_streamed:
        *chunks, _ = await events(site, "chat/completions", messages=HELLO, **body)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
    else:
        choices = (await chat(site, **body))["choices"]
    found = [item for choice in choices for item in (choice["logprobs"] or {}).get("content", ())]
    texts = site.model.service.tokenizer.token_texts
    assert [item["token"] for item in found] == [texts.text(token) for token in said[:n_shown]]


@pytest.mark.parametrize("stops", [(EOS,), (EOS, 7), (7,), (8, 7, EOS)], ids=str)
async def test_a_stop_token_of_the_client_is_no_content_either(
    site: Site, stops: tuple[int, ...]
) -> None:
    site.scheduler.behaviour = says(5, 6, stops[-1])
    answer = await chat(site, logprobs=True, stop_token_ids=[s for s in stops if s != EOS])
    assert len(answer["choices"][0]["logprobs"]["content"]) == 2


@pytest.mark.parametrize("top_p", [0, 0.0, 0.001, 1, 1.0])
async def test_top_p_may_be_zero(site: Site, top_p: float) -> None:
    for asked in (complete(site, top_p=top_p), chat(site, top_p=top_p)):
        assert (await asked)["choices"]
        submitted = site.scheduler.requests[-1].submission.sampling
        assert submitted.top_p == pytest.approx(top_p)


async def test_a_model_has_the_time_at_which_it_was_made(site: Site) -> None:
    listed = (await site.http.get("/v1/models")).json()["data"]
    [name] = [model["id"] for model in listed]
    one = (await site.http.get(f"/v1/models/{name}")).json()
    made_at = site.frontend._settings.models[0].path.stat().st_mtime
    assert {model["created"] for model in (*listed, one)} == {int(made_at)}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [512]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [0] * 128}, "prompt"),
        ({"prompt": "x" * 5000}, "prompt"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 10**30}, "max_tokens"),
        ({"prompt": "x", "temperature": 3}, "temperature"),
        ({"prompt": "x", "temperature": "hot"}, "temperature"),
        ({"prompt": "x", "stop_token_ids": [512]}, "stop_token_ids"),
        ({"prompt": "x", "min_tokens": 17}, "min_tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_wrong_completion_is_refused_by_name(
    site: Site, body: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        response = await site.http.post("/v1/completions", json=body | {"stream": stream})
        assert response.status_code == 400
        assert error_of(response)["param"] == param
        assert error_of(response)["type"] == "invalid_request_error"
    assert not site.scheduler.requests


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "beep"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
        ({"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_wrong_chat_is_refused_by_name(site: Site, body: dict[str, Any], param: str) -> None:
    response = await site.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert error_of(response)["param"] == param


async def test_temperature_that_is_no_number_is_refused(site: Site) -> None:
    response = await site.http.post(
        "/v1/completions", content=b'{"prompt": "x", "temperature": NaN}'
    )
    assert response.status_code == 400
    assert error_of(response)["param"] == "temperature"


async def test_unknown_model_is_refused(site: Site) -> None:
    response = await post(site, "completions", prompt="x", model="gpt-5")
    assert response.status_code == 404
    assert error_of(response)["param"] == "model"
    assert error_of(response)["code"] == "model_not_found"


@pytest.mark.parametrize("content", [b"{", b'{"prompt": "\xff"}', b""], ids=str)
async def test_body_that_is_no_json_is_refused(site: Site, content: bytes) -> None:
    response = await site.http.post("/v1/completions", content=content)
    assert response.status_code == 400
    assert error_of(response)["param"] == "body"


async def large_chunks() -> AsyncIterator[bytes]:
    for _ in range(50):
        yield b" " * 2**20


@pytest.mark.parametrize("is_declared", [True, False], ids=["declared", "chunked"])
async def test_large_body_is_refused(site: Site, is_declared: bool) -> None:
    content = b" " * 50 * 2**20 if is_declared else large_chunks()
    response = await site.http.post("/v1/completions", content=content)
    assert response.status_code == 413
    assert error_of(response)["param"] == "body"
    assert (await site.http.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("POST", "/v1/completions/", 404), ("GET", "/v1/completions", 405)],
    ids=["path", "slash", "method"],
)
async def test_wrong_path_or_method_has_the_same_shape(
    site: Site, method: str, path: str, status: int
) -> None:
    response = await site.http.request(method, path)
    assert response.status_code == status
    assert path in error_of(response)["message"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_full_pool_says_when_to_try_again(site: Site, stream: bool) -> None:
    site.scheduler.behaviour = rejects(
        scheduler_pb2.REJECTION_REASON_POOL_FULL, "full", retry_after_s=2.5
    )
    response = await post(site, "completions", prompt="x", stream=stream)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert error_of(response)["code"] == "rate_limit_exceeded"


async def test_pipeline_lost_before_the_first_token_is_503(site: Site) -> None:
    site.scheduler.behaviour = loses_pipeline_after()
    response = await post(site, "completions", prompt="x")
    assert response.status_code == 503
    assert error_of(response)["message"] == "stage 1 was lost; try again"


async def test_pipeline_lost_later_ends_the_stream_with_an_error(site: Site) -> None:
    site.scheduler.behaviour = loses_pipeline_after(*site.tokens("ab"))
    chunks = await events(site, "completions", prompt="x")
    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == ["a", "b"]
    assert chunks[-1]["error"]["message"] == "stage 1 was lost; try again"


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (scheduler_pb2.REJECTION_REASON_INVALID, 400),
        (scheduler_pb2.REJECTION_REASON_UNAVAILABLE, 503),
        (scheduler_pb2.REJECTION_REASON_UNSPECIFIED, 503),
    ],
    ids=["invalid", "unavailable", "unspecified"],
)
async def test_rejections_become_errors(
    site: Site, reason: scheduler_pb2.RejectionReason, status: int
) -> None:
    site.scheduler.behaviour = rejects(reason, "no")
    response = await post(site, "completions", prompt="x")
    assert response.status_code == status


async def test_field_that_the_scheduler_refuses_is_named(site: Site) -> None:
    invalid = scheduler_pb2.REJECTION_REASON_INVALID
    site.scheduler.behaviour = rejects(invalid, "is too much", field="max_tokens")
    error = error_of(await post(site, "completions", prompt="x"))
    assert (error["param"], error["message"]) == ("max_tokens", "max_tokens: is too much")


async def test_one_refused_answer_cancels_the_others(site: Site) -> None:
    async def refuse_the_second(request: Any) -> None:
        if request.request_id.endswith("-1"):
            request.reject(scheduler_pb2.REJECTION_REASON_POOL_FULL)
        else:
            request.accept()

    site.scheduler.behaviour = refuse_the_second
    response = await post(site, "completions", prompt="x", n=2)
    assert response.status_code == 429
    async with asyncio.timeout(HANG_S):
        await site.scheduler.requests[0].cancelled.wait()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("n_tokens", [0, 2], ids=["before-tokens", "after-tokens"])
async def test_client_that_goes_away_cancels(site: Site, stream: bool, n_tokens: int) -> None:
    site.scheduler.behaviour = stalls_after(*site.tokens("ab")[:n_tokens])
    writer = await send_completion(site, stream=stream)
    async with asyncio.timeout(HANG_S):
        (request,) = await site.scheduler.wait_requests()
        assert not request.ended.is_set()
        writer.close()
        await writer.wait_closed()
        await request.cancelled.wait()


async def test_client_that_reads_nothing_and_goes_away_cancels(site: Site) -> None:
    site.scheduler.behaviour = keeps_quiet
    writer = await send_completion(site, stream=True)
    async with asyncio.timeout(HANG_S):
        (request,) = await site.scheduler.wait_requests()
        for _ in range(200):
            request.tokens(*site.tokens("a") * 100)
        writer.transport.abort()
        await request.cancelled.wait()


@pytest.mark.thorough
async def test_the_official_client_works(site: Site) -> None:
    said = site.tokens("hi 世")

    def talk() -> dict[str, Any]:
        with openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as client:
            model = client.models.list().data[0].id
            whole = client.completions.create(model=model, prompt="x")
            chunks = client.completions.create(model=model, prompt="x", stream=True)
            streamed = "".join(chunk.choices[0].text for chunk in chunks)
            reply = client.chat.completions.create(model=model, messages=HELLO)
            deltas = client.chat.completions.create(
                model=model,
                messages=HELLO,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunked = list(deltas)
            return {
                "whole": whole.choices[0].text,
                "streamed": streamed,
                "reply": reply.choices[0].message.content,
                "chunked": "".join(c.choices[0].delta.content or "" for c in chunked if c.choices),
                "usage": (reply.usage, chunked[-1].usage),
            }

    site.scheduler.behaviour = says(*said, EOS)
    got = await asyncio.to_thread(talk)
    assert {got[key] for key in ("whole", "streamed", "reply", "chunked")} == {"hi 世"}
    assert got["usage"][0] == got["usage"][1]


async def test_the_official_client_understands_errors(site: Site) -> None:
    def fail(**body: Any) -> openai.APIStatusError:
        with (
            openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as client,
            pytest.raises(openai.APIStatusError) as caught,
        ):
            client.completions.create(**{"model": "test-model", "prompt": "x"} | body)
        return caught.value

    wrong = await asyncio.to_thread(fail, max_tokens=-1)
    assert isinstance(wrong, openai.BadRequestError)
    assert wrong.param == "max_tokens"
    site.scheduler.behaviour = rejects(scheduler_pb2.REJECTION_REASON_POOL_FULL)
    assert isinstance(await asyncio.to_thread(fail), openai.RateLimitError)


async def test_the_official_client_sees_an_error_in_mid_stream(site: Site) -> None:
    site.scheduler.behaviour = loses_pipeline_after(*site.tokens("ab"))

    def listen() -> list[str]:
        with openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as client:
            chunks = client.completions.create(model="test-model", prompt="x", stream=True)
            texts = [next(chunks).choices[0].text, next(chunks).choices[0].text]
            with pytest.raises(openai.APIError, match="stage 1 was lost"):
                next(chunks)
        return texts

    assert await asyncio.to_thread(listen) == ["a", "b"]
