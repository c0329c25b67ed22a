"""Models by their names, tokens of texts and texts of tokens, the version, the page of the API."""

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
from orcinus.v1 import inference_pb2

from services.common.version import VERSION
from services.frontend.http.bodies.unknown_fields import HEADER
from tests.fake_scheduler import PIPELINE, says
from tests.frontend import checkpoints
from tests.frontend.conftest import Site, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

EOS = PIPELINE.eos_token_ids[0]
HELLO = [{"role": "user", "content": "hello"}]
NAMES = ("shown", "org/alias")


async def post(site: Site, path: str, **body: Any) -> Any:
    response = await site.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def refused(site: Site, path: str, **body: Any) -> tuple[int, str]:
    response = await site.http.post(path, json=body)
    return response.status_code, response.json()["error"]["param"]


async def test_text_becomes_tokens_and_text_again(site: Site) -> None:
    made = await post(site, "/tokenize", prompt="hello wörld", model="test-model")
    tokens = list(site.prompt_tokens("hello wörld"))
    assert made == {
        "count": len(tokens),
        "max_model_len": PIPELINE.max_model_len,
        "tokens": tokens,
        "token_strs": None,
    }
    whole = await post(site, "/detokenize", tokens=tokens)
    assert whole == {"prompt": f"{checkpoints.BOS}hello wörld"}


async def test_special_tokens_are_left_out_if_they_are_not_wanted(site: Site) -> None:
    made = await post(
        site, "/tokenize", prompt="hello", add_special_tokens=False, return_token_strs=True
    )
    assert made["tokens"] == list(site.tokens("hello"))
    assert "".join(made["token_strs"]) == "hello"


async def test_a_conversation_becomes_the_tokens_of_its_answer(site: Site) -> None:
    made = await post(site, "/tokenize", messages=HELLO, temperature=0, stream=True)
    answer = await post(
        site, "/v1/chat/completions", messages=HELLO, return_token_ids=True, max_tokens=1
    )
    assert made["tokens"] == answer["prompt_token_ids"]
    assert made["count"] == answer["usage"]["prompt_tokens"]


async def test_wrong_tokens_and_texts_are_refused_by_name(site: Site) -> None:
    length = PIPELINE.max_model_len
    assert await refused(site, "/tokenize") == (400, "prompt")
    assert await refused(site, "/tokenize", prompt="x", messages=HELLO) == (400, "prompt")
    assert await refused(site, "/tokenize", prompt="x" * 5000) == (400, "prompt")
    assert await refused(site, "/tokenize", prompt="x", model="other") == (404, "model")
    assert await refused(site, "/tokenize", prompt="x", n=0) == (400, "n")
    wrong = {"prompt": "x", "bad_token_ids": [-1]}
    assert await refused(site, "/tokenize", **wrong) == (400, "bad_token_ids")
    assert await refused(site, "/detokenize") == (400, "tokens")
    assert await refused(site, "/detokenize", tokens=[PIPELINE.vocab_size]) == (400, "tokens")
    assert await refused(site, "/detokenize", tokens=[-1]) == (400, "tokens")
    assert await refused(site, "/detokenize", tokens=[5] * (length + 1)) == (400, "tokens")
    assert await refused(site, "/detokenize", tokens=[5], model="other") == (404, "model")
    assert (await post(site, "/detokenize", tokens=[5] * length))["prompt"]
    assert (await post(site, "/detokenize", tokens=[]))["prompt"] == ""
    assert not site.scheduler.requests


async def test_the_time_that_a_call_may_take_holds_there_too(site: Site) -> None:
    timeout = "x-request-timeout"
    for path, body in (
        ("/tokenize", {"prompt": "x" * 40}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/messages/count_tokens", {"messages": HELLO}),
    ):
        answers = {
            value: await site.http.post(path, json=body, headers={timeout: value})
            for value in ("nonsense", "0.000001", "60")
        }
        assert [answer.status_code for answer in answers.values()] == [400, 408, 200]
        assert timeout in answers["nonsense"].text


async def test_ignored_fields_are_named_there_too(site: Site) -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
        response = await site.http.post(path, json=body | {"odd": 1})
        assert response.headers[HEADER] == "odd"


async def test_the_version_is_told(site: Site) -> None:
    assert (await site.http.get("/version")).json() == {"version": VERSION}


async def test_the_page_of_the_api_loads_nothing(site: Site) -> None:
    response = await site.http.get("/docs")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    [style] = re.findall("<style>(.*)</style>", response.text)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = response.headers["content-security-policy"]
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}';")
    assert not re.search(
        "<script|src=|http[s]?://|@import|url\\(| style=| on[a-z]+=", response.text
    )
    for name in ("/v1/chat/completions", "logit_bias", "repetition_penalty", "ChatBody"):
        assert name in response.text
    targets = set(re.findall('href="#([^"]*)"', response.text))
    assert targets <= set(re.findall('id="([^"]*)"', response.text))


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/models/test-model", {"GET", "HEAD"}),
        ("/docs", {"GET", "HEAD"}),
        ("/tokenize", {"POST"}),
    ],
    ids=["model", "page", "tokens"],
)
async def test_options_tell_the_methods_of_a_path(site: Site, path: str, methods: set[str]) -> None:
    response = await site.http.options(path)
    assert (response.status_code, response.content) == (204, b"")
    assert set(re.split(", *", response.headers["allow"])) == methods
    if "HEAD" in methods:
        head = await site.http.head(path)
        assert (head.status_code, head.content) == (200, b"")


