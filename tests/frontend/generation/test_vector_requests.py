"""Requests for vectors and scores are refused before anything is made of each of their texts."""

import tracemalloc

import pytest

from services.common.errors import InvalidRequest
from services.frontend.generation.vector_requests import (
    embedding_request,
    score_request,
    vector_options,
)
from services.frontend.request.generation_request import GenerationRequest
from services.frontend.request.refusals import Refusals
from services.frontend.request.texts_field import TextsField
from services.frontend.request.vector_defaults import VectorDefaults
from services.frontend.text.pair_format import PairFormat
from services.frontend.text.prompt_encoder import PromptEncoder, TextLimits
from services.frontend.text.text_threads import TextThreads
from services.frontend.text.tokenizer import Tokenizer
from tests.frontend import checkpoints

QUERY = "q" * 100_000


def reranking(
    n_documents: int, *, query: str = "q", instruction: str | None = None, template: str = ""
) -> GenerationRequest:
    return score_request(
        [(query, "d")] * n_documents,
        vector_options(wants_score=True),
        format=PairFormat(template),
        instruction=instruction,
        model="",
        field=TextsField("documents"),
    )


def embedding(n_inputs: int, *, before: str) -> GenerationRequest:
    options = vector_options()
    return embedding_request(
        ["d"] * n_inputs,
        options,
        defaults=VectorDefaults(prompts={"it": before}),
        prompt_name="it",
        model="",
        field=TextsField("input"),
    )


@pytest.mark.parametrize("kind", ["query", "instruction", "template", "prompt_name"])
def test_what_all_texts_repeat_is_counted_and_not_copied(kind: str) -> None:
    encoder = PromptEncoder(
        Tokenizer(checkpoints.byte_level()),
        None,
        TextLimits(max_characters=10 * len(QUERY)),
        threads=TextThreads(Refusals()),
        refusals=Refusals(),
    )
    tracemalloc.start()
    try:
        if kind == "prompt_name":
            request = embedding(100, before=QUERY)
        elif kind == "template":
            request = reranking(100, template=QUERY + "{query}{document}")
        else:
            request = reranking(100, **{kind: QUERY})
        request.check()
        with pytest.raises(InvalidRequest, match="all texts together") as caught:
            encoder.check_length(request, None)
        _, n_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.field == ("input" if kind == "prompt_name" else "documents")
    assert n_bytes < 5 * len(QUERY)


def test_more_texts_than_may_be_are_refused_before_they_are_prompts() -> None:
    with pytest.raises(InvalidRequest, match="documents: has 1025 items; at most 1024"):
        reranking(1025)
    with pytest.raises(InvalidRequest, match="input: has 1025 items; at most 1024"):
        embedding(1025, before="")
