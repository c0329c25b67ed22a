"""The text models of checkpoints that take images too, against `transformers` on text alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    Gemma3Config,
    Gemma4Config,
    Gemma4UnifiedConfig,
    Kimi_K25Config,
    LlavaConfig,
    Mistral3Config,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
)

from services.worker.models import UnsupportedModel
from services.worker.models.config_file import read_config
from services.worker.models.tensor_files import CheckpointError
from services.worker.models.text_half import WRAPPERS
from tests.checkpoints import SMALL, Oracle, edit_config, write_family_checkpoint
from tests.worker.models.test_models import compare_random_schedule
from tests.worker.models.test_registry import (
    GEMMA4,
    HYBRID,
    HYBRID_EXPERTS,
    LATENT,
    SHAPES,
    last_logits,
)
from tests.worker.pipeline import Pipeline

EYE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_EYE: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "out_hidden_size": 48,
    "num_heads": 2,
}


GEMMA4_EYE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "position_embedding_size": 16,
}


def mrope(*section: int) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 300.0, "mrope_section": list(section)}
    return {"rope_parameters": rope}


def hybrid_mrope(*section: int) -> dict[str, Any]:
    rope = {"partial_rotary_factor": 0.25, "mrope_interleaved": True}
    return {"rope_parameters": {**mrope(*section)["rope_parameters"], **rope}}


HALVES: dict[str, PreTrainedConfig] = {
    "gemma3": Gemma3Config(
        text_config={**SMALL, "head_dim": 8, "sliding_window": 6},
        vision_config=EYE,
        mm_tokens_per_image=4,
    ),
    "gemma4": Gemma4Config(text_config=GEMMA4, vision_config=GEMMA4_EYE),
    "gemma4_unified": Gemma4UnifiedConfig(
        text_config={
            **SMALL,
            "head_dim": 8,
            "global_head_dim": 12,
            "num_global_key_value_heads": 6,
            "attention_k_eq_v": True,
            "sliding_window": 6,
        },
        vision_config=None,
    ),
    "kimi_k25": Kimi_K25Config(
        text_config={
            **{key: value for key, value in LATENT.items() if key != "num_key_value_heads"},
            "model_type": "kimi_k2",
            "num_hidden_layers": 3,
            "num_key_value_heads": 6,
            "n_group": 1,
            "topk_group": 1,
        },
        vision_config=EYE,
        projection_hidden_size=64,
        tie_word_embeddings=False,
    ),
    "llava": LlavaConfig(text_config={**SMALL, "model_type": "llama"}, vision_config=EYE),
    "llava-mistral": LlavaConfig(
        text_config={**SMALL, "model_type": "mistral", "sliding_window": 9}, vision_config=EYE
    ),
    "mistral3": Mistral3Config(
        text_config={**SMALL, "model_type": "mistral", "head_dim": 10, "sliding_window": 7},
        vision_config=EYE,
        tie_word_embeddings=False,
    ),
    "mistral3-ministral3": Mistral3Config(
        text_config={
            **SMALL,
            "model_type": "ministral3",
            "head_dim": 10,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 300.0,
                "factor": 8.0,
                "original_max_position_embeddings": 6,
                "llama_4_scaling_beta": 0.2,
            },
        },
        vision_config=EYE,
        tie_word_embeddings=False,
    ),
    "qwen2_vl": Qwen2VLConfig(
        text_config={**SMALL, **mrope(1, 1, 2)},
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 48, "num_heads": 2},
        tie_word_embeddings=True,
    ),
    "qwen2_5_vl": Qwen2_5_VLConfig(
        text_config={
            **SMALL,
            **mrope(2, 1, 1),
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
        vision_config={**QWEN_EYE, "fullatt_block_indexes": [0]},
    ),
    "qwen3_5": Qwen3_5Config(
        text_config={**HYBRID, **hybrid_mrope(1, 1, 1)},
        vision_config={**QWEN_EYE, "num_position_embeddings": 4},
    ),
    "qwen3_5_moe": Qwen3_5MoeConfig(
        text_config={**HYBRID, **HYBRID_EXPERTS, **hybrid_mrope(1, 1, 1)},
        vision_config={**QWEN_EYE, "num_position_embeddings": 4},
    ),
    "qwen3_vl": Qwen3VLConfig(
        text_config={**SMALL, **mrope(2, 2, 1), "head_dim": 10, "attention_bias": True},
        vision_config={**QWEN_EYE, "deepstack_visual_indexes": [0]},
    ),
}


def name_layers_as_published(path: Path) -> None:
    """Renames the text model's layers, for which `transformers` writes the vision model's word."""
    text = "language_model.model."
    renamed = {
        name.replace(f"{text}blocks.", f"{text}layers."): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(renamed, path, metadata={"format": "pt"})


# Three kinds of names of tensors are read in parts; the other models are computed whole, and in
# parts where there is time.
IN_PARTS = {"gemma4", "qwen2_vl", "qwen3_5"}
CUTS = [  # config, stages, ranks that share each
    pytest.param(
        config,
        n,
        n,
        id=f"{name}-{n}-{n}",
        marks=() if n == (2 if name in IN_PARTS else 1) else pytest.mark.thorough,
    )
    for name, config in HALVES.items()
    for n in (1, 2)
]


@pytest.mark.parametrize(("config", "n_stages", "tp_size"), CUTS)
def test_text_alone_has_the_oracles_logits_and_tokens(
    tmp_path: Path, config: PreTrainedConfig, n_stages: int, tp_size: int
) -> None:
    write_family_checkpoint(tmp_path, config)
    if isinstance(config, Kimi_K25Config):
        name_layers_as_published(tmp_path / "model.safetensors")
    pipeline = Pipeline(tmp_path, n_stages=n_stages, tp_size=tp_size)
    compare_random_schedule(pipeline, Oracle(tmp_path), seed=n_stages)


@pytest.mark.parametrize("half", ["gemma3", "qwen3_vl"])
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "model."])
def test_tensors_are_found_wherever_files_have_kept_the_text_model(
    tmp_path: Path, half: str, prefix: str
) -> None:
    write_family_checkpoint(tmp_path, HALVES[half])
    tokens = list(range(5, 30))
    expected = last_logits(tmp_path, tokens)
    path = tmp_path / "model.safetensors"
    (stored,) = (
        name.removesuffix("norm.weight")
        for name in load_file(path)
        if name.endswith("model.norm.weight")
    )
    renamed = {
        name.replace(stored, prefix) if name.startswith(stored) else name: tensor
        for name, tensor in load_file(path).items()
    }
    save_file(renamed, path)
    assert torch.equal(last_logits(tmp_path, tokens), expected)


def test_the_text_of_gemma3n_is_the_same_beside_images_and_sounds(tmp_path: Path) -> None:
    # Its vision model is another package's, so `transformers` alone cannot write one.
    write_family_checkpoint(tmp_path, SHAPES["gemma3n"])
    tokens = list(range(5, 30))
    expected = last_logits(tmp_path, tokens)
    path, config_path = tmp_path / "model.safetensors", tmp_path / "config.json"
    prefix = "model.language_model."
    save_file({n.replace("model.", prefix, 1): t for n, t in load_file(path).items()}, path)
    whole = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "audio_config": {"hidden_size": 8},
        "audio_token_id": 190,
        "text_config": json.loads(config_path.read_text()),
        "vision_config": {"hidden_size": 8},
        "vision_soft_tokens_per_image": 4,
    }
    config_path.write_text(json.dumps(whole))
    assert torch.equal(last_logits(tmp_path, tokens), expected)


@pytest.mark.parametrize("half", ["qwen2_vl", "qwen2_5_vl"])
def test_older_files_have_the_text_model_beside_the_vision_model(tmp_path: Path, half: str) -> None:
    write_family_checkpoint(tmp_path, HALVES[half])
    nested = read_config(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope"}}
    flat["rope_scaling"]["mrope_section"] = rope["mrope_section"]
    model_type = {"model_type": config["model_type"]}
    path.write_text(json.dumps({**text, **config, **flat, **model_type}))
    assert read_config(tmp_path) == nested


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        (architecture, kind)
        for architecture, models in WRAPPERS.items()
        for kind in models
        if kind in CONFIG_MAPPING and not kind.endswith("_vl")  # which older files say
    ],
)
def test_what_a_file_leaves_out_is_what_the_oracle_takes(architecture: str, kind: str) -> None:
    config = CONFIG_MAPPING[kind]()
    for key, value in WRAPPERS[architecture][kind].defaults.items():
        if key == "rope_theta":
            assert config.rope_parameters[key] == value
        else:
            assert getattr(config, key) == value, key


def test_ends_of_outputs_and_ties_are_those_of_the_whole_checkpoint(tmp_path: Path) -> None:
    write_family_checkpoint(tmp_path, HALVES["mistral3"])
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    config = read_config(edit_config(tmp_path, eos_token_id=[7, 8], tie_word_embeddings=True))
    assert config.eos_token_ids == (7, 8)
    assert config.tie_word_embeddings


@pytest.mark.parametrize(
    ("half", "changes", "named"),
    [
        ("gemma3", {"text_config": {"model_type": "gemma4_text"}}, "gemma4_text"),
        ("gemma3", {"text_config": 3}, "text_config"),
        ("gemma3", {"audio_config": {"hidden_size": 8}}, "audio_config"),
        ("gemma3", {"hidden_size": 8}, "hidden_size"),
        ("llava", {"text_config": {"model_type": ["llama"]}}, "model_type"),
        ("llava", {"text_config": {"model_type": "llama", "num_experts": 3}}, "num_experts"),
        ("qwen3_vl", {"text_config": {"use_sliding_window": True}}, "use_sliding_window"),
    ],
)
def test_what_is_neither_the_familys_nor_about_images_is_refused_by_name(
    tmp_path: Path, half: str, changes: dict[str, Any], named: str
) -> None:
    write_family_checkpoint(tmp_path, HALVES[half])
    read_config(tmp_path)
    with pytest.raises(UnsupportedModel, match=named):
        read_config(edit_config(tmp_path, **changes))


def test_experts_may_be_stored_one_by_one_or_all_in_one_tensor(tmp_path: Path) -> None:
    write_family_checkpoint(tmp_path, HALVES["qwen3_5_moe"])
    tokens = list(range(5, 30))
    expected = last_logits(tmp_path, tokens)
    path = tmp_path / "model.safetensors"
    stacked = load_file(path)
    modules = {name.partition(".experts.")[0] for name in stacked if ".experts.0." in name}
    assert modules, "the oracle stores them one by one"
    n_experts = HYBRID_EXPERTS["num_experts"]
    for module in modules:
        gate, up, down = (
            [stacked.pop(f"{module}.experts.{i}.{kind}_proj.weight") for i in range(n_experts)]
            for kind in ("gate", "up", "down")
        )
        pairs = [torch.cat(pair) for pair in zip(gate, up, strict=True)]
        stacked[f"{module}.experts.gate_up_proj"] = torch.stack(pairs)
        stacked[f"{module}.experts.down_proj"] = torch.stack(down)
    save_file(stacked, path)
    assert torch.equal(last_logits(tmp_path, tokens), expected)
    for module in modules:
        stacked[f"{module}.experts.down_proj"] = stacked[f"{module}.experts.down_proj"][:-1].clone()
    save_file(stacked, path)
    with pytest.raises(CheckpointError, match=r"experts\.down_proj has shape .* of expert 6"):
        last_logits(tmp_path, tokens)
