"""Files that change while they are in use."""

import logging
from pathlib import Path

import pytest

from services.common.mounted import Mounted


def number(content: str) -> list[int]:
    return [int(content)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "number"
    path.write_text("1")
    return path


def mounted(file: Path) -> Mounted[str, list[int]]:
    return Mounted(file, file.read_text, number)


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_changed_file_is_read_again_and_an_unchanged_one_gives_the_same_object(
    file: Path,
) -> None:
    it = mounted(file)
    first = it.latest()
    assert first == [1]
    assert it.latest() is first
    file.write_text("2")
    assert it.latest() == [2]


@pytest.mark.parametrize("breakage", ["garbage", "missing"])
def test_what_is_broken_is_not_taken_and_complained_of_once(
    file: Path, breakage: str, caplog: pytest.LogCaptureFixture
) -> None:
    it = mounted(file)
    if breakage == "missing":
        file.unlink()
    else:
        file.write_text(breakage)
    assert [it.latest() for _ in range(3)] == [[1]] * 3
    assert len(complaints(caplog)) == 1
    file.write_text("2")
    assert it.latest() == [2]
    file.write_text("garbage")
    assert it.latest() == [2]
    assert len(complaints(caplog)) == 2, "the log tells of what breaks again"


def test_what_was_there_before_a_breakage_comes_back(file: Path) -> None:
    it = mounted(file)
    file.write_text("garbage")
    assert it.latest() == [1]
    file.write_text("1")
    assert it.latest() == [1]
    file.write_text("3")
    assert it.latest() == [3]


def test_what_failed_for_once_is_tried_again(file: Path) -> None:
    troubles = [OSError("too many open files")]

    def parse(content: str) -> list[int]:
        if content == "2" and troubles:
            raise troubles.pop()
        return number(content)

    it = Mounted(file, file.read_text, parse)
    file.write_text("2")
    assert [it.latest() for _ in range(2)] == [[1], [2]]


def test_the_same_breakage_is_complained_of_again_after_a_recovery(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    it = mounted(file)
    for content in ("garbage", "1", "garbage"):
        file.write_text(content)
        assert it.latest() == [1]
    assert len(complaints(caplog)) == 2


@pytest.mark.parametrize(("content", "error"), [("x", ValueError), (None, OSError)])
def test_there_must_be_something_to_begin_with(
    tmp_path: Path, content: str | None, error: type[Exception]
) -> None:
    path = tmp_path / "other"
    if content is not None:
        path.write_text(content)
    with pytest.raises(error):
        mounted(path)
