"""Log-probabilities in both protocols, against literal versions of their shapes."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
from orcinus.v1 import inference_pb2, scheduler_pb2

from services.common.sampling import MAX_PROMPT_LOGPROBS
from services.frontend.request.logprobs import MANY_LOGPROBS
from tests.fake_scheduler import (
    PIPELINE,
    FakeRequest,
    FakeScheduler,
    logprob_of,
    rank_of,
    says,
    tops_of,
)
from tests.frontend.conftest import Site, running
from tests.generation_options import generation_options

pytestmark = pytest.mark.asyncio(loop_scope="module")

EOS = PIPELINE.eos_token_ids[0]
MESSAGES = [{"role": "user", "content": "hello"}]


async def post(site: Site, path: str, **body: Any) -> Any:
    response = await site.http.post(f"/v1/{path}", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def complete(site: Site, prompt: Any, **body: Any) -> Any:
    [choice] = (await post(site, "completions", prompt=prompt, **body))["choices"]
    return choice


async def chunks(site: Site, path: str, **body: Any) -> list[Any]:
    """The choices of a stream's chunks."""
    response = await site.http.post(f"/v1/{path}", json={"stream": True, **body})
    assert response.status_code == 200, response.text
    data = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(item)["choices"][0] for item in data]


async def error_of(site: Site, path: str, **body: Any) -> str:
    """The name of the field that is refused."""
    response = await site.http.post(f"/v1/{path}", json=body)
    assert response.status_code == 400, response.text
    return str(response.json()["error"]["param"])


def bytes_of(site: Site, token_id: int) -> bytes:
    """The bytes of a token, as byte-level tokens spell them."""
    return site.tokenizer.token_texts.to_bytes(token_id)


def text_of(site: Site, token_id: int) -> str:
    return bytes_of(site, token_id).decode(errors="replace")


def alternatives(site: Site, token_id: int, n_top: int) -> dict[str, float]:
    """The alternatives of a token by their texts, and the token itself."""
    found = [*tops_of(token_id, n_top), (token_id, logprob_of(token_id))]
    top: dict[str, float] = {}
    for other, value in found:
        top.setdefault(text_of(site, other), value)
    return top


def literal(site: Site, token_ids: Sequence[int], n_top: int) -> dict[str, list[Any]]:
    """What a completion says of tokens, without their places in the text."""
    return {
        "token_logprobs": [logprob_of(token_id) for token_id in token_ids],
        "tokens": [text_of(site, token_id) for token_id in token_ids],
        "top_logprobs": [alternatives(site, token_id, n_top) for token_id in token_ids],
    }


@pytest.mark.parametrize("n_top", [0, 1, 5, 20])
async def test_completion_has_the_shape_of_openai(site: Site, n_top: int) -> None:
    answer = (*site.tokens(" wörld 🐋!"), EOS)
    site.scheduler.behaviour = says(*answer)
    choice = await complete(site, "hello", max_tokens=30, logprobs=n_top)
    logprobs = choice["logprobs"]
    offsets = logprobs.pop("text_offset")
    assert logprobs == literal(site, answer, n_top)
    assert choice["text"] == " wörld 🐋!"
    expected, written = [], b""
    for token_id in answer:
        expected.append(len(written.decode(errors="ignore")))
        written += bytes_of(site, token_id)
    assert offsets == expected


async def test_tokens_of_equal_texts_are_told_apart_by_their_numbers(site: Site) -> None:
    """The texts of parts of characters are equal, so that an object keyed by text has fewer than
    20."""
    answer = (*site.tokens("世🐋"), EOS)
    site.scheduler.behaviour = says(*answer)
    body: dict[str, Any] = {"max_tokens": 30, "logprobs": 20, "return_tokens_as_token_ids": True}
    choice = await complete(site, "hello", **body)
    columns = choice["logprobs"]
    assert columns["tokens"] == [f"token_id:{token_id}" for token_id in answer]
    for token_id, top in zip(answer, columns["top_logprobs"], strict=True):
        expected = dict([*tops_of(token_id, 20), (token_id, logprob_of(token_id))])
        assert top == {f"token_id:{other}": value for other, value in expected.items()}
        assert len(top) >= 20
    assert choice["text"] == "世🐋"
    echoed = await complete(site, "a", echo=True, **body)
    assert echoed["logprobs"]["tokens"][0].startswith("token_id:")
    streamed = await chunks(site, "completions", prompt="hello", **body)
    parts = [chunk["logprobs"]["tokens"] for chunk in streamed if chunk["logprobs"]]
    assert [name for part in parts for name in part] == columns["tokens"]


