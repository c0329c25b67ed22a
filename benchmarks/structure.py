"""The structure of the source tree, in figures that a redesign can be held against.

    python -m benchmarks.structure                             the working tree
    python -m benchmarks.structure --rev 71e8561 --rev HEAD    two revisions side by side

Prints a table in Markdown with a column for each tree: files that spell a sampling option, modules
and imports of each service and folder, the longest function and class, fields of settings,
docstrings that begin without a verb or a noun of their own, words of documentation, and long
files. Modules are read with `ast` and never imported, so that a revision needs no environment.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

from benchmarks.machine import ROOT

SAMPLING_OPTIONS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "min_tokens",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
PRODUCT = ("services", "kernels", "protos")
CODE = ("services", "kernels", "benchmarks", "models", "examples")
SUFFIXES = frozenset({".py", ".proto", ".h", ".cpp", ".md"})
SERVICES = ("common", "frontend", "local", "scheduler", "worker")
MAX_LINES = 350
UNCLEAR = re.compile(r"(What|Of|The same)\b")
"""Beginnings of docstrings that name neither an action nor a thing."""

Tree = Mapping[str, str]
"""The text of each file, by its path from the root."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: a title, and the figure of a tree."""

    title: str
    figure: str


@dataclass(frozen=True, slots=True)
class Definition:
    """A function or class and its number of lines."""

    n_lines: int
    name: str
    path: str

    def __str__(self) -> str:
        return f"{self.n_lines}: `{self.name}` in {self.path}"


def working_tree(root: Path) -> Tree:
    """Returns the files that git tracks or would add, as they are on disk."""
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").decode()
    paths = {path for path in listed.split("\0") if _is_source(path) and (root / path).is_file()}
    return {path: (root / path).read_text(encoding="utf-8") for path in sorted(paths)}


def tree_of(root: Path, revision: str) -> Tree:
    """Returns the files of a revision, read from `git archive`.

    Raises:
        subprocess.CalledProcessError: git doesn't know the revision.
    """
    tree = {}
    with tarfile.open(fileobj=io.BytesIO(_git(root, "archive", revision))) as archive:
        for member in archive:
            content = archive.extractfile(member) if _is_source(member.name) else None
            if content is not None:
                tree[member.name] = content.read().decode()
    return tree


def _git(root: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=root, stdout=subprocess.PIPE, check=True).stdout


def _is_source(path: str) -> bool:
    return PurePosixPath(path).suffix in SUFFIXES


def _under(tree: Tree, folders: Sequence[str], suffix: str = "") -> dict[str, str]:
    """Returns the files below some folders of the root."""
    return {
        path: text
        for path, text in tree.items()
        if path.split("/")[0] in folders and path.endswith(suffix)
    }


@cache
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


def option_rows(tree: Tree) -> Iterator[Row]:
    """Yields the number of the product's files that spell each sampling option as a word."""
    product = [text for path, text in _under(tree, PRODUCT).items() if not path.endswith(".md")]
    for option in SAMPLING_OPTIONS:
        word = re.compile(rf"\b{option}\b")
        yield Row(f"files that spell `{option}`", str(sum(bool(word.search(t)) for t in product)))


