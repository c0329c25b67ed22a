"""Receipts of answers over all protocols, and what keeps a server from making them."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from orcinus.v1 import inference_pb2, scheduler_pb2

from services.frontend.frontend import Frontend
from services.frontend.settings import FrontendSettings
from services.receipts.keys import PublicKeys, SigningKeys, new_key
from services.receipts.receipt import HiddenPrompt, Receipt, TokenPrompt
from tests.fake_scheduler import PIPELINE, Behaviour, FakeRequest, FakeScheduler, says
from tests.frontend.checkpoints import write_checkpoint
from tests.frontend.conftest import Site, running, soon
from tests.receipts.made import ARITHMETIC

pytestmark = pytest.mark.asyncio(loop_scope="module")

EOS = PIPELINE.eos_token_ids[0]
TRAITS = {
    **ARITHMETIC,
    "weights": "a" * 64,
    "configuration": "b" * 16,
    "max_model_len": "256",
    "block_size": "16",
}
WITH_TRAITS = scheduler_pb2.PipelineDescription()
WITH_TRAITS.CopyFrom(PIPELINE)
WITH_TRAITS.traits.update(TRAITS)
HELLO: dict[str, Any] = {"prompt": [5, 6, 7], "receipt": True, "seed": 3, "max_tokens": 9}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "receipt": True}
MESSAGES = {**CHAT, "max_tokens": 9}
RESPONSES = {"input": "hello", "receipt": True}


async def by_avx2(request: FakeRequest) -> None:
    """Three tokens by one build of the workers."""
    request.accept()
    request.built_by("b1", **TRAITS)
    await says(20, 21, EOS)(request)


async def by_two_builds(request: FakeRequest) -> None:
    """Tokens by one build, and then by another; both are told twice."""
    request.accept()
    for kernels, token in (("native-avx2", 20), ("native-avx512", 21)):
        for _ in range(2):
            request.built_by(kernels, **{**TRAITS, "kernels": kernels})
        request.tokens(token)
    request.last_token(EOS, scheduler_pb2.COMPLETION_REASON_STOP)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """A frontend that makes receipts on request."""
    directory = tmp_path_factory.mktemp("receipts")
    keys = directory / "keys.pem"
    keys.write_bytes(new_key())
    scheduler = FakeScheduler(by_avx2, pipeline=WITH_TRAITS)
    async with running(directory, scheduler, receipts="on_request", receipt_keys_file=keys) as site:
        yield site


async def post(site: Site, path: str, body: dict[str, Any]) -> Any:
    response = await soon(site.http.post(path, json=body))
    assert response.status_code == 200, response.text
    return response.json()


async def events(site: Site, path: str, body: dict[str, Any]) -> list[Any]:
    response = await soon(site.http.post(path, json={**body, "stream": True}))
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def checked(site: Site, receipt: dict[str, Any]) -> Receipt:
    """Returns a receipt whose signature is right."""
    keys = await soon(site.http.get("/.well-known/orcinus-keys.json"))
    assert PublicKeys.from_jwks(keys.json()).has_signed(receipt)
    return Receipt.model_validate_json(json.dumps(receipt))


async def test_a_receipt_says_what_made_an_answer(site: Site) -> None:
    answer = await post(site, "/v1/completions", {**HELLO, "temperature": 0.7, "stop": ["zz"]})
    receipt = await checked(site, answer["choices"][0]["receipt"])
    assert receipt.id == f"{answer['id'].removeprefix('cmpl-')}-0"
    assert receipt.model.weights == "a" * 64
    assert (receipt.model.name, receipt.model.max_model_len) == ("test-model", 256)
    assert [it.model_dump(exclude_defaults=True) for it in receipt.arithmetic] == [ARITHMETIC]
    assert receipt.prompt == TokenPrompt(tokens=[5, 6, 7])
    assert receipt.tokens == [20, 21, EOS]
    assert (receipt.finish, receipt.n_given, receipt.seed) == ("stop", 0, "3")
    assert (receipt.options.max_tokens, receipt.options.stop) == (9, ["zz"])
    assert receipt.sampling.temperature == 0.7
    assert receipt.sampling.stop_token_ids == (EOS,)


async def test_each_answer_has_a_receipt_with_its_own_seed(site: Site) -> None:
    body = {**HELLO, "prompt": [[5], [6]], "n": 2, "seed": 2**63 - 2}
    answer = await post(site, "/v1/completions", body)
    receipts = [await checked(site, choice["receipt"]) for choice in answer["choices"]]
    seeds = [2**63 - 2, 2**63 - 1, -(2**63), 1 - 2**63]
    assert [it.seed for it in receipts] == [str(seed) for seed in seeds]


async def test_of_several_answers_those_that_are_returned_are_signed(site: Site) -> None:
    async def by_rank(request: FakeRequest) -> None:
        """The second of three answers is the best. No receipt of the third can be made."""
        index = int(request.request_id[-1])
        traits = TRAITS if index < 2 else {"dtype": "float32"}
        request.accept()
        request.built_by("b1", **traits)
        await says(20 + index % 2, EOS)(request)

    site.scheduler.behaviour = by_rank
    body = {**HELLO, "n": 1, "best_of": 3, "temperature": 0.7}
    answer = await post(site, "/v1/completions", body)
    (receipt,) = [await checked(site, choice["receipt"]) for choice in answer["choices"]]
    assert receipt.id == f"{answer['id'].removeprefix('cmpl-')}-1"
    assert (receipt.tokens, receipt.seed) == ([21, EOS], "4")
    refused = await soon(site.http.post("/v1/completions", json={**body, "n": 3, "best_of": 3}))
    assert (refused.status_code, "workers without the setting" in refused.text) == (503, True)
    site.scheduler.behaviour = by_avx2


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", HELLO), ("/v1/chat/completions", CHAT)],
    ids=["completion", "chat"],
)
@pytest.mark.parametrize("extra", [{}, {"stop": ["zz"]}, {"return_token_ids": True}], ids=str)
async def test_a_stream_has_the_receipt_where_the_answer_ends(
    site: Site, path: str, body: dict[str, Any], extra: dict[str, Any]
) -> None:
    chunks = await events(site, path, {**body, **extra})
    found = [choice for chunk in chunks for choice in chunk["choices"] if "receipt" in choice]
    assert [choice["finish_reason"] for choice in found] == ["stop"]
    assert (await checked(site, found[0]["receipt"])).tokens == [20, 21, EOS]


async def test_other_protocols_have_receipts_too(site: Site) -> None:
    for path, body in (("/v1/responses", RESPONSES), ("/v1/messages", MESSAGES)):
        answer = await post(site, path, body)
        assert (await checked(site, answer["receipt"])).finish == "stop"
        told = await events(site, path, body)
        holders = [event.get("response", event) for event in told]
        (receipt,) = [holder["receipt"] for holder in holders if "receipt" in holder]
        assert (await checked(site, receipt)).tokens == [20, 21, EOS]
        assert "receipt" not in await post(site, path, {**body, "receipt": False})


async def test_grpc_has_receipts_as_canonical_json(site: Site) -> None:
    prompt = inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=[5, 6, 7]))
    options = inference_pb2.GenerationOptions(receipt=True, max_tokens=9)
    request = inference_pb2.GenerateRequest(prompt=prompt, options=options)
    whole = await soon(site.inference.generate(request))
    streamed = inference_pb2.GenerateStreamRequest(prompt=prompt, options=options)
    pieces = [piece async for piece in site.inference.stream(streamed)]
    texts = [piece.choice.receipt for piece in pieces if piece.choice.receipt]
    for text in (whole.choices[0].receipt, *texts):
        receipt = await checked(site, json.loads(text))
        assert receipt.tokens == [20, 21, EOS]
    assert len(texts) == 1


async def test_a_stop_text_ends_the_tokens_of_a_receipt(site: Site) -> None:
    word = site.tokens("hello")

    async def repeats(request: FakeRequest) -> None:
        request.built_by("b1", **TRAITS)
        await says(*word, *word, EOS)(request)

    site.scheduler.behaviour = repeats
    answer = await post(site, "/v1/completions", {**HELLO, "stop": ["hello"]})
    receipt = await checked(site, answer["choices"][0]["receipt"])
    assert (receipt.finish, tuple(receipt.tokens)) == ("stop_text", word)
    site.scheduler.behaviour = by_avx2


async def test_all_builds_that_made_an_answer_are_named(site: Site) -> None:
    site.scheduler.behaviour = by_two_builds
    answer = await post(site, "/v1/completions", HELLO)
    receipt = await checked(site, answer["choices"][0]["receipt"])
    assert [it.kernels for it in receipt.arithmetic] == ["native-avx2", "native-avx512"]
    site.scheduler.behaviour = by_avx2


async def by_others(request: FakeRequest) -> None:
    """Two tokens by workers that do not tell what receipts need."""
    request.accept()
    request.built_by("b2", dtype="float32")
    await says(20, EOS)(request)


@pytest.mark.parametrize("behaviour", [by_others, says(20, EOS)], ids=["others", "not told"])
async def test_an_answer_of_workers_that_tell_nothing_gets_no_receipt(
    site: Site, behaviour: Behaviour
) -> None:
    site.scheduler.behaviour = behaviour
    refused = await soon(site.http.post("/v1/completions", json=HELLO))
    assert (refused.status_code, "workers without the setting" in refused.text) == (503, True)
    site.scheduler.behaviour = by_avx2


@pytest.mark.parametrize("name", ["weights", "configuration"])
async def test_an_answer_of_two_models_gets_no_receipt(site: Site, name: str) -> None:
    async def by_two_models(request: FakeRequest) -> None:
        request.accept()
        request.built_by("b1", **TRAITS)
        request.tokens(20)
        request.built_by("b2", **{**TRAITS, name: "d" * len(TRAITS[name])})
        request.last_token(EOS, scheduler_pb2.COMPLETION_REASON_STOP)

    site.scheduler.behaviour = by_two_models
    refused = await soon(site.http.post("/v1/completions", json=HELLO))
    assert (refused.status_code, "different models" in refused.text) == (503, True)
    site.scheduler.behaviour = by_avx2


async def test_a_resumed_stream_says_which_tokens_the_client_gave(site: Site) -> None:
    body = {**HELLO, "return_token_ids": True, "stream": True}
    first = await soon(site.http.post("/v1/completions", json=body))
    ids = [line[4:] for line in first.text.splitlines() if line.startswith("id: ")]
    resumed = {**body, "resumption": {"seed": 3, "token_ids": [[20]]}}
    rest = await soon(
        site.http.post("/v1/completions", json=resumed, headers={"Last-Event-ID": ids[0]})
    )
    assert rest.status_code == 200, rest.text
    (line,) = [line for line in rest.text.splitlines() if '"receipt"' in line]
    receipt = await checked(site, json.loads(line[6:])["choices"][0]["receipt"])
    assert (receipt.tokens, receipt.n_given) == ([20, 21, EOS], 1)


async def test_keys_are_read_again_when_they_change(site: Site) -> None:
    file = site.frontend._settings.receipt_keys_file
    assert file is not None
    before = (await post(site, "/v1/completions", HELLO))["choices"][0]["receipt"]
    file.write_bytes(new_key() + file.read_bytes())
    after = (await post(site, "/v1/completions", HELLO))["choices"][0]["receipt"]
    assert after["key_id"] == SigningKeys.parse(file.read_bytes()).id != before["key_id"]
    assert await checked(site, before)
    assert await checked(site, after)


async def test_receipts_of_all_answers_may_hide_their_prompts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "keys.pem"
    keys.write_bytes(new_key())
    scheduler = FakeScheduler(by_avx2, pipeline=WITH_TRAITS)
    settings: dict[str, Any] = {
        "receipts": "always",
        "receipt_keys_file": keys,
        "receipt_prompts": "digest",
    }
    async with running(tmp_path, scheduler, **settings) as site:
        answer = await post(site, "/v1/completions", {**HELLO, "receipt": False})
        receipt = await checked(site, answer["choices"][0]["receipt"])
        assert isinstance(receipt.prompt, HiddenPrompt)
        assert receipt.prompt.is_of([5, 6, 7])
        assert not receipt.prompt.is_of([5, 6, 8])
        unasked = {**HELLO, "receipt": False}
        scheduler.behaviour = by_others
        for _ in range(2):
            assert "receipt" not in (await post(site, "/v1/completions", unasked))["choices"][0]
        assert caplog.text.count("answers have no receipts") == 1
        scheduler.close()
        scheduler.open(PIPELINE)
        while (await soon(site.model.scheduler.pipeline.wait_open())).traits:
            await soon(site.model.scheduler.pipeline.wait_change())
        refused = await soon(site.http.post("/v1/completions", json=HELLO))
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "receipt"
        assert "the workers run without" in refused.json()["error"]["message"]
        assert "receipt" not in (await post(site, "/v1/completions", unasked))["choices"][0]
        assert not scheduler.requests[-1].submission.wants_traits
        assert caplog.text.count("answers have no receipts") == 2


async def test_without_the_setting_a_receipt_is_refused_and_nothing_is_kept(
    tmp_path: Path,
) -> None:
    scheduler = FakeScheduler(by_avx2, pipeline=WITH_TRAITS)
    async with running(tmp_path, scheduler) as site:
        for path, body in (
            ("/v1/completions", HELLO),
            ("/v1/chat/completions", CHAT),
            ("/v1/responses", RESPONSES),
            ("/v1/messages", MESSAGES),
        ):
            refused = await soon(site.http.post(path, json=body))
            assert refused.status_code == 400, path
            assert "receipt: is not served here" in refused.text
        keys = await soon(site.http.get("/.well-known/orcinus-keys.json"))
        assert keys.status_code == 404
        await post(site, "/v1/completions", {**HELLO, "receipt": False})
        assert not scheduler.requests[-1].submission.wants_traits


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(None, "No such file"), (b"", "keys.pem has no key in PEM")],
    ids=["missing", "empty"],
)
async def test_a_frontend_does_not_start_without_a_right_key_file(
    tmp_path: Path, content: bytes | None, complaint: str
) -> None:
    keys = tmp_path / "keys.pem"
    if content is not None:
        keys.write_bytes(content)
    write_checkpoint(tmp_path)
    served: Any = {"model": tmp_path, "scheduler": "localhost:1"}
    settings = FrontendSettings(**served, receipts="always", receipt_keys_file=keys)
    with pytest.raises((OSError, ValueError), match=complaint):
        Frontend(settings)


async def test_receipts_need_a_key_file(tmp_path: Path) -> None:
    served: Any = {"model": tmp_path, "scheduler": "localhost:1"}
    with pytest.raises(ValueError, match="receipt_keys_file: must be given with receipts=always"):
        FrontendSettings(**served, receipts="always")
