"""Vectors of a real encoder, all-MiniLM-L6-v2: those of `transformers`, the same in any company,
and what other people's clients get."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, BertConfig

from models import minilm
from tests.environments import OUTSIDE
from tests.pooling import cosine, write_cross_encoder
from tests.real.conftest import Clients
from tests.system.stack import Stack, serving

TEXTS = (
    "A lien is a right to keep possession of property until a debt is paid.",
    "How tall is a giraffe?",
    "naïve café, 東京, [SEP] 12.5%",
    "The giraffe is the tallest animal on earth; a male may be 5.5 metres tall.",
    "x",
    " ".join(f"Sentence {i} of a long text says nothing new." for i in range(40)),
)


@pytest.fixture(scope="module")
def embedder() -> Path:
    """The checkpoint in the user's cache, which is made once, and checked by its digest."""
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("SSL_CERT_FILE")
        for name, value in OUTSIDE.items():
            environment.setenv(name, value)
        return minilm.MODEL.fetch(minilm.MODEL.default_directory())


@pytest.fixture(scope="module")
def vectors_system(embedder: Path) -> Iterator[Stack]:
    with serving(
        embedder, served_model_name="embedder", dtype="float32", kv_memory="64MiB", threads=2
    ) as stack:
        yield stack


@pytest.fixture(scope="module")
def scores_system(embedder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A random cross-encoder with the words of the embedder."""
    directory = tmp_path_factory.mktemp("reranker")
    config = BertConfig.from_pretrained(embedder, num_hidden_layers=2)
    write_cross_encoder(directory, config)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (directory / file).symlink_to(embedder / file)
    with serving(
        directory, served_model_name="reranker", dtype="float32", kv_memory="64MiB"
    ) as stack:
        yield stack


@pytest.fixture(scope="module")
def expected(embedder: Path) -> list[list[float]]:
    """The vectors as `sentence-transformers` makes them: means of states, of length 1."""
    tokenizer, model = AutoTokenizer.from_pretrained(embedder), AutoModel.from_pretrained(embedder)
    found = []
    for text in TEXTS:
        with torch.inference_mode():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        found.append(torch.nn.functional.normalize(states.mean(0), dim=0).tolist())
    return found


def embed(stack: Stack, given: str | Sequence[str], **options: Any) -> list[list[float]]:
    response = stack.post("/v1/embeddings", {"input": given, **options})
    assert response.status_code == 200, response.text
    return [one["embedding"] for one in response.json()["data"]]


def test_vectors_are_those_of_transformers(
    vectors_system: Stack, expected: list[list[float]]
) -> None:
    for found, vector in zip(embed(vectors_system, TEXTS), expected, strict=True):
        assert cosine(found, vector) >= 0.99999


def test_a_vector_is_the_same_alone_and_in_company(vectors_system: Stack) -> None:
    together = embed(vectors_system, [*TEXTS, *TEXTS[::-1]])
    alone = [embed(vectors_system, text)[0] for text in TEXTS]
    assert together == [*alone, *alone[::-1]]


def test_an_answer_is_nearer_to_its_question(vectors_system: Stack) -> None:
    lien, question, _, giraffe, *_ = embed(vectors_system, TEXTS)
    assert cosine(question, giraffe) > 0.6 > 0.2 > cosine(question, lien)


def test_a_text_is_cut_off_as_transformers_cuts_it(vectors_system: Stack, embedder: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(embedder), AutoModel.from_pretrained(embedder)
    long = " ".join(TEXTS) * 4
    for n_tokens in (256, -1):
        length = 512 if n_tokens == -1 else n_tokens
        cut = tokenizer(long, truncation=True, max_length=length, return_tensors="pt")
        with torch.inference_mode():
            expected = model(**cut).last_hidden_state[0].mean(0).tolist()
        (found,) = embed(vectors_system, long, truncate_prompt_tokens=n_tokens)
        assert cosine(found, expected) >= 0.99999


def test_a_text_beyond_the_positions_of_the_model_names_its_index(vectors_system: Stack) -> None:
    response = vectors_system.post("/v1/embeddings", {"input": ["short", "giraffe " * 600]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("input[1]", "context_length_exceeded")
    assert "512 at most" in error["message"]


def test_langchain_and_llama_index_get_vectors(clients: Clients, vectors_system: Stack) -> None:
    texts = ["A lien is a right.", "A giraffe is tall.", "Nothing."]
    ours = embed(vectors_system, texts)
    for client in ("langchain", "llama_index"):
        for found, vector in zip(clients.case(client, "embed", vectors_system), ours, strict=True):
            assert cosine(found, vector) >= 0.99999, client


def test_cohere_and_jina_rank_documents(clients: Clients, scores_system: Stack) -> None:
    body = {
        "query": "How tall is a giraffe?",
        "documents": ["A lien is a right.", "A giraffe is tall.", "Nothing."],
        "top_n": 2,
    }
    response = scores_system.post("/v1/rerank", body)
    assert response.status_code == 200, response.text
    ours = [[one["index"], one["relevance_score"]] for one in response.json()["results"]]
    assert clients.case("cohere", "rerank", scores_system) == [ours, ours]
    assert clients.case("llama_index", "rerank", scores_system) == ours
