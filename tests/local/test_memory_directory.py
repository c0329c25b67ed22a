"""Directories of local systems in memory: whose they are, and when they are removed."""

import os
import stat
from pathlib import Path

import pytest

from services.local.memory_directory import MemoryDirectory


def made(memory: Path) -> MemoryDirectory:
    directory = MemoryDirectory.make(memory)
    assert directory is not None
    return directory


def abandoned(memory: Path, *files: str) -> Path:
    """Returns the directory of a system that was killed."""
    directory = made(memory)
    os.close(directory._fd)
    for name in files:
        (directory.path / name).write_bytes(b"x")
    return directory.path


def test_it_is_for_this_user_alone_and_goes_with_the_system(tmp_path: Path) -> None:
    directory = made(tmp_path)
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    (directory.path / "0.kv").write_bytes(b"x")
    directory.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_system_left_is_removed_and_a_living_one_keeps_its_own(
    tmp_path: Path,
) -> None:
    living = made(tmp_path)
    abandoned(tmp_path, "0.kv", "1.kv")
    mine = made(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([living.path, mine.path])


@pytest.mark.parametrize("name", ["orcinus", "orcinus-weights", "orcinus-local", "orcinus-local-a"])
def test_directories_with_other_names_stay(tmp_path: Path, name: str) -> None:
    other = tmp_path / name
    other.mkdir()
    (other / "0.kv").write_bytes(b"x")
    made(tmp_path)
    assert (other / "0.kv").exists()


def test_a_directory_with_something_else_in_it_stays(tmp_path: Path) -> None:
    left = abandoned(tmp_path, "0.kv", "model.safetensors")
    made(tmp_path)
    assert len(list(left.iterdir())) == 2


def test_without_shared_memory_there_is_none(tmp_path: Path) -> None:
    assert MemoryDirectory.make(tmp_path / "nowhere") is None