def module_name(path: str) -> str:
    """Returns the dotted name of a Python file."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def import_edges(tree: Tree) -> set[tuple[str, str]]:
    """Returns pairs of paths: a module, and a module of the tree that it imports by name.

    An imported name that is a module counts as that module, any other as the module it is from.
    """
    modules = {module_name(path): path for path in tree if path.endswith(".py")}
    edges = set()
    for path in modules.values():
        for name in _imported(_parse(tree[path])):
            found = modules.get(name) or modules.get(name.rpartition(".")[0])
            if found is not None and found != path:
                edges.add((path, found))
    return edges


def _imported(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_rows(tree: Tree) -> Iterator[Row]:
    """Yields modules and import edges of each service, of the kernels, and of their folders."""
    code = _under(tree, ("services", "kernels"), ".py")
    edges = import_edges(code)
    for part in (*(f"services/{name}" for name in SERVICES), "kernels"):
        inside = [path for path in code if path.startswith(f"{part}/")]
        own = {(a, b) for a, b in edges if a in inside and b in inside}
        between = {(_folder(a), _folder(b)) for a, b in own} - {(f, f) for f in map(_folder, code)}
        yield Row(
            f"**{part}**: modules, imports, imports between folders",
            f"{len(inside)}, {len(own)}, {len(between)}",
        )
        for folder, n_modules in sorted(Counter(map(_folder, inside)).items()):
            n_within = sum(_folder(a) == folder == _folder(b) for a, b in own)
            n_out = sum(_folder(a) == folder != _folder(b) for a, b in own)
            yield Row(
                f"{folder}/: modules, imports inside it, imports of folders beside it",
                f"{n_modules}, {n_within}, {n_out}",
            )


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def longest(tree: Tree, *kinds: type[ast.ClassDef | Function]) -> Definition:
    """Returns the longest definition of some kinds outside tests; decorators are not counted."""
    return max(
        (
            Definition((node.end_lineno or 0) - node.lineno + 1, node.name, path)
            for path, text in _under(tree, CODE, ".py").items()
            for node in ast.walk(_parse(text))
            if isinstance(node, kinds)
        ),
        key=lambda definition: definition.n_lines,
    )


def length_rows(tree: Tree) -> Iterator[Row]:
    """Yields the longest function, the longest class, and the long files outside tests."""
    yield Row("longest function", str(longest(tree, ast.FunctionDef, ast.AsyncFunctionDef)))
    yield Row("longest class", str(longest(tree, ast.ClassDef)))
    n_lines = {path: text.count("\n") for path, text in _under(tree, CODE).items()}
    long = sorted((n, path) for path, n in n_lines.items() if n > MAX_LINES and path[-3:] != ".md")
    names = ", ".join(f"{path} {n}" for n, path in reversed(long))
    yield Row(f"files above {MAX_LINES} lines", f"{len(long)}: {names}" if long else "0")


def settings_rows(tree: Tree) -> Iterator[Row]:
    """Yields the number of fields that each class of settings has itself."""
    for path, text in _under(tree, ("services",), ".py").items():
        for node in _parse(text).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Settings"):
                n_fields = sum(isinstance(each, ast.AnnAssign) for each in node.body)
                yield Row(f"fields of `{node.name}`", f"{n_fields} ({path})")


def docstrings(module: ast.Module) -> Iterator[str]:
    """Yields the docstrings of a module, its classes and functions, and of their attributes."""
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            yield from filter(None, [ast.get_docstring(node)])
            for before, after in zip(node.body, node.body[1:], strict=False):
                if isinstance(before, ast.Assign | ast.AnnAssign) and (text := _string(after)):
                    yield text


def _string(node: ast.stmt) -> str | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return node.value.value if isinstance(node.value.value, str) else None
    return None


def prose_rows(tree: Tree) -> Iterator[Row]:
    """Yields docstrings, those that begin unclearly, and words of README and docs."""
    for title, folders in (("outside tests", CODE), ("in tests", ("tests",))):
        files = _under(tree, folders, ".py").values()
        found = [text for each in files for text in docstrings(_parse(each))]
        n_unclear = sum(bool(UNCLEAR.match(text)) for text in found)
        yield Row(
            f"docstrings {title}; that begin with What, Of, The same",
            f"{len(found)}; {n_unclear}",
        )
    pages = [t for path, t in tree.items() if re.fullmatch(r"README\.md|docs/[^/]*\.md", path)]
    yield Row("words of README.md and docs/*.md", f"{sum(len(page.split()) for page in pages):,}")


MEASURES: tuple[Callable[[Tree], Iterator[Row]], ...] = (
    option_rows,
    module_rows,
    length_rows,
    settings_rows,
    prose_rows,
)


def rows_of(tree: Tree) -> dict[str, str]:
    """Returns every figure of a tree, by its title."""
    return {row.title: row.figure for measure in MEASURES for row in measure(tree)}


def table(columns: Mapping[str, Mapping[str, str]]) -> str:
    """Returns a table in Markdown with a column for each tree; a dash where one has no figure."""
    titles = _merged([list(figures) for figures in columns.values()])
    lines = [["", *columns], ["---"] * (1 + len(columns))]
    lines += [[title, *(each.get(title, "-") for each in columns.values())] for title in titles]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _merged(lists: Sequence[Sequence[str]]) -> list[str]:
    """Returns all titles once; a title that an earlier list lacks follows its predecessor."""
    merged: list[str] = []
    for titles in lists:
        place = 0
        for title in titles:
            if title in merged:
                place = merged.index(title) + 1
            else:
                merged.insert(place, title)
                place += 1
    return merged


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.structure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rev", action="append", default=[], help="a revision; may be repeated")
    revisions = parser.parse_args(arguments).rev
    trees = {revision: tree_of(ROOT, revision) for revision in revisions}
    trees = trees or {"working tree": working_tree(ROOT)}
    print(table({name: rows_of(tree) for name, tree in trees.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
