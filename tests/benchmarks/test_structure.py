"""The figures of a source tree, on trees of a few lines."""

import ast
import subprocess
from pathlib import Path

import pytest

from benchmarks import structure

TREE = {
    "services/worker/__init__.py": '"""The worker."""\n',
    "services/worker/plan.py": "top_k = 1\nmin_p_of = 2\n",
    "services/worker/settings.py": (
        "class RankSettings:\n    a: int\n    b: int = 0\n    def c(self): ...\n"
    ),
    "services/worker/rank/loop.py": (
        "from services.worker import plan\n"
        "from services.worker.settings import RankSettings\n"
        "import torch\n"
    ),
    "protos/sampling.proto": "int32 top_k = 1;\n",
    "tests/test_plan.py": '"""Of a plan."""\ntop_k = 1\n',
    "docs/sampling.md": "What top_k means\n",
}


def test_an_option_is_counted_in_files_of_the_product_that_spell_it_as_a_word() -> None:
    figures = structure.rows_of(TREE)
    assert figures["files that spell `top_k`"] == "2"
    assert figures["files that spell `min_p`"] == "0"


def test_an_import_is_an_edge_to_the_module_that_is_meant() -> None:
    assert structure.import_edges(TREE) == {
        ("services/worker/rank/loop.py", "services/worker/plan.py"),
        ("services/worker/rank/loop.py", "services/worker/settings.py"),
    }


def test_a_service_has_its_modules_its_imports_and_those_between_its_folders() -> None:
    figures = structure.rows_of(TREE)
    assert figures["**services/worker**: modules, imports, imports between folders"] == "4, 2, 1"
    of_folder = "modules, imports inside it, imports of folders beside it"
    assert figures[f"services/worker/: {of_folder}"] == "3, 0, 0"
    assert figures[f"services/worker/rank/: {of_folder}"] == "1, 0, 2"


def test_settings_are_counted_without_their_methods() -> None:
    assert structure.rows_of(TREE)["fields of `RankSettings`"] == "2 (services/worker/settings.py)"


def test_the_longest_definition_is_named_with_its_lines_and_place() -> None:
    tree = {
        "services/a.py": "def short(): ...\n\n@late\nclass Long:\n    b = 1\n    c = 2\n",
        "tests/b.py": "def longer():\n" + "    a = 1\n" * 9,
    }
    assert str(structure.longest(tree, ast.ClassDef)) == "3: `Long` in services/a.py"
    assert str(structure.longest(tree, ast.FunctionDef)) == "1: `short` in services/a.py"


def test_files_with_many_lines_are_named_longest_first() -> None:
    tree = {f"services/{name}.py": "def f(): ...\nclass C: ...\n" + "\n" * n_more
            for name, n_more in (("a", 348), ("b", 349), ("c", 350))}  # fmt: skip
    figures = structure.rows_of(tree)
    assert figures["files above 350 lines"] == "2: services/c.py 352, services/b.py 351"


def test_docstrings_are_those_of_modules_classes_functions_and_attributes() -> None:
    module = ast.parse('"""A"""\nclass B:\n  """B"""\n  c = 1\n  """C"""\n  def d(self): "D"\n"no"')
    assert sorted(structure.docstrings(module)) == ["A", "B", "C", "D"]


@pytest.mark.parametrize(
    ("text", "n_unclear"), [("What it is", 1), ("Of all", 1), ("The same", 1), ("Offers", 0)]
)
def test_docstrings_that_begin_unclearly_are_counted(text: str, n_unclear: int) -> None:
    tree = {**TREE, "services/a.py": f'"""{text}"""\n'}
    title = "docstrings outside tests; that begin with What, Of, The same"
    assert structure.rows_of(tree)[title] == f"2; {n_unclear}"


def test_the_table_has_every_title_of_every_column_in_its_place() -> None:
    before, after = {"a": "1", "b": "2"}, {"a": "3", "new": "4", "b": "5"}
    assert structure.table({"before": before, "after": after}).splitlines() == [
        "|  | before | after |",
        "| --- | --- | --- |",
        "| a | 1 | 3 |",
        "| new | - | 4 |",
        "| b | 2 | 5 |",
    ]


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
    assert structure.tree_of(tmp_path, "HEAD") == {"a.py": "old = 1\n"}
    assert structure.working_tree(tmp_path) == {"a.py": "new = 1\n", "b.md": "more\n"}
    with pytest.raises(subprocess.CalledProcessError):
        structure.tree_of(tmp_path, "no-such-revision")
