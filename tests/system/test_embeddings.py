"""A system that makes vectors: they are those of `transformers`, the same alone, in company and cut
into small iterations; wrong input names its field."""

import base64
import math
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
import tokenizers
from orcinus.v1 import inference_pb2
from transformers import MistralConfig, Qwen3Config

from tests.checkpoints import SMALL
from tests.frontend.checkpoints import write_checkpoint as write_tokenizer
from tests.pooling import cosine, oracle_vector, write_embedder
from tests.system.conftest import MODEL, tokens, write_model
from tests.system.stack import Stack, serving

# Systems of their own take many seconds of a processor.
of_own_system = pytest.mark.thorough

SIZES = {**SMALL, **MODEL, "max_position_embeddings": 600}
TEXTS = ["the quick brown fox", "hello world " * 60, "once upon a time there was a small whale"]


def write(directory: Path, config: Any, kind: str, **keys: Any) -> Path:
    write_embedder(directory, config, kind, **keys)
    write_tokenizer(directory)
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    return directory


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Qwen3Config(**SIZES, head_dim=16, matryoshka_dimensions=[8, 16, 48])
    prompts = {"query": "Instruct: find it\nQuery: ", "document": ""}
    return write(tmp_path_factory.mktemp("embedder"), config, "last", prompts=prompts)


@pytest.fixture(scope="module")
def stack(embedder: Path) -> Iterator[Stack]:
    with serving(embedder, dtype="float32", stages=2, scheduler="max-batch-tokens=32") as stack:
        yield stack


def embed(stack: Stack, given: Any, **options: Any) -> list[list[float]]:
    response = stack.post("/v1/embeddings", {"input": given, **options})
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [one["index"] for one in data] == list(range(len(data)))
    return [one["embedding"] for one in data]


def refusal(stack: Stack, path: str, body: dict[str, Any]) -> tuple[str, str]:
    response = stack.post(path, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


def to_tokens(directory: Path, text: str) -> list[int]:
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(text).ids
    return ids


@of_own_system
def test_vectors_of_texts_are_those_of_transformers(stack: Stack, embedder: Path) -> None:
    for text, found in zip(TEXTS, embed(stack, TEXTS), strict=True):
        expected = oracle_vector(embedder, to_tokens(embedder, text), "last")
        assert cosine(found, expected.tolist()) >= 0.99999
        assert math.hypot(*found) == pytest.approx(1)


@of_own_system
def test_a_named_prompt_goes_before_each_text(stack: Stack, embedder: Path) -> None:
    prompted = to_tokens(embedder, "Instruct: find it\nQuery: " + TEXTS[0])
    assert embed(stack, TEXTS[0], prompt_name="query") == embed(stack, prompted)
    assert embed(stack, TEXTS[0], prompt_name="document") == embed(stack, TEXTS[0])


@of_own_system
def test_tokens_and_base64_and_shorter_vectors(stack: Stack, embedder: Path) -> None:
    response = stack.post("/v1/embeddings", {"input": [[5, 6, 7], [8, 9]]}).json()
    assert response["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    whole = response["data"][1]["embedding"]
    (encoded,) = embed(stack, [8, 9], encoding_format="base64")
    assert array("f", base64.b64decode(encoded)).tolist() == whole  # type: ignore[arg-type]
    (short,) = embed(stack, [8, 9], dimensions=8)
    length = math.hypot(*whole[:8])
    assert short == pytest.approx([value / length for value in whole[:8]], rel=1e-6)


@of_own_system
def test_a_vector_is_the_same_alone_and_in_company(stack: Stack) -> None:
    source = Random(3)
    prompts = [tokens(source, 90) for _ in range(24)]
    alone = [embed(stack, prompt)[0] for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda prompt: embed(stack, prompt)[0], prompts)) == alone
    assert embed(stack, prompts) == alone


@of_own_system
def test_grpc_has_the_same_vectors_and_errors(stack: Stack) -> None:
    inputs = [
        inference_pb2.Prompt(text=TEXTS[0]),
        inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=[8, 9])),
    ]
    with stack.inference() as stub:
        answer = stub.Embed(inference_pb2.EmbedRequest(inputs=inputs, dimensions=16))
        expected = [embed(stack, given, dimensions=16)[0] for given in (TEXTS[0], [8, 9])]
        assert [list(one.values) for one in answer.embeddings] == expected
        assert answer.usage.prompt_tokens > 2
        empty = inference_pb2.EmbedRequest(inputs=[*inputs, inference_pb2.Prompt()])
        for request, field in [
            (empty, "inputs[2]"),
            (inference_pb2.EmbedRequest(), "inputs"),
            (inference_pb2.EmbedRequest(inputs=inputs, dimensions=7), "dimensions"),
        ]:
            with pytest.raises(grpc.RpcError) as caught:
                stub.Embed(request)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert str(caught.value.details()).startswith(f"{field}: ")
        with pytest.raises(grpc.RpcError, match="makes embeddings"):
            stub.Score(
                inference_pb2.ScoreRequest(pairs=[inference_pb2.TextPair(first="x", second="y")])
            )