async def test_numbers_in_chats_keep_the_bytes_of_texts(site: Site) -> None:
    answer = (*site.tokens("世🐋"), EOS)
    site.scheduler.behaviour = says(*answer)
    body: dict[str, Any] = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20}
    body["return_tokens_as_token_ids"] = True
    [choice] = (await post(site, "chat/completions", **body))["choices"]
    for token_id, said in zip(answer[:-1], choice["logprobs"]["content"], strict=True):
        assert said["token"] == f"token_id:{token_id}"
        assert said["bytes"] == list(bytes_of(site, token_id))
        tops = [(each["token"], each["logprob"]) for each in said["top_logprobs"]]
        assert tops == [(f"token_id:{other}", value) for other, value in tops_of(token_id, 20)]
    del body["return_tokens_as_token_ids"]
    [plain] = (await post(site, "chat/completions", **body))["choices"]
    assert plain["logprobs"]["content"][0]["token"] == text_of(site, answer[0])


@pytest.mark.parametrize("n_top", [None, 0, 3])
async def test_chat_has_the_shape_of_openai(site: Site, n_top: int | None) -> None:
    answer = (*site.tokens("世🐋"), EOS)
    site.scheduler.behaviour = says(*answer)
    body: dict[str, Any] = {"messages": MESSAGES, "logprobs": True, "top_logprobs": n_top}
    [choice] = (await post(site, "chat/completions", **body))["choices"]
    assert choice["message"]["content"] == "世🐋"
    assert choice["logprobs"] == {
        "content": [
            {
                "token": text_of(site, token_id),
                "logprob": logprob_of(token_id),
                "bytes": list(bytes_of(site, token_id)),
                "top_logprobs": [
                    {
                        "token": text_of(site, other),
                        "logprob": value,
                        "bytes": list(bytes_of(site, other)),
                    }
                    for other, value in tops_of(token_id, n_top or 0)
                ],
            }
            for token_id in answer[:-1]  # the last ends the answer, and is not part of its content
        ],
        "refusal": None,
    }
    written = b"".join(bytes(item["bytes"]) for item in choice["logprobs"]["content"])
    assert written == "世🐋".encode()


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("is_text", [True, False], ids=["text", "tokens"])
async def test_echo_has_the_prompts_log_probabilities(
    site: Site, max_tokens: int, is_text: bool
) -> None:
    text = "hello wörld"
    prompt = site.prompt_tokens(text)
    site.scheduler.behaviour = says(*site.tokens(" abababab"))
    body = {"max_tokens": max_tokens, "echo": True, "logprobs": 1, "return_token_ids": True}
    answer = await post(site, "completions", prompt=text if is_text else list(prompt[1:]), **body)
    [choice] = answer["choices"]
    sequence = [*prompt[not is_text :], *choice["token_ids"]]
    expected = literal(site, sequence, 1)
    expected["token_logprobs"][0] = expected["top_logprobs"][0] = None
    logprobs = choice["logprobs"]
    offsets = logprobs.pop("text_offset")
    assert logprobs == expected
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] == max_tokens
    assert choice["finish_reason"] == "length"
    assert choice["text"].startswith(text)
    pieces = [choice["text"][i:j] for i, j in zip(offsets, [*offsets[1:], None], strict=True)]
    assert "".join(pieces) == choice["text"]


async def test_special_tokens_that_a_prompt_spells_have_places_in_its_text(
    site: Site,
) -> None:
    choice = await complete(site, "hello<|eos|>world", max_tokens=0, echo=True, logprobs=0)
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][:3] == ["<|bos|>", "hello", "<|eos|>"]
    assert logprobs["text_offset"][:4] == [0, 0, 5, 12]


@pytest.mark.parametrize("text", ["b", "s", "bos", "|>", "<|"])
async def test_places_in_a_prompt_that_its_first_token_spells(site: Site, text: str) -> None:
    for front in (True, False):
        body = {"max_tokens": 0, "echo": True, "logprobs": 0, "add_special_tokens": front}
        logprobs = (await complete(site, text, **body))["logprobs"]
        *pieces, last = logprobs["tokens"][front:]
        assert "".join([*pieces, last]) == text
        expected = [len("".join(pieces[:end])) for end in range(len(pieces) + 1)]
        assert logprobs["text_offset"] == [0] * front + expected


