"""Vectors and scores of prompts: the oracle is `transformers`; in any company and however a prompt
is cut, a vector is the same to the bit."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from services.common.pooling import PoolingSetting
from services.worker.engine.plan import PlanError
from tests.checkpoints import SMALL, Oracle, write_family_checkpoint
from tests.pooling import cosine, oracle_score, oracle_vector, write_embedder, write_reranker
from tests.worker.pipeline import Pipeline, Span

PROMPT = [5, 17, 98, 3, 150, 42, 7, 61, 12, 33, 8]
LAYOUTS = [(1, 1), (2, 1), (1, 2)]
TIED = {**SMALL, "tie_word_embeddings": True}

FAMILIES: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**TIED, head_dim=16),
    "qwen2": Qwen2Config(**SMALL),
    "mistral": MistralConfig(**SMALL, sliding_window=None),
    "llama": LlamaConfig(**SMALL),
}


def vector(pipeline: Pipeline, token_ids: Sequence[int], *, cuts: Sequence[int] = ()) -> Tensor:
    """The vector of a prompt that runs alone, cut at the positions `cuts`."""
    pipeline.admit(0, len(token_ids), wants_vector=True)
    for start, end in zip((0, *cuts), (*cuts, len(token_ids)), strict=True):
        assert 0 not in pipeline.vectors
        pipeline.run([Span(0, token_ids[start:end], sample=False)])
    pipeline.release(0)
    return pipeline.vectors.pop(0)


@pytest.mark.parametrize(("n_stages", "tp_size"), LAYOUTS)
@pytest.mark.parametrize(
    ("family", "kind"), [("qwen3", "last"), ("mistral", "mean"), ("qwen2", "cls")]
)
def test_vectors_are_those_of_transformers(
    tmp_path: Path, family: str, kind: str, n_stages: int, tp_size: int
) -> None:
    write_embedder(tmp_path, FAMILIES[family], kind)
    pipeline = Pipeline(tmp_path, dtype="float32", n_stages=n_stages, tp_size=tp_size)
    found = vector(pipeline, PROMPT)
    expected = oracle_vector(tmp_path, PROMPT, kind)
    assert cosine(found.tolist(), expected.tolist()) >= 0.99999
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("kind", ["last", "mean", "cls"])
def test_a_vector_is_the_same_however_its_prompt_is_cut_and_in_company(
    tmp_path: Path, kind: str
) -> None:
    config = FAMILIES["llama"]
    write_embedder(tmp_path, config, kind, is_bare=False)
    pipeline = Pipeline(tmp_path, dtype="bfloat16")
    alone = vector(pipeline, PROMPT)
    assert alone.isfinite().all()
    for cuts in [(1,), (10,), (3, 4, 9), tuple(range(1, 11))]:
        assert torch.equal(vector(pipeline, PROMPT, cuts=cuts), alone)
    other = [9, 9, 4, 150, 2]
    pipeline.admit(0, len(PROMPT), wants_vector=True)
    pipeline.admit(1, len(other), wants_vector=True)
    pipeline.run([Span(1, other[:2], sample=False), Span(0, PROMPT[:7], sample=False)])
    pipeline.run([Span(0, PROMPT[7:], sample=False), Span(1, other[2:], sample=False)])
    assert torch.equal(pipeline.vectors.pop(0), alone)
    pipeline.release(0)
    pipeline.release(1)
    assert torch.equal(vector(pipeline, other), pipeline.vectors.pop(1))


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_a_model_that_answers_makes_vectors_beside_its_tokens(
    tmp_path: Path, kind: PoolingSetting
) -> None:
    write_family_checkpoint(tmp_path, FAMILIES["llama"])
    plain, both = (
        Pipeline(tmp_path, dtype="float32"),
        Pipeline(tmp_path, dtype="float32", pooling=kind),
    )
    tokens: dict[Pipeline, Any] = {}
    for pipeline in (plain, both):
        pipeline.admit(3, 4)
        company: list[Span] = []
        if pipeline is both:
            pipeline.admit(0, len(PROMPT), wants_vector=True)
            company = [Span(0, PROMPT, sample=False)]
        (token,), logits = pipeline.run([*company, Span(3, [4, 5, 6, 7])])
        tokens[pipeline] = token, logits.tolist()
    assert tokens[plain] == tokens[both]
    expected = oracle_vector(tmp_path, PROMPT, kind)
    assert cosine(both.vectors[0].tolist(), expected.tolist()) >= 0.99999


@pytest.mark.parametrize(("n_stages", "tp_size"), LAYOUTS)
def test_scores_of_a_classification_head_are_those_of_transformers(
    tmp_path: Path, n_stages: int, tp_size: int
) -> None:
    write_reranker(tmp_path, Qwen3Config(**TIED, head_dim=16))
    pipeline = Pipeline(tmp_path, dtype="float32", n_stages=n_stages, tp_size=tp_size)
    found = vector(pipeline, PROMPT, cuts=(4,))
    assert found.tolist() == pytest.approx([oracle_score(tmp_path, PROMPT)], rel=1e-4, abs=1e-4)


def test_a_vector_of_a_model_without_pooling_is_refused(tmp_path: Path) -> None:
    write_family_checkpoint(tmp_path, FAMILIES["llama"])
    pipeline = Pipeline(tmp_path, dtype="float32")
    pipeline.admit(0, 3, wants_vector=True)
    with pytest.raises(PlanError, match="wants a vector"):
        pipeline.run([Span(0, [1, 2, 3], sample=False)])


def test_a_tied_model_without_prefix_in_its_names_also_answers(tmp_path: Path) -> None:
    write_embedder(tmp_path, FAMILIES["qwen3"], "last", is_bare=False)
    (tmp_path / "modules.json").unlink()
    pipeline = Pipeline(tmp_path, dtype="float32", pooling="last")
    pipeline.admit(0, len(PROMPT))
    (token,), _ = pipeline.run([Span(0, PROMPT)])
    assert token == Oracle(tmp_path).logits(PROMPT)[-1].argmax()
