"""Encoders: vectors and scores are those of `transformers`, and in any company the same to the
bit. A text runs whole."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    BertConfig,
    CamembertConfig,
    LlamaConfig,
    PreTrainedConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

from kernels.pytorch.operations import TORCH
from services.worker.engine.kv_cache import kv_block_bytes
from services.worker.engine.plan import PlanError
from services.worker.models import UnsupportedModel
from services.worker.models.checkpoint import open_checkpoint
from tests.checkpoints import SMALL, edit_config, write_family_checkpoint
from tests.pooling import (
    cosine,
    oracle_score,
    oracle_vector,
    write_cross_encoder,
    write_encoder,
    write_pooling,
)
from tests.worker.pipeline import Pipeline, Span, needs_int8

SIZES: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 90,
    "initializer_range": 0.25,
}
PROMPT = [5, 17, 98, 3, 150, 42, 7, 61, 12, 33, 8]
LONG = [(7 * i + 5) % 199 for i in range(83)]  # without tokens of padding
LAYOUTS = [(1, 1), (2, 1), (1, 2)]

ENCODERS: dict[str, PreTrainedConfig] = {
    "bert": BertConfig(**SIZES),
    "bert-other": BertConfig(
        **{**SIZES, "hidden_act": "gelu_new", "type_vocab_size": 3, "layer_norm_eps": 1e-5}
    ),
    "roberta": RobertaConfig(**{**SIZES, "type_vocab_size": 1}),
    "xlm-roberta": XLMRobertaConfig(**{**SIZES, "type_vocab_size": 1, "pad_token_id": 4}),
    "camembert": CamembertConfig(**{**SIZES, "type_vocab_size": 1}),
}

KINDS = {
    "bert": "mean",
    "bert-other": "cls",
    "roberta": "last",
    "xlm-roberta": "mean",
    "camembert": "cls",
}
"""The pooling with which vectors of each encoder are compared with the oracle's."""


def of_layouts(cases: Iterable[tuple[str, ...]]) -> list[Any]:
    """Each case on one stage, and BERT on several ranks. The others on several ranks take long."""
    return [
        pytest.param(
            *case,
            *layout,
            id=f"{case[0]}-{layout[0]}-{layout[1]}",
            marks=() if case[0] == "bert" or layout == (1, 1) else pytest.mark.thorough,
        )
        for case in cases
        for layout in LAYOUTS
    ]


def pipeline_of(directory: Path, **options: Any) -> Pipeline:
    return Pipeline(directory, **{"dtype": "float32", "max_model_len": None, **options})


def vector(pipeline: Pipeline, token_ids: Sequence[int]) -> Tensor:
    pipeline.admit(0, len(token_ids), wants_vector=True)
    pipeline.run([Span(0, token_ids, sample=False)])
    pipeline.release(0)
    return pipeline.vectors.pop(0)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert cosine(found.tolist(), expected.tolist()) >= 0.99999
    assert (found - expected).abs().max() <= 1e-4


@pytest.mark.parametrize(("family", "kind", "n_stages", "tp_size"), of_layouts(KINDS.items()))
def test_vectors_are_those_of_transformers(
    tmp_path: Path, family: str, kind: str, n_stages: int, tp_size: int
) -> None:
    write_encoder(tmp_path, ENCODERS[family], kind)
    pipeline = pipeline_of(tmp_path, n_stages=n_stages, tp_size=tp_size)
    for prompt in (PROMPT, LONG):
        assert_close(vector(pipeline, prompt), oracle_vector(tmp_path, prompt, kind))


def test_pytorch_has_the_same_vectors(tmp_path: Path) -> None:
    write_encoder(tmp_path, ENCODERS["bert"], "mean")
    pipeline = pipeline_of(tmp_path, interpreted_on=TORCH)
    assert_close(vector(pipeline, LONG), oracle_vector(tmp_path, LONG, "mean"))


