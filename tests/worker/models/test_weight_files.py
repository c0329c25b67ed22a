"""The forms in which a directory can hold its weights, and which of several forms is read."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.worker.models import CheckpointError, checkpoint_digest
from services.worker.models.directory_files import DirectoryFiles
from tests.checkpoints import Oracle, write_checkpoint
from tests.worker.pipeline import Pipeline, Span

TOKENS = [3, 99, 7, 150, 42, 11]
OPT = transformers.OPTConfig(
    vocab_size=199,
    hidden_size=48,
    ffn_dim=72,
    num_hidden_layers=2,
    num_attention_heads=6,
    max_position_embeddings=64,
    word_embed_proj_dim=48,
)


def logits(directory: Path) -> Tensor:
    pipeline = Pipeline(directory)
    pipeline.admit(0, len(TOKENS))
    return pipeline.run([Span(0, TOKENS)])[1]


def assert_as_oracle(directory: Path, oracle: Tensor) -> None:
    torch.testing.assert_close(logits(directory), oracle, rtol=0, atol=1e-4)


def as_one_bin(directory: Path, tensors: dict[str, Tensor]) -> None:
    torch.save(tensors, directory / "pytorch_model.bin")


def as_old_bin(directory: Path, tensors: dict[str, Tensor]) -> None:
    """PyTorch's form before version 1.6."""
    torch.save(tensors, directory / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def as_parameters(directory: Path, tensors: dict[str, Tensor]) -> None:
    torch.save(
        {name: torch.nn.Parameter(each) for name, each in tensors.items()},
        directory / "pytorch_model.bin",
    )


def as_views(directory: Path, tensors: dict[str, Tensor]) -> None:
    """Tensors that share one storage, one of them transposed in it."""
    flat = torch.cat([each.flatten() for each in tensors.values()])
    found, start = {}, 0
    for name, each in tensors.items():
        found[name] = flat[start : start + each.numel()].view(each.shape)
        start += each.numel()
    name = "model.layers.0.mlp.up_proj.weight"
    found[name] = tensors[name].T.contiguous().T
    torch.save(found, directory / "pytorch_model.bin")


def as_bins(directory: Path, tensors: dict[str, Tensor]) -> None:
    sharded(directory, tensors, "pytorch_model", ".bin", torch.save)


def as_safetensors_without_index(directory: Path, tensors: dict[str, Tensor]) -> None:
    sharded(directory, tensors, "model", ".safetensors", save_file, has_index=False)


def sharded(
    directory: Path,
    tensors: dict[str, Tensor],
    stem: str,
    suffix: str,
    save: Callable[[dict[str, Tensor], Path], None],
    *,
    has_index: bool = True,
) -> None:
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for i in range(3):
        file = f"{stem}-0000{i + 1}-of-00003{suffix}"
        part = {name: tensors[name] for name in names[i::3]}
        save(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    if has_index:
        index = {"metadata": {}, "weight_map": weight_map}
        (directory / f"{stem}{suffix}.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "write",
    [as_one_bin, as_old_bin, as_parameters, as_views, as_bins, as_safetensors_without_index],
    ids=lambda write: write.__name__,
)
def test_each_form_has_the_same_logits(
    tmp_path: Path, write: Callable[[Path, dict[str, Tensor]], None]
) -> None:
    write_checkpoint(tmp_path)
    oracle = Oracle(tmp_path).logits(TOKENS)[-1:]
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    write(tmp_path, tensors)
    assert_as_oracle(tmp_path, oracle)


@pytest.mark.parametrize("prefix", ["", "model."], ids=["bare", "whole"])
def test_opt_as_published(tmp_path: Path, prefix: str) -> None:
    """Half precision, the head tied to the embedding in one storage, names without `model.`."""
    torch.manual_seed(5)
    model: torch.nn.Module = transformers.OPTForCausalLM(OPT)
    model = model.half().eval()
    OPT.architectures = ["OPTForCausalLM"]
    OPT.save_pretrained(tmp_path)
    state = {
        name.removeprefix("model." if not prefix else ""): tensor
        for name, tensor in model.state_dict().items()
    }
    assert len({tensor.data_ptr() for tensor in state.values()}) < len(state)
    torch.save(state, tmp_path / "pytorch_model.bin")
    with torch.no_grad():
        expected = model.float()(torch.tensor([TOKENS])).logits[0, -1:]
    assert_as_oracle(tmp_path, expected)


def test_parts_of_a_bin_are_read_without_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values stay in the file until they are used: the mapping is of the file's size, and its
    pages are the file's."""
    torch.save({"w": torch.arange(12.0).view(4, 3)}, tmp_path / "pytorch_model.bin")
    files = DirectoryFiles(tmp_path)
    part = files.read("w", (range(1, 3), range(1, 2)))
    assert part.tolist() == [[4.0], [7.0]]
    with (tmp_path / "pytorch_model.bin").open("r+b") as file:
        content = file.read()
        at = content.index(torch.arange(4.0, 5).numpy().tobytes())
        os.pwrite(file.fileno(), torch.tensor([40.0]).numpy().tobytes(), at)
    assert part.tolist() == [[40.0], [7.0]]


def test_safetensors_are_read_before_bins(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    torch.save({"w": torch.zeros(2, 2)}, tmp_path / "pytorch_model.bin")
    assert DirectoryFiles(tmp_path).read("w", (range(2), range(2))).sum() == 4


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_an_index_beside_a_single_file_is_left_over(tmp_path: Path, suffix: str) -> None:
    """As `transformers` reads it; the index names files that are gone, or others that are not."""
    stem = {".safetensors": "model", ".bin": "pytorch_model"}[suffix]
    save = save_file if suffix == ".safetensors" else torch.save
    save({"w": torch.ones(2, 2)}, tmp_path / f"{stem}{suffix}")
    index = {"weight_map": {"w": f"gone{suffix}", "v": f"gone{suffix}"}}
    (tmp_path / f"{stem}{suffix}.index.json").write_text(json.dumps(index))
    files = DirectoryFiles(tmp_path)
    assert files.read("w", (range(2), range(2))).sum() == 4
    assert files.find("v") is None
    checkpoint_digest(tmp_path)


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_a_file_of_the_index_that_is_missing_is_named(tmp_path: Path, suffix: str) -> None:
    stem = {".safetensors": "model", ".bin": "pytorch_model"}[suffix]
    file = f"{stem}-00001-of-00002{suffix}"
    (tmp_path / f"{stem}{suffix}.index.json").write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(CheckpointError, match=f"{file} cannot be read: it is missing"):
        DirectoryFiles(tmp_path).header("w")


def test_weights_of_another_form_alone_are_named(tmp_path: Path) -> None:
    (tmp_path / "consolidated.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"fetch model.*safetensors and config.json"):
        DirectoryFiles(tmp_path).find("w")


class _Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("evil",)


def pickled(value: object) -> Callable[[Path], None]:
    return lambda path: torch.save(value, path)


def compressed(path: Path) -> None:
    torch.save({"w": torch.ones(4, 3)}, path)
    with zipfile.ZipFile(path) as archive:
        parts = {part: archive.read(part) for part in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for part, content in parts.items():
            archive.writestr(part, content)


def cut(path: Path) -> None:
    torch.save({"w": torch.ones(400, 3)}, path)
    os.truncate(path, path.stat().st_size // 2)


def without_storage(path: Path) -> None:
    torch.save({"w": torch.ones(4, 3)}, path)
    with zipfile.ZipFile(path) as archive:
        parts = {part: archive.read(part) for part in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for part, content in parts.items():
            if not part.endswith("data/0"):
                archive.writestr(part, content)


def text(path: Path) -> None:
    path.write_text("version https://git-lfs\n")


def old_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(_Evil(), protocol=2))


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "evil": (pickled({"w": _Evil()}), "cannot be read"),
    "old-evil": (old_pickle, "cannot be read"),
    "list": (pickled([torch.ones(4, 3)]), "holds no tensors by name"),
    "nested": (pickled({"state_dict": {"w": torch.ones(4, 3)}}), "but 'state_dict'"),
    "empty": (lambda path: path.touch(), "cannot be read"),
    "text": (text, "cannot be read"),
    "compressed": (compressed, "is compressed"),
    "cut": (cut, "cannot be read"),
    "without storage": (without_storage, "cannot be read"),
    "number": (pickled({"w": 7, "v": torch.ones(1)}), r"has no tensor w|lacks"),
}


@pytest.mark.parametrize(("write", "message"), WRONG.values(), ids=WRONG.keys())
def test_files_that_are_no_tensors_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "pytorch_model-00001-of-00001.bin"
    write(path)
    index = {"weight_map": {"w": path.name}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        DirectoryFiles(tmp_path).header("w")
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    ("tensor", "element"),
    [
        (torch.ones(4, 3, dtype=torch.complex64), "torch.complex64"),
        (torch.eye(3).to_sparse(), "torch.sparse_coo on cpu"),
        (torch.ones(4, 3, device="meta"), "torch.strided on meta"),
        (torch.ones(4, 3).to(torch.float8_e4m3fn), "F8_E4M3"),
    ],
    ids=["complex", "sparse", "meta", "fp8"],
)
def test_elements_have_the_names_of_safetensors(
    tmp_path: Path, tensor: Tensor, element: str
) -> None:
    torch.save({"w": tensor}, tmp_path / "pytorch_model.bin")
    assert DirectoryFiles(tmp_path).header("w").element == element
