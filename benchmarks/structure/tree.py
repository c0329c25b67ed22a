"""Source trees, of a git revision or of the working tree: the text and the definitions of each
file."""

import ast
import inspect
import io
import re
import subprocess
import tarfile
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

CODE_SUFFIXES = frozenset({".py", ".proto", ".h", ".cpp", ".js"})
SUFFIXES = CODE_SUFFIXES | {".md"}

Tree = Mapping[str, str]
"""The text of each file, by its path from the root of the repository."""

Function = ast.FunctionDef | ast.AsyncFunctionDef

_C_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


class Docstring(NamedTuple):
    """A docstring, its first and last line in the file, and the code of the definition that it
    describes. The definition is empty for a module."""

    first_line: int
    last_line: int
    text: str
    definition: str


def working_tree(root: Path) -> Tree:
    """Returns the source files on disk that git tracks, and those that are new and not ignored."""
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").decode()
    paths = {path for path in listed.split("\0") if _is_source(path) and (root / path).is_file()}
    return {path: (root / path).read_text(encoding="utf-8") for path in sorted(paths)}


def tree_of(root: Path, revision: str) -> Tree:
    """Returns the source files of a revision, read from `git archive`.

    Raises:
        subprocess.CalledProcessError: git does not know the revision.
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


def under(tree: Tree, folders: Sequence[str], suffix: str = "") -> dict[str, str]:
    """Returns the files below the top-level `folders` whose paths end with `suffix`."""
    return {
        path: text
        for path, text in tree.items()
        if path.split("/")[0] in folders and path.endswith(suffix)
    }


def code_under(tree: Tree, folders: Sequence[str]) -> dict[str, str]:
    """Returns the files below the top-level `folders` that are code, by their suffix."""
    files = under(tree, folders)
    return {path: files[path] for path in files if PurePosixPath(path).suffix in CODE_SUFFIXES}


def folder_of(path: str) -> str:
    """Returns the path of the folder that a file is in; empty for the root."""
    return path.rpartition("/")[0]


@cache
def parse(text: str) -> ast.Module:
    """Returns the syntax tree of a Python module."""
    return ast.parse(text)


def docstrings(module: ast.Module) -> Iterator[Docstring]:
    """Yields the docstrings of a module, its classes and functions, and of their attributes."""
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            for before, statement in zip([None, *node.body], node.body, strict=False):
                is_documented = before is None or isinstance(before, ast.Assign | ast.AnnAssign)
                if is_documented and (text := _text_of(statement)) is not None:
                    last = statement.end_lineno or statement.lineno
                    yield Docstring(statement.lineno, last, text, _definition_of(before or node))


def _definition_of(node: ast.AST) -> str:
    """Returns the code of a definition without its body; an empty text for a module."""
    match node:
        case ast.ClassDef():
            return f"class {node.name}({', '.join(map(ast.unparse, node.bases))})"
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            returned = ast.unparse(node.returns) if node.returns else "None"
            return f"def {node.name}({ast.unparse(node.args)}) -> {returned}"
        case ast.Assign() | ast.AnnAssign():
            return ast.unparse(node)
        case _:
            return ""


def _text_of(node: ast.stmt) -> str | None:
    """Returns the text of a statement that is only a string literal; None for other statements."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return None
    value = node.value.value
    return inspect.cleandoc(value) if isinstance(value, str) else None


class Line(NamedTuple):
    """A line of code, without its indentation and comment, and its number in the file."""

    number: int
    text: str


def code_lines(path: str, text: str) -> list[Line]:
    """Returns the lines of a file that are code: neither blank nor comment nor docstring."""
    bare = _bare_python(text) if path.endswith(".py") else _bare_c(text)
    lines = (Line(number, line.strip()) for number, line in enumerate(bare.split("\n"), start=1))
    return [line for line in lines if line.text]


def _bare_python(text: str) -> str:
    lines = text.split("\n")
    for docstring in docstrings(parse(text)):
        for number in range(docstring.first_line, docstring.last_line + 1):
            lines[number - 1] = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return "\n".join(lines)


def _bare_c(text: str) -> str:
    """Returns the text of a C++, JavaScript or proto file in which each comment is replaced by as
    many empty lines."""
    return _C_COMMENT.sub(lambda found: "\n" * found[0].count("\n"), text)
