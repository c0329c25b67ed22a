"""Files with keys and values: who takes them over, and who may not."""

import errno
import fcntl
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from services.worker.engine import kv_file
from services.worker.engine.kv_file import KVFile, padded
from tests.limits import HANG_S

STAGE, OTHER_STAGE = "0123456789abcdef", "fedcba9876543210"
N_BYTES = 3 * 4096


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets no test wait for processes that have locked files."""
    monkeypatch.setattr(kv_file, "DYING_S", 0.0)


END = """
import os, signal, sys
from pathlib import Path
import torch
from services.worker.engine.kv_file import KVFile
file = KVFile.open(Path(sys.argv[1]), stage=sys.argv[2], rank=int(sys.argv[3]), n_bytes=12288)
file.begin(4)
file.allocate((4, 5), torch.float32).fill_(float(sys.argv[4]))
file.record.note_begun(int(sys.argv[5]))
file.record.note_complete(8)
os.kill(os.getpid(), signal.SIGKILL)
"""
"""A process that writes keys and values and is killed."""


def opened(directory: Path, *, stage: str = STAGE, rank: int = 0, n_bytes: int = N_BYTES) -> KVFile:
    return KVFile.open(directory, stage=stage, rank=rank, n_bytes=n_bytes)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def end(file: KVFile) -> None:
    """Lets go of a file as a process does that ends."""
    fcntl.flock(file._fd, fcntl.LOCK_UN)


def killed(directory: Path, *, rank: int = 0, value: float = 3.0, epoch: int = 5) -> None:
    """Runs a process that writes a file and is killed."""
    arguments = [str(directory), STAGE, str(rank), str(value), str(epoch)]
    status = subprocess.run([sys.executable, "-c", END, *arguments], timeout=HANG_S).returncode
    assert status < 0


@pytest.mark.thorough
def test_a_process_goes_on_with_the_file_of_one_that_was_killed(tmp_path: Path) -> None:
    killed(tmp_path)
    file = opened(tmp_path)
    stored = file.begin(4)
    assert (stored.epoch, stored.iteration) == (5, 8)
    assert file.allocate((4, 5), torch.float32).tolist() == [[3.0] * 5] * 4
    assert names(tmp_path) == {file.path.name}


def test_a_rank_goes_on_with_the_file_of_one_that_has_ended(tmp_path: Path) -> None:
    before = opened(tmp_path)
    name = before.begin(4).memory
    before.allocate((4, 5), torch.float32).fill_(3.0)
    before.record.note_begun(5)
    end(before)
    file = opened(tmp_path)
    assert file.begin(4) == (name, 4, 5, 0)
    assert file.allocate((4, 5), torch.float32).tolist() == [[3.0] * 5] * 4


def test_new_memory_is_zero_and_only_the_user_may_read_it(tmp_path: Path) -> None:
    file = opened(tmp_path / "new")
    assert file.begin(4).epoch == 0
    assert not file.allocate((N_BYTES // 4,), torch.float32).any()
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.path.parent.stat().st_mode) == 0o700
    assert file.path.stat().st_blocks * 512 >= N_BYTES, "its memory is allocated at once"


def test_tensors_are_where_they_were_in_the_epoch_before(tmp_path: Path) -> None:
    file = opened(tmp_path)
    file.begin(4)
    before = [file.allocate((3,), torch.bfloat16), file.allocate((2, 2), torch.float32)]
    before[0].fill_(1.0)
    before[1].fill_(2.0)
    file.begin(4)
    after = [file.allocate((3,), torch.bfloat16), file.allocate((2, 2), torch.float32)]
    assert [one.tolist() for one in after] == [[1.0] * 3, [[2.0] * 2] * 2]
    assert all(one.data_ptr() % 64 == 0 for one in after)
    with pytest.raises(ValueError, match="no room"):
        file.allocate((N_BYTES,), torch.float32)


def test_padding_is_enough_for_all_tensors(tmp_path: Path) -> None:
    file = opened(tmp_path, n_bytes=padded(3 * 10, n_tensors=3))
    file.begin(1)
    for _ in range(3):
        file.allocate((5,), torch.bfloat16)


def test_a_file_in_use_is_left_alone(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    assert first.path != second.path
    assert names(tmp_path) == {first.path.name, second.path.name}


def test_a_file_of_a_process_that_is_dying_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_file, "DYING_S", HANG_S)
    dying = opened(tmp_path)
    threading.Timer(0.05, end, (dying,)).start()
    assert opened(tmp_path).path == dying.path


def test_the_newest_of_several_files_is_taken_and_the_others_are_left_to_others(
    tmp_path: Path,
) -> None:
    files = [opened(tmp_path) for _ in range(3)]
    for file, epoch in zip(files, (4, 9, 6), strict=True):
        file.begin(4)
        file.record.note_begun(epoch)
        end(file)
    assert [opened(tmp_path).path for _ in files] == [files[it].path for it in (1, 2, 0)]
    assert names(tmp_path) == {file.path.name for file in files}


def test_files_of_other_ranks_and_stages_are_removed_only_if_memory_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, lost = opened(tmp_path, rank=1), opened(tmp_path, stage=OTHER_STAGE)
    in_use = opened(tmp_path, stage=OTHER_STAGE, rank=1)
    end(kept)
    end(lost)
    (tmp_path / "notes.txt").write_text("a user's")
    others = names(tmp_path)
    first = opened(tmp_path)
    assert names(tmp_path) == {*others, first.path.name}
    make = kv_file._made

    def make_if_there_is_room(path: Path, n_bytes: int) -> int:
        if lost.path.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return make(path, n_bytes)

    monkeypatch.setattr(kv_file, "_made", make_if_there_is_room)
    second = opened(tmp_path)
    expected = {*(file.path.name for file in (first, second, kept, in_use)), "notes.txt"}
    assert names(tmp_path) == expected
    assert opened(tmp_path, rank=1).path == kept.path


def test_a_file_of_another_size_or_mode_is_not_taken_over(tmp_path: Path) -> None:
    smaller, readable = opened(tmp_path, n_bytes=100), opened(tmp_path, rank=1)
    end(smaller)
    end(readable)
    readable.path.chmod(0o644)
    assert opened(tmp_path).path != smaller.path
    assert opened(tmp_path, rank=1).path != readable.path
    assert not smaller.path.exists()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(bytes(N_BYTES + 4096))
    target.chmod(0o600)
    link = tmp_path / "files" / f"{STAGE}.0.00000000.kv"
    link.parent.mkdir()
    link.symlink_to(target)
    assert opened(link.parent).path != link
    assert target.exists()


def test_a_file_that_does_not_fit_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"too large|No space"):
        opened(tmp_path, n_bytes=2**62)
    assert names(tmp_path) == set()
