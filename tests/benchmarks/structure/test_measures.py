"""The figures of a source tree, on trees of a few lines."""

import ast

import pytest

from benchmarks.structure import measures

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
    figures = measures.rows_of(TREE)
    assert figures["files that spell `top_k`"] == "2"
    assert figures["files that spell `min_p`"] == "0"


def test_an_import_is_an_edge_to_the_module_that_is_meant() -> None:
    assert measures.import_edges(TREE) == {
        ("services/worker/rank/loop.py", "services/worker/plan.py"),
        ("services/worker/rank/loop.py", "services/worker/settings.py"),
    }


def test_a_service_has_its_modules_its_imports_and_those_between_its_folders() -> None:
    figures = measures.rows_of(TREE)
    assert figures["**services/worker**: modules, imports, imports between folders"] == "4, 2, 1"
    of_folder = "modules, imports inside it, imports of folders beside it"
    assert figures[f"services/worker/: {of_folder}"] == "3, 0, 0"
    assert figures[f"services/worker/rank/: {of_folder}"] == "1, 0, 2"


def test_settings_are_counted_without_their_methods() -> None:
    assert measures.rows_of(TREE)["fields of `RankSettings`"] == "2 (services/worker/settings.py)"


def test_all_settings_are_counted_together() -> None:
    more = {"services/local/settings.py": "class LocalSettings(Base):\n    a: int\n"}
    assert measures.rows_of({**TREE, **more})["settings"] == "3"


def test_code_is_counted_without_blanks_comments_and_docstrings() -> None:
    code = '"""Of a module."""\n\n# why\na = "#"  # what\n"""Of a."""\n\nb = (\n    1,\n)\n'
    tree = {"services/a.py": code, "kernels/b.h": "/* what\n it is */\nint a; // b\n\n"}
    figures = measures.rows_of({**TREE, **tree})
    assert figures["**services, kernels**: Python files, files of code"] == "5, 6"
    title = "lines of code without blanks, comments, docstrings: Python, all"
    assert figures[title] == "13, 14"


def test_the_folders_with_most_modules_are_named() -> None:
    assert measures.rows_of(TREE)["largest folders"] == "services/worker 3, services/worker/rank 1"


@pytest.mark.parametrize(
    ("methods", "n"),
    [
        (("__call__(self, x)",), 0),
        (("record(self, to)",), 0),
        (("__call__(self, x)", "record_all(self, to)"), 1),
        (("__call__(self, x)", "describe(self, to: Program)"), 1),
        (("__call__(self, x)", "describe(self, *, to: ProgramBuilder)"), 1),
        (("__call__(self, x)", "_describe(self, to: Program)"), 0),
    ],
)
def test_a_class_that_computes_and_describes_is_counted(methods: tuple[str, ...], n: int) -> None:
    text = "class Piece:\n" + "".join(f"    def {method}: ...\n" for method in methods)
    title = "classes with `__call__` and a method that describes the same"
    assert measures.rows_of({**TREE, "services/worker/piece.py": text})[title] == str(n)


def test_the_longest_definition_is_named_with_its_lines_and_place() -> None:
    tree = {
        "services/a.py": "def short(): ...\n\n@late\nclass Long:\n    b = 1\n    c = 2\n",
        "tests/b.py": "def longer():\n" + "    a = 1\n" * 9,
    }
    assert str(measures.longest(tree, ast.ClassDef)) == "3: `Long` in services/a.py"
    assert str(measures.longest(tree, ast.FunctionDef)) == "1: `short` in services/a.py"


def test_files_with_many_lines_are_named_longest_first() -> None:
    tree = {f"services/{name}.py": "def f(): ...\nclass C: ...\n" + "\n" * n_more
            for name, n_more in (("a", 348), ("b", 349), ("c", 350))}  # fmt: skip
    figures = measures.rows_of(tree)
    assert figures["files above 350 lines"] == "2: services/c.py 352, services/b.py 351"


@pytest.mark.parametrize(
    ("text", "n_unclear"), [("What it is", 1), ("Of all", 1), ("The same", 1), ("Offers", 0)]
)
def test_docstrings_that_begin_unclearly_are_counted(text: str, n_unclear: int) -> None:
    tree = {**TREE, "services/a.py": f'"""{text}"""\n'}
    title = "docstrings outside tests; that begin with What, Of, The same"
    assert measures.rows_of(tree)[title] == f"2; {n_unclear}"