def test_hidden_states_are_those_of_transformers_in_float32(tmp_path: Path) -> None:
    write_encoder(tmp_path, ENCODERS["bert"], "cls")
    model = AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([LONG])).last_hidden_state[0]
    pipeline = pipeline_of(tmp_path)
    for i in (0, 40, 82):  # the first token of a prompt that begins there attends to all the rest
        turned = [*LONG[i:], *LONG[:i]]
        with torch.inference_mode():
            state = model(torch.tensor([turned])).last_hidden_state[0, 0]
        assert (vector(pipeline, turned) - state).abs().max() <= 1e-4
    assert expected.std() > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["mean", "cls"])
def test_a_vector_is_the_same_in_any_company(tmp_path: Path, kind: str, dtype: str) -> None:
    write_encoder(tmp_path, ENCODERS["bert"], kind)
    pipeline = pipeline_of(tmp_path, dtype=dtype)
    prompts = [PROMPT, LONG, PROMPT[:1], LONG[5:50], PROMPT]
    alone = [vector(pipeline, prompt) for prompt in prompts]
    order = [3, 0, 4, 1, 2]
    for row in order:
        pipeline.admit(row, len(prompts[row]), wants_vector=True)
    pipeline.run([Span(row, prompts[row], sample=False) for row in order])
    for row, expected in enumerate(alone):
        assert torch.equal(pipeline.vectors.pop(row), expected)
        pipeline.release(row)


@pytest.mark.parametrize(
    ("family", "n_stages", "tp_size"), of_layouts([("bert",), ("roberta",), ("xlm-roberta",)])
)
def test_scores_of_pairs_are_those_of_transformers(
    tmp_path: Path, family: str, n_stages: int, tp_size: int
) -> None:
    config = ENCODERS[family]
    write_cross_encoder(tmp_path, config)
    pipeline = pipeline_of(tmp_path, n_stages=n_stages, tp_size=tp_size)
    has_types = family == "bert"
    types = [0] * 4 + [1] * 7 if has_types else None
    prompt = PROMPT
    if types is not None:
        prompt = [token + 199 * kind for token, kind in zip(PROMPT, types, strict=True)]
    pooling = open_checkpoint(tmp_path).pooling
    assert pooling is not None
    assert pooling.token_type_stride == (199 if has_types else 0)
    expected = oracle_score(tmp_path, PROMPT, types)
    assert vector(pipeline, prompt).tolist() == pytest.approx([expected], abs=1e-4)
    if has_types:
        assert abs(oracle_score(tmp_path, PROMPT) - expected) > 0.01


@needs_int8
@pytest.mark.parametrize(("quantization", "least"), [("int8", 0.999), ("int4", 0.9)])
def test_a_quantised_encoder_makes_nearly_the_same_vectors(
    tmp_path: Path, quantization: str, least: float
) -> None:
    config = BertConfig(**{**SIZES, "hidden_size": 96, "intermediate_size": 192})
    write_encoder(tmp_path, config, "mean")
    found = vector(pipeline_of(tmp_path, quantization=quantization), LONG)
    expected = oracle_vector(tmp_path, LONG, "mean")
    assert least <= cosine(found.tolist(), expected.tolist()) < 0.9999999


def test_a_text_that_is_cut_is_refused(tmp_path: Path) -> None:
    write_encoder(tmp_path, ENCODERS["bert"], "mean")
    pipeline = pipeline_of(tmp_path)
    pipeline.admit(0, len(PROMPT), wants_vector=True)
    with pytest.raises(PlanError, match=r"11 tokens from 0 on, and .* whole"):
        pipeline.run([Span(0, PROMPT[:5], sample=False)])


def test_keys_and_values_of_all_layers_of_a_stage_share_one_place(tmp_path: Path) -> None:
    write_encoder(tmp_path, ENCODERS["bert"], "mean")
    config = open_checkpoint(tmp_path).config
    n_bytes = kv_block_bytes(config, range(3), block_size=4, dtype=torch.float32, tp_size=1)
    assert n_bytes == 4 * 2 * 48 * 4


