"""The command prints a table of trees, or docstrings to mark."""

import subprocess
from pathlib import Path

import pytest

from benchmarks.structure.__main__ import main, minutes, table
from benchmarks.structure.durations import minutes_of
from benchmarks.structure.sample import listed, sample

TREE = {
    "services/a.py": '"""Of a."""\n\n\ndef f() -> None:\n    """Of f,\n    in two lines."""\n',
    "kernels/b.py": '"""Of b."""\n',
    "tests/c.py": '"""Of c."""\n',
}


def test_the_table_has_every_title_of_every_column_in_its_place() -> None:
    before, after = {"a": "1", "b": "2"}, {"a": "3", "new": "4", "b": "5"}
    assert table({"before": before, "after": after}).splitlines() == [
        "|  | before | after |",
        "| --- | --- | --- |",
        "| a | 1 | 3 |",
        "| new | - | 4 |",
        "| b | 2 | 5 |",
    ]


def test_docstrings_are_drawn_with_their_places_and_equally_by_one_seed() -> None:
    everything = sample(TREE, 9, seed=1)
    assert [each[:2] for each in everything] == [
        ("kernels/b.py", 1),
        ("services/a.py", 1),
        ("services/a.py", 5),
    ]
    shown = listed(everything)
    assert shown.startswith("[ ] 1. kernels/b.py:1\nOf b.\n\n[ ] 2. ")
    assert shown.endswith("services/a.py:5\ndef f() -> None\nOf f,\nin two lines.")
    draws = {tuple(sample(TREE, 1, seed=seed)) for seed in range(20)}
    assert len(draws) == 3
    assert sample(TREE, 2, seed=5) == sample(TREE, 2, seed=5)


def test_the_command_prints_docstrings_and_their_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    for path, text in TREE.items():
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(text)
    assert main(["--docstrings", "2", "--seed", "7"], tmp_path) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("2 docstrings of working tree, seed 7\n\n[ ] 1. ")
    assert shown.count("[ ] ") == 2


def test_minutes_are_given_or_read_from_junit_or_a_list_of_durations(tmp_path: Path) -> None:
    junit, listing = tmp_path / "junit.xml", tmp_path / "durations.txt"
    junit.write_text('<testsuites><testsuite time="90.0"/><testsuite time="30"/></testsuites>')
    listing.write_text("= slowest durations =\n12.00s call a.py::a\n  48.0s setup a.py\n")
    assert minutes([f"suite={junit}", f"waiting={listing}", "CI=44.26"]) == {
        "minutes of suite": "2.0",
        "minutes of waiting": "1.0",
        "minutes of CI": "44.3",
    }
    listing.write_text("nothing\n")
    with pytest.raises(ValueError, match="has no durations"):
        minutes_of(listing)
    junit.write_text("nothing")
    with pytest.raises(ValueError, match="is not XML"):
        minutes_of(junit)
