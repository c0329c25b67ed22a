"""An adapter's files are in memory once, and what is opened is what was checked."""

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from services.worker.models.adapters.adapter import HeldAdapter
from services.worker.models.adapters.adapter_config import AdapterError
from services.worker.models.adapters.adapter_files import WEIGHTS_FILE, AdapterFiles
from tests.adapters import write_adapter

SIZES = {f"model.layers.{i}.self_attn.q_proj": (1024, 1024) for i in range(16)}


def test_the_files_are_read_once_and_are_in_memory_once(tmp_path: Path) -> None:
    write_adapter(tmp_path, SIZES, ["q_proj"], rank=64)
    n_bytes = (tmp_path / WEIGHTS_FILE).stat().st_size
    read: list[Path] = []

    def read_files(directory: Path) -> AdapterFiles:
        read.append(directory)
        return AdapterFiles.read(directory)

    tracemalloc.start()
    adapter = HeldAdapter("law", tmp_path, read_files)
    tensors = adapter.read()
    for module in adapter.modules:
        a, b = tensors.matrices(module)
        assert a.shape == b.T.shape == (64, 1024)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert read == [tmp_path]
    assert n_bytes <= peak < 1.5 * n_bytes


def _to_pipe(path: Path, other: Path) -> None:
    os.mkfifo(path)


def _to_link(path: Path, other: Path) -> None:
    path.symlink_to(other)


@pytest.mark.parametrize("change", [_to_pipe, _to_link])
def test_a_file_that_changes_after_the_check_is_not_read(
    tmp_path: Path, change: Callable[[Path, Path], None]
) -> None:
    other = write_adapter(tmp_path / "other", {"q_proj": (4, 4)}, ["q_proj"]) / WEIGHTS_FILE
    own = write_adapter(tmp_path / "own", {"q_proj": (4, 4)}, ["q_proj"])

    def follow(path: Path) -> Path:
        if path.name == WEIGHTS_FILE:
            path.unlink()
            change(path, other)
        return path

    with pytest.raises(AdapterError, match=f"{WEIGHTS_FILE} cannot be read"):
        AdapterFiles.read(own, follow)


def test_a_link_is_opened_by_the_path_that_was_checked(tmp_path: Path) -> None:
    good = write_adapter(tmp_path / "good", {"q_proj": (4, 4)}, ["q_proj"], seed=1)
    other = write_adapter(tmp_path / "other", {"q_proj": (4, 4)}, ["q_proj"], seed=2)
    own = write_adapter(tmp_path / "own", {"q_proj": (4, 4)}, ["q_proj"])
    (own / WEIGHTS_FILE).unlink()
    (own / WEIGHTS_FILE).symlink_to(good / WEIGHTS_FILE)

    def follow(path: Path) -> Path:
        real = path.resolve()
        if path.is_symlink():
            path.unlink()
            path.symlink_to(other / WEIGHTS_FILE)
        return real

    assert AdapterFiles.read(own, follow).weights == (good / WEIGHTS_FILE).read_bytes()


def test_links_of_adapters_in_the_settings_are_followed(tmp_path: Path) -> None:
    own = write_adapter(tmp_path / "own", {"q_proj": (4, 4)}, ["q_proj"], dtype=torch.float16)
    (own / WEIGHTS_FILE).rename(tmp_path / "blob")
    (own / WEIGHTS_FILE).symlink_to(tmp_path / "blob")
    assert AdapterFiles.read(own).weights == (tmp_path / "blob").read_bytes()