async def test_many_prompts_of_an_evaluation_each_have_their_own(site: Site) -> None:
    prompts = [list(site.tokens(text)) for text in ("hello world", "a", "the quick brown fox")]
    site.scheduler.behaviour = says(5)
    answer = await post(
        site, "completions", prompt=prompts, max_tokens=1, echo=True, logprobs=1, temperature=0
    )
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        expected = [None, *map(logprob_of, [*prompt[1:], 5])]
        assert choice["logprobs"]["token_logprobs"] == expected


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_prompt_logprobs_have_the_shape_of_vllm(site: Site, path: str) -> None:
    site.scheduler.behaviour = says(5)
    body = {"messages": MESSAGES} if "chat" in path else {"prompt": "hello"}
    answer = await post(site, path, **body, max_tokens=1, prompt_logprobs=2)
    prompt = site.scheduler.requests[0].submission.prompt_token_ids
    assert (answer if "chat" in path else answer["choices"][0])["prompt_logprobs"] == [
        None,
        *(
            {
                str(other): {"logprob": value, "rank": rank, "decoded_token": text_of(site, other)}
                for other, value, rank in [
                    *((o, v, r) for r, (o, v) in enumerate(tops_of(token_id, 2), 1)),
                    (token_id, logprob_of(token_id), rank_of(token_id)),
                ]
            }
            for token_id in prompt[1:]
        ),
    ]
    assert answer["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("stop", [[], ["lo"], [" w", "o"], ["🐋"]], ids=str)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_streams_have_what_whole_answers_have(site: Site, path: str, stop: list[str]) -> None:
    site.scheduler.behaviour = says(*site.tokens("hello wörld 🐋!"), EOS)
    is_chat = "chat" in path
    body: dict[str, Any] = {"max_tokens": 40, "stop": stop, "return_token_ids": True}
    body |= (
        {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
        if is_chat
        else {"prompt": "hello", "logprobs": 2, "echo": True}
    )
    [whole] = (await post(site, path, **body))["choices"]
    found = [c["logprobs"] for c in await chunks(site, path, **body) if c["logprobs"]]
    for name, column in whole["logprobs"].items():
        if column is not None:
            assert [item for logprobs in found for item in logprobs[name]] == column
    n_shown = len([token for token in whole["token_ids"] if not is_chat or token != EOS])
    n_prompt = 0 if is_chat else len(site.prompt_tokens("hello"))
    name = "content" if is_chat else "tokens"
    assert len(whole["logprobs"][name]) == n_prompt + n_shown


@pytest.mark.parametrize("is_included", [False, True])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("stop", [[" w"], ["lo"], ["ö", "zz"], ["llo wx", "🐋"], ["o wörld 🐋?"]])
async def test_log_probabilities_are_those_of_the_text(
    site: Site, stop: list[str], path: str, is_included: bool
) -> None:
    """A stop string that is cut off has none, and streams have as many as whole answers."""
    tokens = (*site.tokens("hello wörld 🐋!"), EOS)
    site.scheduler.behaviour = says(*tokens)
    is_chat = "chat" in path
    body: dict[str, Any] = {"max_tokens": 40, "stop": stop, "prompt": "x", "logprobs": 1}
    if is_chat:
        body |= {"messages": MESSAGES, "logprobs": True}
        del body["prompt"]
    body["include_stop_str_in_output"] = is_included
    [whole] = (await post(site, path, **body))["choices"]
    name = "content" if is_chat else "tokens"
    found = whole["logprobs"][name]
    parts = [c["logprobs"] for c in await chunks(site, path, **body) if c["logprobs"]]
    assert [item for part in parts for item in part[name]] == found
    text = (whole["message"]["content"] if is_chat else whole["text"]).encode()
    texts = [bytes_of(site, token_id) for token_id in tokens[: len(found)]]
    assert b"".join(texts).startswith(text)
    if stop != ["o wörld 🐋?"]:  # the others end the answer
        assert len(b"".join(texts[:-1])) < len(text)
    else:
        assert len(found) == len(tokens) - (is_chat and not is_included)


async def test_pieces_without_text_have_log_probabilities(site: Site) -> None:
    whale = site.tokens("🐋")
    site.scheduler.behaviour = says(*whale)
    found = await chunks(site, "completions", prompt="x", max_tokens=len(whale), logprobs=0)
    logprobs = [choice["logprobs"] for choice in found if choice["logprobs"]]
    values = [value for item in logprobs for value in item["token_logprobs"]]
    assert values == [logprob_of(token_id) for token_id in whale]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"logprobs": -1}, "logprobs"),
        ("completions", {"prompt_logprobs": 21}, "prompt_logprobs"),
        ("completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("completions", {"n": 3, "best_of": 2}, "best_of"),
        ("completions", {"best_of": 129}, "best_of"),
        ("completions", {"best_of": 2, "stream": True}, "best_of"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"logprobs": True, "max_tokens": 0}, "max_tokens"),
    ],
    ids=str,
)
async def test_what_is_not_possible_is_refused_by_name(
    site: Site, path: str, body: dict[str, Any], field: str
) -> None:
    prompt = {"messages": MESSAGES} if "chat" in path else {"prompt": "x"}
    assert await error_of(site, path, **prompt, **body) == field