@pytest.mark.parametrize(
    ("family", "context"), [("bert", 90), ("roberta", 88), ("xlm-roberta", 85)]
)
def test_positions_before_the_first_token_are_no_context(
    tmp_path: Path, family: str, context: int
) -> None:
    write_encoder(tmp_path, ENCODERS[family], "mean")
    assert open_checkpoint(tmp_path).config.max_position_embeddings == context
    assert open_checkpoint(tmp_path, max_model_len=40).config.max_position_embeddings == 40
    with pytest.raises(UnsupportedModel, match=f"max_model_len .* {context} tokens"):
        open_checkpoint(tmp_path, max_model_len=context + 1)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"hidden_act": "silu"}, "hidden_act"),
        ({"use_entity_aware_attention": True}, "use_entity_aware_attention"),
        ({"vocab_size": "199"}, "vocab_size"),
    ],
)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    edit_config(write_encoder(tmp_path, ENCODERS["bert"], "mean"), **keys)
    with pytest.raises(UnsupportedModel, match=message):
        open_checkpoint(tmp_path)


def test_an_encoder_needs_pooling_and_generates_nothing(tmp_path: Path) -> None:
    write_encoder(tmp_path, ENCODERS["bert"], "mean")
    (tmp_path / "modules.json").unlink()
    with pytest.raises(UnsupportedModel, match=r"generates no tokens.* `pooling` says"):
        open_checkpoint(tmp_path)
    pooling = open_checkpoint(tmp_path, pooling="cls").pooling
    assert pooling is not None
    assert (pooling.kind, pooling.runs_whole, pooling.generates) == ("cls", True, False)
    assert pooling.needs_all_states
    with pytest.raises(UnsupportedModel, match="yes-no"):
        open_checkpoint(tmp_path, pooling="yes-no")


def test_a_head_that_fills_in_tokens_is_not_read(tmp_path: Path) -> None:
    write_family_checkpoint(tmp_path, ENCODERS["bert"], kind=AutoModelForMaskedLM)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["BertForMaskedLM"]
    write_pooling(tmp_path, "mean", size=48)
    expected = oracle_vector(tmp_path, PROMPT, "mean")
    assert_close(vector(pipeline_of(tmp_path), PROMPT), expected)


def test_the_old_key_of_cross_encoders_names_the_activation(tmp_path: Path) -> None:
    write_cross_encoder(tmp_path, ENCODERS["bert"])
    identity = "torch.nn.modules.linear.Identity"
    edit_config(tmp_path, sbert_ce_default_activation_function=identity)
    pooling = open_checkpoint(tmp_path).pooling
    assert pooling is not None
    assert (pooling.kind, pooling.has_sigmoid) == ("cls", False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_causal": True}, "is_causal True is not supported"),
        ({"type_vocab_size": "2"}, "type_vocab_size"),
    ],
)
def test_wrong_values_are_named_by_their_keys(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_encoder(tmp_path, ENCODERS["bert"], "mean")
    edit_config(tmp_path, is_causal=False)
    open_checkpoint(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(UnsupportedModel, match=message):
        open_checkpoint(tmp_path)


def test_positions_begin_behind_a_padding_token_that_there_can_be(tmp_path: Path) -> None:
    write_encoder(tmp_path, ENCODERS["roberta"], "mean")
    pooling = open_checkpoint(tmp_path).pooling
    assert pooling is not None
    assert pooling.padding_token_id == ENCODERS["roberta"].pad_token_id
    edit_config(tmp_path, pad_token_id=5000)
    with pytest.raises(UnsupportedModel, match="pad_token_id 5000 leaves none"):
        open_checkpoint(tmp_path)


def test_a_decoder_with_a_head_of_encoders_is_refused(tmp_path: Path) -> None:
    write_family_checkpoint(tmp_path, LlamaConfig(**SMALL))
    edit_config(tmp_path, architectures=["LlamaForMaskedLM"])
    with pytest.raises(UnsupportedModel, match="LlamaForMaskedLM"):
        open_checkpoint(tmp_path, load_format="random")
