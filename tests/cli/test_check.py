"""`orcinus check` says what a checkpoint is and takes, as stages and frontends will find it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import BertConfig, Qwen3_5TextConfig, Qwen3Config

from services.cli import check, inspection
from services.worker.models.checkpoint import load_stage
from services.worker.models.tensor_files import CheckpointError
from services.worker.models.weights import LoadFormat
from tests.checkpoints import SMALL, write_checkpoint, write_family_checkpoint
from tests.frontend.checkpoints import word_piece
from tests.limits import HANG_S
from tests.pooling import write_embedder, write_encoder
from tests.worker.models.quantised_writers import quantise
from tests.worker.models.test_quantised_checkpoints import SCHEMES, SIZES
from tests.worker.models.test_registry import SHAPES

DEMO = Path(__file__).parents[2] / "models" / "demo"


def run(model: Path | str) -> subprocess.CompletedProcess[str]:
    """Runs the command."""
    return subprocess.run(
        [sys.executable, "-m", "services.cli", "check", str(model)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def facts(model: Path, *arguments: str) -> dict[str, Any]:
    """What the inspection finds."""
    return inspection.inspect(model, inspection.parser().parse_args([str(model), *arguments]))


def copied(tmp_path: Path, **config: Any) -> Path:
    """The demo model, with other values in its configuration."""
    directory = tmp_path / "model"
    shutil.copytree(DEMO, directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return directory


def loaded(model: Path, load_format: LoadFormat) -> None:
    """Loads a checkpoint as a worker does that `orcinus serve` starts."""
    load_stage(
        model,
        stage_index=0,
        n_stages=1,
        tp_rank=0,
        tp_size=1,
        dtype="auto",
        device=torch.device("cpu"),
        on_progress=lambda done, total: None,
        load_format=load_format,
    )


def n_elements(model: Path) -> int:
    with safe_open(model / "model.safetensors", framework="numpy") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    total = 0
    for shape in shapes:
        n = 1
        for size in shape:
            n *= size
        total += n
    return total


def test_the_demo_model_is_what_its_files_are() -> None:
    found = facts(DEMO)
    config = json.loads((DEMO / "config.json").read_text())
    assert found["refused"] == []
    assert found["n_parameters"] == n_elements(DEMO)
    assert found["rank_bytes"] == [2 * found["n_parameters"]]
    assert found["n_layers"] == config["num_hidden_layers"]
    assert found["max_model_len"] == config["max_position_embeddings"]
    n_kv_elements = config["num_hidden_layers"] * config["num_key_value_heads"] * 2
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    assert found["kv_bytes_per_token"] == n_kv_elements * head_dim * 2
    assert found["has_chat_template"] is True
    assert found["tools"].startswith("none")  # its template refuses the results of tools
    n_bytes = 3 * 2**20
    room = facts(DEMO, "--kv-memory", str(n_bytes)) | {"model": "it"}
    first, *lines = check.report(room, kv_memory=n_bytes)
    assert first == "it can be served"
    assert f"{n_bytes // found['kv_bytes_per_token']:,} tokens in 3 MiB" in "\n".join(lines)


def test_ranks_divide_weights_and_keys() -> None:
    one, four = facts(DEMO), facts(DEMO, "--stages", "2", "--tp", "2")
    assert len(four["rank_bytes"]) == 4
    assert max(four["rank_bytes"]) < one["rank_bytes"][0]
    per_token = "kv_bytes_per_token_of_rank"
    assert four[per_token] * 4 == one[per_token] == one["kv_bytes_per_token"]


def test_latents_are_counted_once(tmp_path: Path) -> None:
    write_family_checkpoint(tmp_path, SHAPES["deepseek_v3"])
    one, two = facts(tmp_path), facts(tmp_path, "--tp", "2")
    n_latent, n_turned, n_layers = 20, 6, 4
    assert one["kv_bytes_per_token"] == n_layers * (n_latent + n_turned) * 4
    for found in (one, two):
        assert found["kv_bytes_per_token_of_rank"] == one["kv_bytes_per_token"]


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_layers_that_read_the_keys_of_others_are_cut_with_them(name: str, tmp_path: Path) -> None:
    write_family_checkpoint(tmp_path, SHAPES[name])
    assert facts(tmp_path)["tp_sizes"] == [1, 2, 6]


def test_states_of_requests_take_a_part_of_the_memory(tmp_path: Path) -> None:
    config = Qwen3_5TextConfig(
        **{**SMALL, "num_hidden_layers": 4},
        head_dim=24,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=10,
        linear_value_head_dim=14,
    )
    write_family_checkpoint(tmp_path, config)
    found = facts(tmp_path, "--stages", "2", "--tp", "2", "--kv-memory", "100000")
    n_bytes = 4 * (4 * 10 * 14 + 3 * (2 * 2 * 10 + 4 * 14))  # of one of three layers
    assert found["state_bytes_per_request"] == 3 * n_bytes
    assert found["state_bytes_per_request_of_rank"] == n_bytes, "half of two layers"
    assert found["tp_sizes"] == [1, 2]
    # The first stage has two of these layers and no keys, the second has one, and one with keys.
    n_rows = 50_000 // (n_bytes // 2) - 1
    assert found["room_requests"] == n_rows
    per_token = found["kv_bytes_per_token_of_rank"]
    assert found["room_tokens"] == (100_000 - (n_rows + 1) * (n_bytes // 2)) // per_token
    said = "\n".join(check.report({**found, "model": "it"}, kv_memory=100_000))
    assert f"and the states of {n_rows} requests at a time in 97.7 KiB" in said
    assert "a token, and states of" in said


def test_a_float_type_that_is_asked_for_counts() -> None:
    assert facts(DEMO, "--dtype", "float32")["rank_bytes"] == [4 * n_elements(DEMO)]


@pytest.mark.parametrize(
    ("config", "arguments", "reason"),
    [
        ({"architectures": ["NobodysModel"]}, [], "NobodysModel"),
        ({"new_option": 7}, [], "new_option"),
        ({"num_hidden_layers": 7}, [], "model.layers.6."),
        ({"hidden_size": 128}, [], "has shape"),
        ({}, ["--stages", "7"], "6 layers cannot be divided among 7 stages"),
        ({}, ["--tp", "3"], "num_attention_heads"),
    ],
    ids=["family", "option", "missing", "shape", "stages", "tp"],
)
def test_what_cannot_be_served_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], arguments: list[str], reason: str
) -> None:
    found = facts(copied(tmp_path, **config), *arguments) | {"model": "it"}
    lines = check.report(found, kv_memory=2**20)
    assert lines[0] == "it cannot be served"
    assert lines[1].startswith("  refused ")
    assert reason in lines[1]
    assert any("tool calls" in line for line in lines)  # what can be said is said all the same


def test_a_checkpoint_without_weights_can_be_served_with_random_ones(tmp_path: Path) -> None:
    directory = copied(tmp_path)
    (directory / "model.safetensors").unlink()
    assert any("model.safetensors" in reason for reason in facts(directory)["refused"])
    found, whole = facts(directory, "--load-format", "random"), facts(DEMO)
    assert found["refused"] == []
    assert found["rank_bytes"] == whole["rank_bytes"]
    lines = check.report({**found, "model": "it"}, kv_memory=2**20)
    assert lines[0] == "it can be served"
    assert any("of random numbers" in line for line in lines)
    with pytest.raises(CheckpointError, match="safetensors"):
        loaded(directory, "safetensors")
    loaded(directory, "random")


def test_what_values_come_from_and_what_is_ignored_is_said(tmp_path: Path) -> None:
    directory = copied(tmp_path, bad_words_ids=[[1]])
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    save_file(weights, directory / "model.safetensors")
    (directory / "pytorch_model.pth").touch()
    (directory / "README.md").touch()
    found = facts(directory)
    assert found["refused"] == []
    assert found["derived"]["context"] == {"value": 1024, "source": "max_position_embeddings"}
    assert found["derived"].keys() == {"context", "rope", "ends of turn", "quantisation", "head"}
    assert found["ignored"]["files"] == ["pytorch_model.pth"]
    assert found["ignored"]["tensors"] == ["model.layers.0.self_attn.q_proj.bias"]
    assert "bad_words_ids" in found["ignored"]["keys of config.json"]
    assert "rms_norm_eps" not in found["ignored"]["keys of config.json"]
    assert found["chat_template_source"] == "tokenizer_config.json: chat_template"
    lines = check.report({**found, "model": "it"}, kv_memory=2**20)
    assert "  ignored        files: pytorch_model.pth" in lines
    assert "  context        1,024 (max_position_embeddings)" in lines


def test_kinds_of_matrices_are_said_where_their_forms_differ(tmp_path: Path) -> None:
    plain, quantised = tmp_path / "plain", tmp_path / "quantised"
    scheme = SCHEMES["awq"]
    write_checkpoint(plain, **SIZES)
    quantise(plain, quantised, scheme.writer, scheme.config, keeps="down_proj")
    assert facts(quantised)["layers"] == {
        "4 bits in groups of 16": [
            "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
            "mlp.gate_proj", "mlp.up_proj",
        ],
        "not quantised": ["mlp.down_proj"],
    }  # fmt: skip


def test_each_reason_has_an_advice(tmp_path: Path) -> None:
    found = facts(copied(tmp_path, new_option=7), "--stages", "7")
    assert len(found["advice"]) == len(found["refused"]) > 0
    assert any("what to do" in line for line in check.report({**found, "model": "it"}, kv_memory=1))


@pytest.mark.thorough
def test_all_reasons_are_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_checkpoint(tmp_path / "m")
    with (directory / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    assert check.main([str(directory), "--json"]) == 1
    (first, second) = json.loads(capsys.readouterr().out)["refused"]
    assert "model.safetensors" in first
    assert "tokenizer.json" in second


@pytest.mark.parametrize(
    "text",
    [
        "nowhere",
        *(pytest.param(text, marks=pytest.mark.thorough) for text in ("nowhere.gguf", "/no/where")),
    ],
)
def test_a_model_that_is_nowhere_is_said_to_be(text: str) -> None:
    done = run(text)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: model: there is no {text}; it must be a directory,")


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (512 << 20, "512 MiB")],
)
def test_sizes_are_said_in_units_that_suit_them(n_bytes: int, text: str) -> None:
    assert check.human(n_bytes) == text


def test_an_encoder_says_how_it_makes_vectors(tmp_path: Path) -> None:
    sizes = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    write_encoder(tmp_path, BertConfig(**{**sizes, "vocab_size": 340}), "mean")
    word_piece().save(str(tmp_path / "tokenizer.json"))
    found = facts(tmp_path)
    assert found["refused"] == []
    assert found["kv_bytes_per_token"] == 2 * 48 * 4  # of one layer
    lines = [line.strip() for line in check.report({**found, "model": "it"}, kv_memory=9)]
    expected = (
        "48 numbers, of length 1, of the mean of the states; a text runs whole in one iteration"
    )
    assert f"vectors        {expected}" in (lines)
    assert not [line for line in lines if line.startswith("chat template")]
    (tmp_path / "modules.json").unlink()
    (refusal,) = facts(tmp_path)["refused"]
    assert "BertModel" in refusal
    assert facts(tmp_path, "--pooling=cls")["vectors"]["kind"] == "cls"


def test_a_decoder_without_a_head_needs_none_for_vectors(tmp_path: Path) -> None:
    write_embedder(tmp_path, Qwen3Config(**{**SMALL, "vocab_size": 340}, head_dim=16), "last")
    word_piece().save(str(tmp_path / "tokenizer.json"))
    found = facts(tmp_path)
    assert found["refused"] == []
    assert found["vectors"]["kind"] == "last"