async def test_log_probabilities_of_a_prompt_are_bounded(tmp_path: Path) -> None:
    n_tokens = MAX_PROMPT_LOGPROBS // 21 + 1
    pipeline = scheduler_pb2.PipelineDescription()
    pipeline.CopyFrom(PIPELINE)
    pipeline.max_model_len = 2 * n_tokens
    async with running(tmp_path, FakeScheduler(says(5), pipeline=pipeline)) as site:
        body = {"max_tokens": 0, "echo": True, "logprobs": 20}
        assert await error_of(site, "completions", prompt=[5] * n_tokens, **body) == "logprobs"


async def test_log_probabilities_that_are_written_in_a_thread_are_all_there(tmp_path: Path) -> None:
    n_tokens = MANY_LOGPROBS // 21 + 10
    pipeline = scheduler_pb2.PipelineDescription()
    pipeline.CopyFrom(PIPELINE)
    pipeline.max_model_len = 2 * n_tokens
    async with running(tmp_path, FakeScheduler(says(5), pipeline=pipeline)) as site:
        body = {"prompt": [5] * n_tokens, "max_tokens": 1, "echo": True, "logprobs": 20}
        whole = await complete(site, **body)
        assert whole["logprobs"]["tokens"] == (n_tokens + 1) * [text_of(site, 5)]
        streamed = [choice["logprobs"] for choice in await chunks(site, "completions", **body)]
        for name, column in whole["logprobs"].items():
            assert [item for logprobs in streamed if logprobs for item in logprobs[name]] == column
        request = inference_pb2.GenerateRequest(
            prompt=inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=[5] * n_tokens)),
            options=generation_options(max_tokens=1, prompt_logprobs=20),
        )
        [choice] = (await site.inference.generate(request)).choices
        check_messages(site, choice.prompt_logprobs, [5] * (n_tokens - 1), 20)


async def test_answers_with_log_probabilities_take_memory(tmp_path: Path) -> None:
    async with running(tmp_path, max_in_flight_bytes=100_000) as site:

        async def behave(request: FakeRequest) -> None:
            request.accept()

        site.scheduler.behaviour = behave
        body = {"prompt": [5] * 100, "max_tokens": 1, "echo": True}
        small = asyncio.ensure_future(site.http.post("/v1/completions", json=body))
        await site.scheduler.wait_requests()
        refused = await site.http.post("/v1/completions", json={**body, "logprobs": 20})
        assert refused.status_code == 429
        small.cancel()


@pytest.mark.parametrize(("length", "status"), [(20, 200), (8000, 429)])
async def test_each_answer_that_counts_for_nothing_takes_the_memory_of_its_grammar(
    tmp_path: Path, length: int, status: int
) -> None:
    async with running(tmp_path, max_in_flight_bytes=200_000) as site:

        async def behave(request: FakeRequest) -> None:
            request.accept()

        site.scheduler.behaviour = behave
        body = {"prompt": "x", "max_tokens": 1}
        waiting = asyncio.ensure_future(site.http.post("/v1/completions", json=body))
        await site.scheduler.wait_requests()
        site.scheduler.behaviour = says(5)
        constrained = {**body, "n": 1, "guided_regex": length * "x"}
        assert (await site.http.post("/v1/completions", json=constrained)).status_code == 200
        constrained["best_of"] = 30
        assert (await site.http.post("/v1/completions", json=constrained)).status_code == status
        waiting.cancel()


async def test_best_of_gives_the_answers_with_the_highest_mean(site: Site) -> None:
    # The first token of each answer tells them apart; the last one's sum is low and its mean high.
    answers = [[7, 8], [13, 13], [14, 14], [8, 8, 7, 7, 7, 7]]

    async def behave(request: FakeRequest) -> None:
        await says(*answers[int(request.request_id.rpartition("-")[2]) % 4])(request)

    site.scheduler.behaviour = behave
    body = {"max_tokens": 9, "best_of": 4, "return_token_ids": True}
    answer = await post(site, "completions", prompt=["x", "y"], n=3, **body)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["token_ids"] for choice in answer["choices"]] == 2 * [
        answers[2],
        answers[3],
        answers[0],
    ]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 2 * sum(map(len, answers))
    best = await complete(site, "x", logprobs=0, **body)
    assert best["logprobs"]["token_logprobs"] == [logprob_of(14)] * 2


