"""Checkpoints that nobody would write by mistake: refused by name, in no time and no memory."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common import bounded_file
from services.worker.models import CheckpointError, UnsupportedModel
from services.worker.models.checkpoint_tensors import CheckpointTensors
from services.worker.models.config_file import read_config
from services.worker.models.config_json import parse_config
from services.worker.models.directory_files import DirectoryFiles
from services.worker.models.weights import WantedTensors

HEADER = {"w": {"dtype": "F32", "shape": [4, 3], "data_offsets": [0, 48]}}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


def write_weights(
    path: Path, header: object = None, *, length: int | None = None, n_bytes: int = 48
) -> None:
    text = json.dumps(HEADER if header is None else header).encode()
    path.write_bytes(
        struct.pack("<Q", len(text) if length is None else length) + text + bytes(n_bytes)
    )


def load(directory: Path) -> torch.Tensor:
    wanted = WantedTensors(0, 1)
    wanted.tensor("w", 4, 3)
    return CheckpointTensors(
        DirectoryFiles(directory),
        wanted,
        dtype=torch.float32,
        device=torch.device("cpu"),
        on_progress=lambda n_done, n_total: None,
    ).tensor("w", 4, 3)


def tensor(**changes: object) -> dict[str, object]:
    return {"w": {**HEADER["w"], **changes}}


@pytest.mark.parametrize(
    "write",
    [
        lambda path: write_weights(path, length=2**63),
        lambda path: write_weights(path, length=10**8),
        lambda path: write_weights(path, length=0),
        lambda path: write_weights(path, n_bytes=47),
        lambda path: write_weights(path, n_bytes=1000),
        lambda path: write_weights(path, tensor(data_offsets=[0, 2**40])),
        lambda path: write_weights(path, tensor(data_offsets=[40, 0])),
        lambda path: write_weights(path, tensor(shape=[2**62, 2**62])),
        lambda path: write_weights(path, tensor(shape=[-4, -3])),
        lambda path: write_weights(path, tensor(dtype="F31")),
        lambda path: write_weights(path, {**HEADER, "v": HEADER["w"]}),
        lambda path: path.write_bytes(b""),
        lambda path: path.mkdir(),
    ],
    ids=["length", "longer", "empty", "cut", "rest", "beyond", "backwards", "overflow", "negative",
         "dtype", "overlap", "nothing", "folder"],
)  # fmt: skip
def test_files_of_weights_that_are_none_are_named(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    path = tmp_path / "model.safetensors"
    write_weights(path)
    assert load(tmp_path).tolist() == [[0.0] * 3] * 4
    path.unlink()
    write(path)
    with pytest.raises(CheckpointError, match=str(path)):
        load(tmp_path)


def test_a_tensor_that_is_not_in_the_file_of_the_index_is_named(tmp_path: Path) -> None:
    write_weights(tmp_path / "a.safetensors", {"v": HEADER["w"]})
    index = {"weight_map": {"w": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"a\.safetensors: .*\bw\b"):
        load(tmp_path)


@pytest.mark.parametrize(
    "file",
    ["../secret.safetensors", "/etc/a.safetensors", "b/a.safetensors", "a\\b.safetensors", "..",
     "", "a.safetensors\0", "config.json", 7, None, ["a.safetensors"]],
    ids=repr,
)  # fmt: skip
def test_an_index_names_only_files_of_weights_beside_it(tmp_path: Path, file: object) -> None:
    (tmp_path / "model").mkdir()
    write_weights(tmp_path / "secret.safetensors")
    path = tmp_path / "model" / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(CheckpointError, match=f"{path} names .*: no files beside it"):
        load(tmp_path / "model")


def test_links_of_the_hubs_cache_lead_where_they_like(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    write_weights(tmp_path / "blobs" / "0123")
    (tmp_path / "snapshot" / "a.safetensors").symlink_to("../blobs/0123")
    index = {"weight_map": {"w": "a.safetensors"}}
    (tmp_path / "snapshot" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load(tmp_path / "snapshot").shape == (4, 3)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map":' * 10_000, "\xff"], ids=len
)
def test_an_index_that_is_none_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match=str(path)):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"vocab_size": 2**31}, "vocab_size"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"hidden_size": 10**30, "head_dim": 8}, "hidden_size"),
        ({"max_position_embeddings": 2**31}, "max_position_embeddings"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"eos_token_id": [2**31]}, "eos_token_id"),
        ({"rope_scaling": [1]}, "wrong type"),
        ({"rope_scaling": {"rope_type": [1]}}, "wrong type"),
        ({"rope_scaling": "linear"}, r"config\.json"),
        ({"architectures": ["Gemma2ForCausalLM"], "hidden_act": "gelu_pytorch_tanh",
          "layer_types": 5}, "wrong type"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 10**9,
          "num_experts_per_tok": 2}, "n.*experts"),
        ({"vocab_size": "199"}, "vocab_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"rope_theta": "10000"}, "rope_theta"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings 'no' is no boolean"),
        ({"attention_bias": 1}, "attention_bias 1 is no boolean"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": "false"},
         "use_sliding_window"),
        ({"rope_scaling": ""}, "rope_scaling is no object"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": "no",
          "original_max_position_embeddings": 32}}, "truncate"),
    ],
    ids=str,
)  # fmt: skip
def test_absurd_configurations_are_refused(changes: dict[str, Any], named: str) -> None:
    parse_config(CONFIG, {})
    with pytest.raises(UnsupportedModel, match=named):
        parse_config({**CONFIG, **changes}, {})


def test_the_value_of_an_unknown_option_is_shown_in_part() -> None:
    with pytest.raises(UnsupportedModel, match="odd_option") as caught:
        parse_config({**CONFIG, "odd_option": "x" * 10**6}, {})
    assert len(str(caught.value)) < 1000


def test_a_model_of_more_elements_than_can_be_counted_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="a tensor of"):
        WantedTensors(0, 1).tensor("w", 2**31 - 1, 2**31 - 1)


@pytest.mark.parametrize("content", [b"[" * 10_000, b'{"a":' * 10_000], ids=["lists", "objects"])
def test_a_deeply_nested_file_is_no_json(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UnsupportedModel, match=r"config\.json is not JSON"):
        read_config(tmp_path)


def test_no_more_than_expected_is_read_of_a_file() -> None:
    with pytest.raises(ValueError, match="/dev/zero has more than 1000 bytes"):
        bounded_file.read_bytes(Path("/dev/zero"), max_bytes=1000)


def test_a_config_that_never_ends_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(UnsupportedModel, match=r"config\.json has more than"):
        read_config(tmp_path)
