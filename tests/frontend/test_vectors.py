"""Requests for vectors in front of a scheduler that makes them: their memory, what is refused
before the scheduler has any work, and how answers are sent."""

import asyncio
from array import array
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from orcinus.v1 import inference_pb2, scheduler_pb2

from services.common.errors import InvalidRequest
from services.common.pooling import Pooling
from services.frontend.generation.answer import Piece
from services.frontend.generation.vectors import vectors_of
from services.frontend.http.ranking.score import ScoreBody
from services.frontend.request.limits import ModelLimits
from services.frontend.request.pipeline import ServedPipeline
from tests.fake_scheduler import PIPELINE, FakeRequest, FakeScheduler
from tests.frontend.conftest import Site, running, soon

pytestmark = pytest.mark.asyncio(loop_scope="module")

N_VALUES = 1024
POOLS = scheduler_pb2.PipelineDescription()
POOLS.CopyFrom(PIPELINE)
POOLS.traits.update(Pooling(kind="last", n_values=N_VALUES, generates=True).to_traits())


async def makes_vectors(request: FakeRequest) -> None:
    request.accept()
    values = array("f", [request.submission.prompt_token_ids[0]]) * N_VALUES
    request.vector(values.tobytes())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    async with running(
        tmp_path_factory.mktemp("vectors"),
        FakeScheduler(makes_vectors, pipeline=POOLS),
        max_in_flight=120,
        max_in_flight_bytes=2**20,
    ) as site:
        yield site


async def embed(site: Site, given: Any, **options: Any) -> Any:
    return await soon(site.http.post("/v1/embeddings", json={"input": given, **options}))


async def test_a_long_list_comes_whole_beside_other_data(site: Site) -> None:
    given = [[token] for token in range(5, 105)]
    with site.frontend._budget.share(2**18):
        response = await embed(site, given)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert [one["index"] for one in answer["data"]] == list(range(100))
    assert [one["embedding"] for one in answer["data"]] == [
        [float(token)] * N_VALUES for (token,) in given
    ]
    assert answer["object"] == "list"
    assert answer["model"] == "test-model"
    assert answer["usage"] == {"prompt_tokens": 100, "total_tokens": 100}


async def test_a_list_without_room_is_refused_before_it_is_submitted(site: Site) -> None:
    n_before = len(site.scheduler.requests)
    with site.frontend._budget.share(2**20 - 2**18):
        response = await embed(site, [[5]] * 100)
    assert response.status_code == 429, response.text
    assert len(site.scheduler.requests) == n_before


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": ["x"] * 121}, "input"),
        ("/v1/embeddings", {"input": ["x", 3]}, "input[1]"),
        ("/v1/embeddings", {"input": [[3], ["x"]]}, "input[1]"),
        ("/v1/rerank", {"query": "x", "documents": ["y"] * 120}, "model"),
        ("/v1/rerank", {"query": "x", "documents": ["y"], "truncation": True}, "truncation"),
        (
            "/v2/rerank",
            {"query": "x", "documents": ["y"], "max_tokens_per_doc": 9},
            "max_tokens_per_doc",
        ),
        ("/v1/rerank", {"query": "x", "documents": ["y", 3]}, "documents[1]"),
        ("/v1/rerank", {"query": "x", "documents": [{"t": "y"}]}, "documents[0].text"),
        ("/v1/score", {"text_1": "x", "text_2": ["y", None]}, "text_2[1]"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": [5, 99_999_999]}, "input"),
        ("/v1/embeddings", {"input": [[5], [99_999_999]]}, "input[1]"),
        ("/v1/score", {"text_1": ["x", ""], "text_2": "y"}, "text_1[1]"),
        ("/v1/score", {"text_1": "x", "text_2": ""}, "text_2"),
        ("/v1/rerank", {"query": "x", "documents": ["y", ""]}, "documents[1]"),
    ],
)
async def test_wrong_requests_name_their_own_fields(
    site: Site, path: str, body: dict[str, Any], param: str
) -> None:
    n_before = len(site.scheduler.requests)
    response = await soon(site.http.post(path, json=body))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert len(site.scheduler.requests) == n_before


@pytest.mark.parametrize("n_values", [0, N_VALUES - 1])
async def test_an_error_is_answered_before_any_vector_is_sent(site: Site, n_values: int) -> None:
    async def fails(request: FakeRequest) -> None:
        request.accept()
        is_first = request.submission.prompt_token_ids[0] == 5
        request.vector(bytes(4 * (N_VALUES if is_first else n_values)))

    site.scheduler.behaviour = fails
    try:
        response = await embed(site, [[5], [6]])
    finally:
        site.scheduler.behaviour = makes_vectors
    assert response.status_code == 500
    assert "vector" in response.json()["error"]["message"]
    assert (await embed(site, [[5], [6]])).status_code == 200