async def test_the_model_has_the_names_that_it_is_given(tmp_path: Path) -> None:
    async with running(tmp_path, served_model_name=NAMES) as site:
        site.scheduler.behaviour = says(*site.tokens("ok"), EOS)
        listed = (await site.http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == list(NAMES)
        for name in NAMES:
            assert (await site.http.get(f"/v1/models/{name}")).json()["id"] == name
            answer = await post(site, "/v1/completions", prompt="x", model=name)
            assert answer["model"] == NAMES[0]
            prompt = inference_pb2.Prompt(text="x")
            request = inference_pb2.GenerateRequest(model=name, prompt=prompt)
            assert (await site.inference.generate(request)).model == NAMES[0]
        assert (await site.inference.describe_model()).model == NAMES[0]
        own = PIPELINE.model
        assert await refused(site, "/v1/completions", prompt="x", model=own) == (404, "model")
        assert (await site.http.get(f"/v1/models/{own}")).status_code == 404


async def test_chunks_count_the_usage_if_that_is_wanted(site: Site) -> None:
    site.scheduler.behaviour = says(*site.tokens("abc"), EOS)
    prompts: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "x"},
        "/v1/chat/completions": {"messages": HELLO},
    }
    for path, prompt in prompts.items():
        wanted = {"include_usage": True, "continuous_usage_stats": True}
        body = prompt | {"stream": True, "max_tokens": 9, "stream_options": wanted}
        text = (await site.http.post(path, json=body)).text
        counts = [int(count) for count in re.findall('"completion_tokens":([0-9]+)', text)]
        assert text.count("data: {") == len(counts), "each chunk has it"
        assert counts == sorted(counts)
        assert set(counts) == {1, 2, 3, 4}
        assert '"usage":null' not in text
        only = {**body, "stream_options": {"continuous_usage_stats": True}}
        assert '"usage"' not in (await site.http.post(path, json=only)).text


async def test_special_tokens_show_if_they_are_wanted(site: Site) -> None:
    bos = site.prompt_tokens("")[0]
    site.scheduler.behaviour = says(*site.tokens("a"), bos, *site.tokens("b"), EOS)
    body = {"prompt": "x", "max_tokens": 9}
    texts = []
    for more in (
        {},
        {"skip_special_tokens": False},
        {"skip_special_tokens": False, "include_stop_str_in_output": True},
    ):
        answer = await post(site, "/v1/completions", **body, **more)
        texts.append(answer["choices"][0]["text"])
    shown = f"a{checkpoints.BOS}b"
    eos = site.tokenizer.with_special_tokens.to_text([EOS])
    assert texts == ["ab", shown, shown + eos]


async def test_stop_strings_show_if_they_are_wanted(site: Site) -> None:
    site.scheduler.behaviour = says(*site.tokens("one STOP two"), EOS)
    body = {"prompt": "x", "max_tokens": 50, "stop": ["STOP"], "include_stop_str_in_output": True}
    for stream in (False, True):
        response = await site.http.post("/v1/completions", json=body | {"stream": stream})
        text = "".join(re.findall('"text":"([^"]*)"', response.text))
        assert text == "one STOP"
        assert '"stop"' in response.text


async def test_a_stop_token_shows_if_that_is_wanted(site: Site) -> None:
    first, second = site.tokens("ab")
    site.scheduler.behaviour = says(first, second)
    body = {"prompt": "x", "max_tokens": 2, "stop_token_ids": [second]}
    for wanted, text in ((False, "a"), (True, "ab")):
        answer = await post(site, "/v1/completions", **body, include_stop_str_in_output=wanted)
        assert answer["choices"][0]["text"] == text


async def test_prompts_have_special_tokens_or_not(site: Site) -> None:
    for wanted, tokens in ((True, site.prompt_tokens("hi")), (False, site.tokens("hi"))):
        answer = await post(
            site, "/v1/completions", prompt="hi", add_special_tokens=wanted, max_tokens=1
        )
        assert answer["usage"]["prompt_tokens"] == len(tokens)
        submitted = site.scheduler.requests[-1].submission.prompt_token_ids
        assert tuple(submitted) == tokens