def check_messages(site: Site, found: Sequence[Any], token_ids: Sequence[int], n_top: int) -> None:
    """Checks the log-probabilities of tokens in a choice of the gRPC API."""

    def message(token_id: int, value: float, rank: int) -> inference_pb2.TokenLogprob:
        return inference_pb2.TokenLogprob(
            token_id=token_id,
            logprob=value,
            rank=rank,
            text=text_of(site, token_id),
            bytes=bytes_of(site, token_id),
        )

    assert len(found) == len(token_ids)
    for got, token_id in zip(found, token_ids, strict=True):
        expected = message(token_id, logprob_of(token_id), rank_of(token_id))
        for rank, (other, value) in enumerate(tops_of(token_id, n_top), start=1):
            expected.top.append(message(other, value, rank))
        assert got == expected


async def test_grpc_has_all_of_it(site: Site) -> None:
    answer = (*site.tokens("a🐋"), EOS)
    site.scheduler.behaviour = says(*answer)
    request = inference_pb2.GenerateRequest(
        prompt=inference_pb2.Prompt(text="hello"),
        options=generation_options(max_tokens=20, logprobs=2, prompt_logprobs=1),
    )
    [choice] = (await site.inference.generate(request)).choices
    check_messages(site, choice.logprobs, answer, 2)
    check_messages(site, choice.prompt_logprobs, site.prompt_tokens("hello")[1:], 1)
    streamed = inference_pb2.GenerateStreamRequest(
        prompt=request.prompt, options=generation_options(max_tokens=20, logprobs=2)
    )
    pieces = [message.choice async for message in site.inference.stream(streamed)]
    found = [logprob for piece in pieces for logprob in piece.logprobs]
    assert found == list(choice.logprobs)


@pytest.mark.parametrize("option", ["prompt_logprobs", "best_of"])
async def test_grpc_streams_refuse_what_needs_whole_answers(site: Site, option: str) -> None:
    request = inference_pb2.GenerateStreamRequest(
        prompt=inference_pb2.Prompt(text="x"), options=generation_options(**{option: 2})
    )
    with pytest.raises(grpc.aio.AioRpcError, match=option):
        async for _ in site.inference.stream(request):
            pass


async def test_nobody_asks_for_what_no_client_wants(site: Site) -> None:
    await complete(site, "x", max_tokens=1)
    await complete(site, "x", max_tokens=1, echo=True)
    for request in site.scheduler.requests:
        assert not request.submission.HasField("n_logprobs")
        assert not request.submission.HasField("n_prompt_logprobs")


CALL = '<tool_call>\n{"name": "find", "arguments": {"a": "hi"}}\n</tool_call>'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reading_site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """A frontend that reads calls and reasoning."""
    directory = tmp_path_factory.mktemp("checkpoint")
    async with running(directory, tool_parser="hermes", reasoning_parser="think") as site:
        yield site


@pytest.mark.parametrize(
    ("said", "content"),
    [
        ("<think>\nhi</think>\n\nhi hi", "hi hi"),
        (f"hi <b>{CALL}", "hi <b>"),
        (f"<think>hi</think>{CALL}", ""),
        ("<think>hi hi", ""),
        ("hi <tool", "hi <tool"),
    ],
)
async def test_log_probabilities_are_those_of_the_content(
    reading_site: Site, said: str, content: str
) -> None:
    """Marks, reasoning and calls have none, though the same words may stand there."""
    site = reading_site
    site.scheduler.behaviour = says(*site.tokens(said), EOS)
    tools = [{"type": "function", "function": {"name": "find"}}]
    body: dict[str, Any] = {"messages": MESSAGES, "tools": tools, "logprobs": True}
    [whole] = (await post(site, "chat/completions", **body))["choices"]
    assert (whole["message"]["content"] or "") == content
    assert "".join(one["token"] for one in whole["logprobs"]["content"]) == content
    parts = [each["logprobs"] for each in await chunks(site, "chat/completions", **body)]
    assert [one for part in parts if part for one in part["content"]] == whole["logprobs"][
        "content"
    ]
    conversation = inference_pb2.Conversation(
        messages=[inference_pb2.ChatMessage(role="user", content="hello")],
        tools=[inference_pb2.Tool(name="find")],
    )
    call = inference_pb2.GenerateRequest(
        prompt=inference_pb2.Prompt(conversation=conversation),
        options=generation_options(logprobs=0),
    )
    [choice] = (await site.inference.generate(call)).choices
    assert (choice.text, "".join(one.text for one in choice.logprobs)) == (content, content)
