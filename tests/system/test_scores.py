"""Systems that score pairs of texts: the scores are those of `transformers`, and documents come in
their order."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import tokenizers
from orcinus.v1 import inference_pb2
from transformers import Qwen3Config

from services.frontend.text.pair_format import DEFAULT_INSTRUCTION, PairFormat
from tests.checkpoints import SMALL, Oracle
from tests.frontend.checkpoints import write_checkpoint as write_tokenizer
from tests.pooling import oracle_score, write_reranker
from tests.system.conftest import MODEL, write_model
from tests.system.stack import Stack, serving
from tests.system.test_embeddings import refusal

pytestmark = pytest.mark.thorough

QUERY = "the whale"
DOCUMENTS = ["once upon a time", "hello wörld", "the lazy dog jumps", "a small whale there was"]


def probability(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("reranker")
    config = Qwen3Config(**{**SMALL, **MODEL, "tie_word_embeddings": True}, head_dim=16)
    write_reranker(directory, config)
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def stack(reranker: Path) -> Iterator[Stack]:
    with serving(reranker, dtype="float32") as stack:
        yield stack


def answered(stack: Stack, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = stack.post(path, body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def expected_scores(reranker: Path) -> list[float]:
    tokenizer = tokenizers.Tokenizer.from_file(str(reranker / "tokenizer.json"))
    prompts = [tokenizer.encode(QUERY, document).ids for document in DOCUMENTS]
    return [probability(oracle_score(reranker, prompt)) for prompt in prompts]


def test_scores_of_pairs_are_those_of_transformers(stack: Stack, reranker: Path) -> None:
    answer = answered(stack, "/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS})
    found = [one["score"] for one in answer["data"]]
    assert found == pytest.approx(expected_scores(reranker), abs=1e-4)
    assert len({round(score, 3) for score in found}) == len(found)
    each = {"text_1": [QUERY] * len(DOCUMENTS), "text_2": DOCUMENTS}
    assert answered(stack, "/v1/score", each)["data"] == answer["data"]


def test_grpc_has_the_same_scores_and_errors(stack: Stack, reranker: Path) -> None:
    pairs = [inference_pb2.TextPair(first=QUERY, second=text) for text in DOCUMENTS]
    with stack.inference() as stub:
        found = stub.Score(inference_pb2.ScoreRequest(pairs=pairs)).scores
        assert list(found) == pytest.approx(expected_scores(reranker), abs=1e-4)
        pairs[2].second = ""
        for given, field in [(pairs, "pairs[2]"), ([], "pairs")]:
            with pytest.raises(grpc.RpcError) as caught:
                stub.Score(inference_pb2.ScoreRequest(pairs=given))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert str(caught.value.details()).startswith(f"{field}: ")


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_documents_come_in_the_order_of_their_scores(
    stack: Stack, reranker: Path, path: str
) -> None:
    expected = expected_scores(reranker)
    documents = [DOCUMENTS[0], *({"text": text} for text in DOCUMENTS[1:])]
    answer = answered(stack, path, {"query": QUERY, "documents": documents, "top_n": 3})
    order = sorted(range(len(DOCUMENTS)), key=lambda index: -expected[index])[:3]
    assert [one["index"] for one in answer["results"]] == order
    for one in answer["results"]:
        assert one["relevance_score"] == pytest.approx(expected[one["index"]], abs=1e-4)
        assert one["document"] == {"text": DOCUMENTS[one["index"]]}
    body = {"query": QUERY, "documents": DOCUMENTS, "return_documents": False}
    assert all("document" not in one for one in answered(stack, path, body)["results"])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"text_1": "x", "text_2": ["y", ""]}, "text_2[1]"),
        ("/v1/score", {"text_1": ["x", ""], "text_2": "y"}, "text_1[1]"),
        ("/v1/score", {"text_1": ["x", "y"], "text_2": ["a", "b", "c"]}, "text_2"),
        ("/v1/score", {"text_1": [], "text_2": "y"}, "text_1"),
        ("/v1/score", {"text_1": "x", "text_2": ["y", "fox " * 9000]}, "text_2[1]"),
        ("/v1/rerank", {"query": "", "documents": ["y"]}, "query"),
        ("/v1/rerank", {"query": "x", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "x", "documents": ["y", {"text": ""}]}, "documents[1]"),
        ("/v1/rerank", {"query": "x", "documents": ["y"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "x", "documents": ["y"] * 1025}, "documents"),
        ("/v1/embeddings", {"input": "x"}, "model"),
        ("/v1/completions", {"prompt": "x"}, "model"),
    ],
)
def test_wrong_input_names_its_field(
    stack: Stack, path: str, body: dict[str, Any], param: str
) -> None:
    assert refusal(stack, path, body)[0] == param


def with_answers(directory: Path) -> Path:
    """Replaces the last two tokens of the vocabulary by `yes` and `no`."""
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    model = content["model"]
    for answer, merge in zip(("yes", "no"), model["merges"][-2:], strict=True):
        model["vocab"][answer] = model["vocab"].pop("".join(merge))
    del model["merges"][-2:]
    file.write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize("options", [{}, {"stages": 2}, {"tp": 2}], ids=str)
def test_scores_from_yes_and_no_are_those_of_the_models_logits(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    model = with_answers(write_model(tmp_path, tie_word_embeddings=bool(options)))
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    oracle, made = Oracle(model), PairFormat()
    with serving(model, dtype="float32", pooling="yes-no", **options) as stack:
        for instruction in (None, "be {query}"):
            body = {"query": QUERY, "documents": DOCUMENTS, "instruction": instruction}
            for one in answered(stack, "/v1/rerank", body)["results"]:
                prompt = made.prompt(QUERY, DOCUMENTS[one["index"]], instruction)
                assert (instruction or DEFAULT_INSTRUCTION) in prompt.text
                logits = oracle.logits(tokenizer.encode(prompt.text).ids)[-1]
                yes, no = (logits[tokenizer.token_to_id(answer)] for answer in ("yes", "no"))
                assert one["relevance_score"] == pytest.approx(
                    probability(float(yes - no)), abs=1e-4
                )
        assert stack.complete("hello", max_tokens=3, ignore_eos=True)["token_ids"]
