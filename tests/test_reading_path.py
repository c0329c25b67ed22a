"""The files on the reading path exist, and are short enough for an hour."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reading-path.md"
MAX_LINES = 3_000
"""Lines of all files together: an hour's reading."""


def listed() -> list[Path]:
    """Returns the files on the reading path, in order."""
    links = re.findall(r"^\d+\. \[`[^`]+`\]\(\.\./([^)]+)\)", PAGE.read_text("utf-8"), flags=re.M)
    return [ROOT / link for link in links]


def text_of(name: str) -> str:
    """Returns the text of the file on the path whose address ends with a name, with single
    spaces."""
    [path] = [path for path in listed() if path.as_posix().endswith(name)]
    return " ".join(path.read_text("utf-8").split())


def test_the_path_has_fifteen_files_or_so_each_once() -> None:
    files = listed()
    assert all(path.is_file() for path in files)
    assert len(set(files)) == len(files)
    assert 12 <= len(files) <= 18


def test_the_path_is_read_in_an_hour() -> None:
    assert sum(len(path.read_text("utf-8").splitlines()) for path in listed()) <= MAX_LINES


def test_the_numbers_of_the_list_count_its_files() -> None:
    numbers = re.findall(r"^(\d+)\. \[", PAGE.read_text("utf-8"), flags=re.M)
    assert numbers == [str(number) for number in range(1, len(listed()) + 1)]


@pytest.mark.parametrize("name", ["scheduler.py", "request_pool.py", "kv_manager.py"])
def test_what_is_optional_is_never_tested_for(name: str) -> None:
    """Objects that do nothing stand in for features that are off."""
    text = text_of(f"core/{'memory/' if name == 'kv_manager.py' else ''}{name}")
    assert re.findall(r"self\._?[\w.]+ is (?:not )?None", text) == []


def test_each_question_is_answered_by_a_file_of_the_path() -> None:
    rows = re.findall(r"^\| ([^|]+\?) \| (\d+) \|$", PAGE.read_text("utf-8"), flags=re.M)
    assert len(rows) == 10
    assert all(1 <= int(number) <= len(listed()) for _, number in rows)