@of_own_system
@pytest.mark.parametrize(
    ("body", "param", "why"),
    [
        ({"input": ["good", ""]}, "input[1]", "empty"),
        ({"input": []}, "input", ""),
        ({"input": ["good", 3]}, "input[1]", "a text"),
        ({"input": [[1, 2], [5, 340]]}, "input[1]", "from 0 to 339"),
        ({"input": [[1], [3] * 601]}, "input[1]", "600 at most"),
        ({"input": ["x", "the quick brown fox " * 400]}, "input[1]", "600 at most"),
        ({"input": ["x"] * 1025}, "input", "1024"),
        ({"input": "x", "dimensions": 7}, "dimensions", "one of [8, 16, 48]"),
        ({"input": "x", "dimensions": 0}, "dimensions", "one of"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", ""),
        ({"input": "x", "prompt_name": "poem"}, "prompt_name", "'document' and 'query'"),
    ],
)
def test_wrong_input_names_its_field(
    stack: Stack, body: dict[str, Any], param: str, why: str
) -> None:
    named, message = refusal(stack, "/v1/embeddings", body)
    assert named == param
    assert why in message


@of_own_system
def test_the_longest_prompt_has_a_vector(stack: Stack) -> None:
    assert len(embed(stack, [3] * 600)[0]) == 48


@of_own_system
def test_a_model_for_vectors_answers_nothing(stack: Stack) -> None:
    param, message = refusal(stack, "/v1/completions", {"prompt": "x"})
    assert (param, "makes vectors" in message) == ("model", True)


def test_a_model_that_answers_makes_vectors_with_a_setting(two_stages: Stack, model: Path) -> None:
    texts = embed(two_stages, [TEXTS[0], TEXTS[1]])
    (of_tokens,) = embed(two_stages, [5, 6, 7])
    prompts = [to_tokens(model, TEXTS[0]), [5, 6, 7], to_tokens(model, TEXTS[1])]
    for prompt, found in zip(prompts, (texts[0], of_tokens, texts[1]), strict=True):
        expected = oracle_vector(model, prompt, "mean").tolist()
        assert cosine(found, expected) >= 0.99999
        assert math.hypot(*found) == pytest.approx(1)
    with two_stages.inference() as stub:
        request = inference_pb2.EmbedRequest(inputs=[inference_pb2.Prompt(text=TEXTS[0])])
        assert list(stub.Embed(request).embeddings[0].values) == texts[0]
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/embeddings", {"input": ["good", ""]}, "input[1]"),
        ("/v1/embeddings", {"input": [[1, 2], [5, 340]]}, "input[1]"),
        ("/v1/embeddings", {"input": "x", "dimensions": 7}, "dimensions"),
        ("/v1/embeddings", {"input": ["x " * 150] * 1024}, "input"),
        ("/v1/embeddings", {"input": ["x"] * 1025}, "input"),
        ("/v1/score", {"text_1": "x", "text_2": "y"}, "model"),
        ("/v1/rerank", {"query": "x", "documents": ["y", ""]}, "documents[1]"),
        ("/v1/rerank", {"query": "x" * 100_000, "documents": ["y"] * 1024}, "model"),
    ]
    for path, body, param in wrong:
        assert refusal(two_stages, path, body)[0] == param


def test_a_model_that_answers_makes_no_vectors_by_itself(one_stage: Stack) -> None:
    param, message = refusal(one_stage, "/v1/embeddings", {"input": "x"})
    assert (param, "makes no vectors" in message) == ("model", True)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"tp": 2}, {"pipelines": 2}, {"policy": "orca"}], ids=str)
def test_means_are_the_same_in_every_system(tmp_path: Path, options: dict[str, Any]) -> None:
    config = MistralConfig(**SIZES, sliding_window=None)
    model = write(tmp_path, config, "mean", normalises=False)
    source = Random(4)
    prompts = [tokens(source, 200) for _ in range(8)]
    with serving(model, dtype="float32", **options) as stack:
        for prompt, found in zip(prompts, embed(stack, prompts), strict=True):
            expected = oracle_vector(model, prompt, "mean")
            assert found == pytest.approx(expected.tolist(), abs=1e-3)


@pytest.mark.thorough
def test_vectors_and_answers_share_a_system_through_the_death_of_a_rank(tmp_path: Path) -> None:
    model = write_model(tmp_path, num_hidden_layers=4)
    source = Random(5)
    prompts = [tokens(source, 300) for _ in range(40)]
    with serving(model, dtype="float32", pooling="mean", spares=1, fail_fast=False) as stack:
        answer = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
        said = stack.complete(prompts[0], **answer)["token_ids"]
        alone = embed(stack, prompts)
        with ThreadPoolExecutor(9) as pool:
            beside = [pool.submit(stack.complete, prompts[0], **answer) for _ in range(4)]
            again = [pool.submit(embed, stack, prompts) for _ in range(4)]
            stack.kill("services.worker.rank")
            assert all(one.result() == alone for one in again)
            assert all(one.result()["token_ids"] == said for one in beside)
        stack.look_at_tree()
