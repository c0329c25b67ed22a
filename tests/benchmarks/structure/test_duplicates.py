"""Duplicated places are maximal runs of equal lines."""

from benchmarks.structure.duplicates import MIN_LINES, Duplicate, duplicates


def lines(first: int, n: int) -> str:
    return "".join(f"a{number} = {number}\n" for number in range(first, first + n))


def test_a_run_counts_once_with_its_places_and_its_whole_length() -> None:
    tree = {"a.py": "x = 1\n" + lines(0, 9), "b.py": lines(0, 9) + "y = 1\n"}
    assert duplicates(tree) == [Duplicate("a.py:2", "b.py:1", 9)]


def test_shorter_runs_and_one_place_beside_itself_are_none() -> None:
    assert duplicates({"a.py": lines(0, MIN_LINES - 1), "b.py": lines(0, MIN_LINES - 1)}) == []
    assert duplicates({"a.py": "x = 1\n" * (2 * MIN_LINES - 1)}) == []


def test_three_places_are_three_pairs_and_the_longest_is_first() -> None:
    tree = {"a.py": lines(0, 8), "b.py": lines(0, 7), "c.py": "z = 1\n" + lines(0, 6)}
    assert [pair.n_lines for pair in duplicates(tree)] == [7, 6, 6]


def test_indentation_comments_docstrings_brackets_and_imports_do_not_matter() -> None:
    inner = "".join(f"    {line}\n" for line in lines(0, 6).splitlines())
    tree = {
        "a.py": f"import os\nfrom x import (\n    y,\n    z,\n)\n{lines(0, 6)}",
        "b.py": f'def f():\n    """Of f."""\n    # why\n{inner}',
        "c.py": "import os\n" + "from x import y\n" * 9,
        "d.py": "import os\n" + "from x import y\n" * 9,
    }
    assert duplicates(tree) == [Duplicate("a.py:6", "b.py:4", 6)]
