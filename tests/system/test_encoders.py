"""Systems that serve encoders: vectors and scores are those of `transformers`, on two stages and in
small iterations, and texts that do not fit into one are refused."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from transformers import BertConfig

from tests.checkpoints import SMALL
from tests.frontend.checkpoints import word_piece
from tests.pooling import cosine, oracle_score, oracle_vector, write_cross_encoder, write_encoder
from tests.system.stack import Stack, serving
from tests.system.test_embeddings import embed, refusal
from tests.system.test_scores import DOCUMENTS, QUERY, answered, probability

pytestmark = pytest.mark.thorough

MAX_BATCH_TOKENS = 40


@pytest.fixture(scope="module")
def tokenizer_file() -> str:
    """The content of a file with truncation and padding. It is made once: the library's trainer
    does not number tokens alike each time."""
    return word_piece().to_str()


@pytest.fixture(scope="module")
def tokenizer(tokenizer_file: str) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer.from_str(tokenizer_file)
    made.no_truncation()
    made.no_padding()
    return made


@pytest.fixture(scope="module")
def config(tokenizer: tokenizers.Tokenizer) -> BertConfig:
    sizes = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    vocab_size = tokenizer.get_vocab_size()
    return BertConfig(**{**sizes, "vocab_size": vocab_size, "max_position_embeddings": 90})


@pytest.fixture(scope="module")
def embedder(
    tmp_path_factory: pytest.TempPathFactory, config: BertConfig, tokenizer_file: str
) -> Path:
    directory = write_encoder(tmp_path_factory.mktemp("encoder"), config, "mean")
    (directory / "tokenizer.json").write_text(tokenizer_file)
    return directory


@pytest.fixture(scope="module")
def stack(embedder: Path) -> Iterator[Stack]:
    scheduler = f"max-batch-tokens={MAX_BATCH_TOKENS}"
    with serving(embedder, dtype="float32", stages=2, scheduler=scheduler) as stack:
        yield stack


def test_vectors_are_those_of_transformers_and_the_same_in_company(
    stack: Stack, embedder: Path, tokenizer: tokenizers.Tokenizer
) -> None:
    texts = ["the quick brown fox", *DOCUMENTS, "hello world " * 9, "The WHALE"] * 3
    found = embed(stack, texts)
    for text, vector in zip(texts[:7], found, strict=False):
        expected = oracle_vector(embedder, tokenizer.encode(text).ids, "mean")
        assert cosine(vector, expected.tolist()) >= 0.99999
        assert embed(stack, text) == [vector]
    assert found == found[:7] * 3


def test_a_text_that_fits_into_no_iteration_is_refused(stack: Stack) -> None:
    param, message = refusal(stack, "/v1/embeddings", {"input": ["hello", "world " * 50]})
    assert param == "input[1]"
    assert f"{MAX_BATCH_TOKENS} at most" in message
    assert "max_batch_tokens" in message
    assert refusal(stack, "/v1/completions", {"prompt": "hello"})[0] == "model"
    cut = embed(stack, "world " * 50, truncate_prompt_tokens=-1)
    assert cut == embed(stack, "world " * (MAX_BATCH_TOKENS - 2))


def test_scores_of_pairs_are_those_of_transformers(
    tmp_path: Path, config: BertConfig, tokenizer: tokenizers.Tokenizer, tokenizer_file: str
) -> None:
    write_cross_encoder(tmp_path, config)
    (tmp_path / "tokenizer.json").write_text(tokenizer_file)
    expected = []
    for document in DOCUMENTS:
        pair = tokenizer.encode(QUERY, document)
        expected.append(probability(oracle_score(tmp_path, pair.ids, pair.type_ids)))
    with serving(tmp_path, dtype="float32") as stack:
        answer = answered(stack, "/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS})
        assert [one["score"] for one in answer["data"]] == pytest.approx(expected, abs=1e-4)
        ranked = answered(stack, "/v1/rerank", {"query": QUERY, "documents": DOCUMENTS})
        long = {"query": QUERY, "documents": ["the lazy dog " * 90]}
        assert refusal(stack, "/v1/rerank", long)[0] == "documents[0]"
        assert answered(stack, "/v1/rerank", {**long, "truncation": True})["results"]
        order = sorted(range(len(DOCUMENTS)), key=lambda index: -expected[index])
        assert [one["index"] for one in ranked["results"]] == order
        assert refusal(stack, "/v1/embeddings", {"input": "x"})[0] == "model"
    assert len({round(score, 3) for score in expected}) == len(expected)
