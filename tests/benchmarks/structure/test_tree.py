"""Trees are read from git, and their docstrings and code are told apart."""

import ast
import subprocess
from pathlib import Path

import pytest

from benchmarks.structure.tree import code_lines, docstrings, tree_of, working_tree

FUNCTION = '''def f():
    """Of f."""
    return "# no"  # why
'''
TEXT = '''x = """a
b"""
'''


def test_docstrings_are_those_of_modules_classes_functions_and_attributes() -> None:
    module = ast.parse('"""A"""\nclass B:\n  """B"""\n  c = 1\n  """C"""\n  def d(self): "D"\n"no"')
    assert sorted(docstrings(module)) == [
        (1, 1, "A", ""),
        (3, 3, "B", "class B()"),
        (5, 5, "C", "c = 1"),
        (6, 6, "D", "def d(self) -> None"),
    ]


@pytest.mark.parametrize(
    ("path", "text", "lines"),
    [
        ("a.py", FUNCTION, [(1, "def f():"), (3, 'return "# no"')]),
        ("a.py", TEXT, [(1, 'x = """a'), (2, 'b"""')]),
        ("a.js", "/** What\n * it is. */\nlet a; // why\n", [(3, "let a;")]),
    ],
    ids=["python", "text of several lines", "javascript"],
)
def test_lines_of_code_keep_their_numbers(
    path: str, text: str, lines: list[tuple[int, str]]
) -> None:
    assert code_lines(path, text) == lines


def test_a_revision_and_the_working_tree_are_read_from_git(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True)

    (tmp_path / "a.py").write_text("old = 1\n")
    (tmp_path / "image.png").write_bytes(b"\xff")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "begin")
    (tmp_path / "a.py").write_text("new = 1\n")
    (tmp_path / "b.md").write_text("more\n")
    assert tree_of(tmp_path, "HEAD") == {"a.py": "old = 1\n"}
    assert working_tree(tmp_path) == {"a.py": "new = 1\n", "b.md": "more\n"}
    with pytest.raises(subprocess.CalledProcessError):
        tree_of(tmp_path, "no-such-revision")