async def test_the_scores_of_several_texts_beside_one_are_named_by_the_several() -> None:
    assert ScoreBody(text_1=["a", "b"], text_2="q").field.item(1) == "text_1[1]"
    assert ScoreBody(text_1="q", text_2=["a", "b"]).field.item(1) == "text_2[1]"
    assert ScoreBody(text_1="q", text_2="a").field.item(0) == "text_2"


async def test_fields_that_are_not_known_are_refused(site: Site) -> None:
    unknown = bytes([0xF2, 0x3F, 1, 0x78])  # field 1022 with a text of one character
    prompt = inference_pb2.Prompt(text="x").SerializeToString() + unknown
    pair = inference_pb2.TextPair(first="x", second="y").SerializeToString() + unknown
    for method, request, field in (
        (
            "Embed",
            inference_pb2.EmbedRequest(inputs=[_parsed(inference_pb2.Prompt, prompt)]),
            "inputs",
        ),
        (
            "Score",
            inference_pb2.ScoreRequest(pairs=[_parsed(inference_pb2.TextPair, pair)]),
            "pairs",
        ),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await soon(site.inference._unary(method, inference_pb2.EmbedResponse)(request))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert str(caught.value.details()).startswith(f"{field}[0]")


def _parsed(kind: Any, data: bytes) -> Any:
    message = kind()
    message.ParseFromString(data)
    return message


async def test_vectors_that_fit_into_no_message_are_refused_before_they_are_made(
    site: Site,
) -> None:
    def request(n_inputs: int, **options: Any) -> inference_pb2.EmbedRequest:
        prompt = inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=[5]))
        return inference_pb2.EmbedRequest(inputs=[prompt] * n_inputs, **options)

    embed = site.inference._unary("Embed", inference_pb2.EmbedResponse)
    answer = await soon(embed(request(20)))
    assert [list(one.values) for one in answer.embeddings] == [[5.0] * N_VALUES] * 20
    n_before = len(site.scheduler.requests)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await soon(embed(request(25)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(caught.value.details()).startswith("inputs: ")
    assert len(site.scheduler.requests) == n_before


class Complete:
    """A generation whose vectors are there."""

    pooling = Pooling(kind="last", n_values=1)

    async def start(self) -> None:
        pass

    async def complete(self) -> list[Piece]:
        return [Piece(index, vector=array("f", [index]).tobytes()) for index in range(50)]


async def test_other_tasks_run_after_each_vector() -> None:
    n_others = 0

    async def runs() -> None:
        nonlocal n_others
        while True:
            n_others += 1
            await asyncio.sleep(0)

    running = asyncio.ensure_future(runs())
    seen = [n_others async for _ in vectors_of(Complete())]  # type: ignore[arg-type]
    running.cancel()
    assert sorted(set(seen)) == seen
    assert len(seen) == 50


async def test_prompts_that_are_too_long_are_cut_off_on_request(site: Site) -> None:
    text, tokens = "the lazy dog " * 400, [*range(5, 300)]
    assert (await embed(site, [text, "the"])).status_code == 400
    for given, n_tokens, n_expected in [
        (text, 7, 7),
        (text, -1, PIPELINE.max_model_len),
        ("the", 7, None),
        (tokens, 40, 40),
    ]:
        response = await embed(site, given, truncate_prompt_tokens=n_tokens)
        assert response.status_code == 200, response.text
        if n_expected is not None:
            assert response.json()["usage"]["prompt_tokens"] == n_expected
    for n_tokens in (0, -2, PIPELINE.max_model_len + 1):
        refused = await embed(site, "the", truncate_prompt_tokens=n_tokens)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "truncate_prompt_tokens"


async def test_a_padding_token_that_positions_skip_is_refused() -> None:
    pooling = Pooling(kind="mean", n_values=8, padding_token_id=1)
    traits = tuple(pooling.to_traits().items())
    pipeline = ServedPipeline(model="m", vocab_size=512, max_model_len=128, traits=traits)
    limits = ModelLimits(pipeline)
    limits.check_tokens("input[0]", (0, 2))
    with pytest.raises(InvalidRequest, match=r"input\[1\]: has the padding token, 1"):
        limits.check_tokens("input[1]", (0, 1, 2))
