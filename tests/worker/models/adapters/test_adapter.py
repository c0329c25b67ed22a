"""Adapters as files: what is read, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from services.worker.models.adapters.adapter import Adapter, adapter_digest
from services.worker.models.adapters.adapter_config import AdapterError, parse_lora_config
from services.worker.models.adapters.text_files import check_text_files
from tests.adapters import write_adapter

MODULE = "model.layers.0.self_attn.q_proj"
SIZES = {MODULE: (12, 8)}


def write(directory: Path, **config: Any) -> Path:
    return write_adapter(directory, SIZES, ["q_proj"], **config)


def test_scales_follow_rank_alpha_and_patterns(tmp_path: Path) -> None:
    write(tmp_path, rank=16, alpha=32, rank_pattern={"up_proj": 4}, alpha_pattern={"v_.*": 8})
    config = parse_lora_config((tmp_path / "adapter_config.json").read_bytes())
    assert config.scale_of(MODULE) == 2
    assert config.rank_of("model.layers.3.mlp.up_proj") == 4
    assert config.rank_of("model.layers.3.mlp.group_proj") == 16
    assert config.scale_of("model.layers.3.self_attn.v_proj") == 0.5
    write(tmp_path, rank=16, alpha=32, use_rslora=True)
    assert parse_lora_config((tmp_path / "adapter_config.json").read_bytes()).scale_of(MODULE) == 8


@pytest.mark.parametrize(
    "config",
    [
        {"peft_type": "IA3"},
        {"peft_type": "PREFIX_TUNING"},
        {"use_dora": True},
        {"bias": "lora_only"},
        {"bias": "all"},
        {"modules_to_save": ["embed_tokens"]},
        {"trainable_token_indices": [3, 4]},
        {"lora_bias": True},
        {"target_parameters": ["mlp.experts.gate_up_proj"]},
        {"layer_replication": [[0, 4], [2, 5]]},
        {"alora_invocation_tokens": [5]},
        {"init_lora_weights": "pissa"},
        {"use_qalora": True},
        {"something_new": {"key": 1}},
        {"r": 0},
        {"r": 257},
        {"r": True},
        {"lora_alpha": "many"},
        {"lora_alpha": 10**400},
        {"lora_alpha": 1e308},
        {"rank_pattern": {"q_proj": 1000}},
        {"alpha_pattern": {"(q_proj": 4}},
        {"use_rslora": "yes"},
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_by_name(tmp_path: Path, config: dict[str, Any]) -> None:
    write(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    (field,) = config
    with pytest.raises(
        AdapterError, match=rf"adapter an-adapter: .*adapter_config.json: {field}: "
    ):
        Adapter("an-adapter", tmp_path)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("model.embed_tokens.lora_embedding_A", (4, 9), "trained embeddings"),
        (f"{MODULE}.lora_magnitude_vector", (12,), "DoRA"),
        (f"{MODULE}.lora_B.bias", (12,), "trained biases"),
        ("lm_head.weight", (9, 8), "none of a LoRA adapter"),
        (f"{MODULE}.lora_A.weight", (5, 8), r"lora_A of \[5, 8\] .* says rank 4"),
        ("model.layers.0.self_attn.k_proj.lora_A.weight", (4, 8), r"lora_B of \[\]"),
    ],
)
def test_other_tensors_are_refused(
    tmp_path: Path, name: str, shape: tuple[int, ...], message: str
) -> None:
    write(tmp_path)
    key = f"base_model.model.{MODULE}.lora_"
    tensors = {f"{key}A.weight": torch.ones(4, 8), f"{key}B.weight": torch.ones(12, 4)}
    tensors[f"base_model.model.{name}"] = torch.ones(shape)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=message):
        Adapter("an-adapter", tmp_path)


def test_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"adapter_config\.json does not exist"):
        Adapter("an-adapter", tmp_path)
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(AdapterError, match="cannot be read"):
        Adapter("an-adapter", tmp_path)
    write(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(AdapterError, match="holds no JSON object"):
        Adapter("an-adapter", tmp_path)


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    write(tmp_path, std=float("inf"))
    with pytest.raises(AdapterError, match="not finite"):
        Adapter("an-adapter", tmp_path).read().matrices(MODULE)


@pytest.mark.parametrize("name", ["", "-x", "a b", "a=b", "x" * 129])
def test_names_that_would_confuse_others_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(AdapterError, match="is no name"):
        Adapter(name, write(tmp_path))


def test_the_digest_is_that_of_all_files(tmp_path: Path) -> None:
    digests = {
        adapter_digest(write(tmp_path / "a")),
        adapter_digest(write(tmp_path / "b", seed=1)),
        adapter_digest(write(tmp_path / "c", alpha=17)),
    }
    assert len(digests) == 3
    assert adapter_digest(write(tmp_path / "d")) in digests


TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "added_tokens": [],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
}


def write_texts(directory: Path, tokenizer: Any = None, template: str = "", **config: Any) -> Path:
    directory.mkdir(exist_ok=True)
    if tokenizer is not None:
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    if template:
        (directory / "chat_template.jinja").write_text(template)
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_equal_tokenizers_and_templates_are_taken(tmp_path: Path) -> None:
    model = write_texts(tmp_path / "model", TOKENIZER, chat_template="{{ x }}", eos_token="b")
    own = write_texts(
        tmp_path / "adapter",
        {**TOKENIZER, "truncation": {"max_length": 512}},
        template="{{ x }}",
        eos_token={"content": "b"},
        pad_token="a",
    )
    check_text_files("x", own, model)
    (tmp_path / "none").mkdir()
    check_text_files("x", tmp_path / "none", model)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"tokenizer": {**TOKENIZER, "model": {"vocab": {}}}}, "is another tokenizer than"),
        ({"template": "{{ y }}"}, "chat template is another one"),
        ({"eos_token": "a"}, "eos_token is another one"),
    ],
)
def test_other_tokenizers_and_templates_are_refused(
    tmp_path: Path, other: dict[str, Any], message: str
) -> None:
    model = write_texts(tmp_path / "model", TOKENIZER, "{{ x }}", eos_token="b")
    given = {"tokenizer": TOKENIZER, "template": "{{ x }}", "eos_token": "b", **other}
    with pytest.raises(AdapterError, match=rf"adapter x: .*{message}"):
        check_text_files("x", write_texts(tmp_path / "adapter", **given), model)
