"""The measures of a source tree. Each is a row of the table."""

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.structure.duplicates import MIN_LINES, duplicates
from benchmarks.structure.tree import (
    Function,
    Tree,
    code_lines,
    code_under,
    docstrings,
    folder_of,
    parse,
    under,
)

SPELLED = (
    "priority",
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
MODULES = ("services", "kernels")
N_FOLDERS = 10
"""Number of folders that the table names: those with the most modules."""
DESCRIPTION = re.compile(r"Recorder|Program(Builder)?")
"""Pattern of the names of types to which a method adds the steps of a program. `ProgramBatch`, the
input of a program, does not match."""
CODE = ("services", "kernels", "benchmarks", "models", "examples")
SERVICES = ("common", "frontend", "local", "scheduler", "worker")
MAX_LINES = 350
UNCLEAR = re.compile(r"(What|Of|The same)\b")
"""Pattern of docstrings whose first word is neither an action nor a thing."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: its title, and the value for one tree."""

    title: str
    figure: str


@dataclass(frozen=True, slots=True)
class Definition:
    """A function or class, its file, and its number of lines."""

    n_lines: int
    name: str
    path: str

    def __str__(self) -> str:
        return f"{self.n_lines}: `{self.name}` in {self.path}"


def option_rows(tree: Tree) -> Iterator[Row]:
    """Yields, for each option of a request, the number of the product's files in which the option
    occurs as a word."""
    product = code_under(tree, PRODUCT).values()
    for option in SPELLED:
        word = re.compile(rf"\b{option}\b")
        yield Row(f"files that spell `{option}`", str(sum(bool(word.search(t)) for t in product)))


def size_rows(tree: Tree) -> Iterator[Row]:
    """Yields rows with the numbers of files and code lines of services and kernels, and with the
    folders that have the most modules."""
    code = code_under(tree, MODULES)
    n_lines = {path: len(code_lines(path, text)) for path, text in code.items()}
    python = [path for path in code if path.endswith(".py")]
    yield Row("**services, kernels**: Python files, files of code", f"{len(python)}, {len(code)}")
    yield Row(
        "lines of code without blanks, comments, docstrings: Python, all",
        f"{sum(n_lines[path] for path in python):,}, {sum(n_lines.values()):,}",
    )
    largest = Counter(map(folder_of, python)).most_common(N_FOLDERS)
    yield Row("largest folders", ", ".join(f"{folder} {n}" for folder, n in largest))


def twice_rows(tree: Tree) -> Iterator[Row]:
    """Yields rows with the number of classes that both compute a layer and describe it as a
    program, and with the number of duplicated places."""
    python = under(tree, MODULES, ".py")
    found = [
        f"{node.name} ({path})"
        for path, text in python.items()
        for node in ast.walk(parse(text))
        if isinstance(node, ast.ClassDef) and computes_and_describes(node)
    ]
    yield Row("classes with `__call__` and a method that describes the same", str(len(found)))
    pairs = duplicates(code_under(tree, MODULES))
    longest = f", the longest {pairs[0].n_lines} lines" if pairs else ""
    yield Row(f"pairs of places that share {MIN_LINES} lines or more", f"{len(pairs)}{longest}")


def computes_and_describes(node: ast.ClassDef) -> bool:
    """Returns whether a class both computes a layer and describes it as a program: it has
    `__call__`, and a public method that adds steps to a program. Such a method has a name that
    begins with `record`, or a parameter whose type is a program."""
    methods = [each for each in node.body if isinstance(each, Function)]
    public = [method for method in methods if not method.name.startswith("_")]
    return any(method.name == "__call__" for method in methods) and any(
        method.name.startswith("record") or _describes(method) for method in public
    )


def _describes(method: Function) -> bool:
    annotations = [each.annotation for each in (*method.args.args, *method.args.kwonlyargs)]
    return any(each and DESCRIPTION.fullmatch(ast.unparse(each)) for each in annotations)


def module_name(path: str) -> str:
    """Returns the dotted module name of a Python file, such as `a.b` for `a/b.py` and
    `a/b/__init__.py`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def import_edges(tree: Tree) -> set[tuple[str, str]]:
    """Returns the imports between modules of a tree, as pairs of paths: the importing module and
    the imported module. An import of a name from a module counts as an import of that module."""
    modules = {module_name(path): path for path in tree if path.endswith(".py")}
    edges = set()
    for path in modules.values():
        for name in _imported(parse(tree[path])):
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
    """Yields rows with the numbers of modules and imports of each service and of the kernels, and
    of each of their folders."""
    code = under(tree, ("services", "kernels"), ".py")
    edges = import_edges(code)
    for part in (*(f"services/{name}" for name in SERVICES), "kernels"):
        inside = [path for path in code if path.startswith(f"{part}/")]
        own = {(a, b) for a, b in edges if a in inside and b in inside}
        folders = {(folder_of(a), folder_of(b)) for a, b in own}
        between = {(a, b) for a, b in folders if a != b}
        yield Row(
            f"**{part}**: modules, imports, imports between folders",
            f"{len(inside)}, {len(own)}, {len(between)}",
        )
        for folder, n_modules in sorted(Counter(map(folder_of, inside)).items()):
            n_within = sum(folder_of(a) == folder == folder_of(b) for a, b in own)
            n_out = sum(folder_of(a) == folder != folder_of(b) for a, b in own)
            yield Row(
                f"{folder}/: modules, imports inside it, imports of folders beside it",
                f"{n_modules}, {n_within}, {n_out}",
            )


def longest(tree: Tree, *kinds: type[ast.ClassDef | Function]) -> Definition:
    """Returns the longest definition whose syntax node is of one of `kinds`, outside tests.
    Decorators do not count."""
    return max(
        (
            Definition((node.end_lineno or 0) - node.lineno + 1, node.name, path)
            for path, text in under(tree, CODE, ".py").items()
            for node in ast.walk(parse(text))
            if isinstance(node, kinds)
        ),
        key=lambda definition: definition.n_lines,
    )


def length_rows(tree: Tree) -> Iterator[Row]:
    """Yields rows with the longest function, the longest class, and the long files, outside
    tests."""
    yield Row("longest function", str(longest(tree, ast.FunctionDef, ast.AsyncFunctionDef)))
    yield Row("longest class", str(longest(tree, ast.ClassDef)))
    n_lines = {path: text.count("\n") for path, text in under(tree, CODE).items()}
    long = sorted((n, path) for path, n in n_lines.items() if n > MAX_LINES and path[-3:] != ".md")
    names = ", ".join(f"{path} {n}" for n, path in reversed(long))
    yield Row(f"files above {MAX_LINES} lines", f"{len(long)}: {names}" if long else "0")


def settings_rows(tree: Tree) -> Iterator[Row]:
    """Yields a row with the number of fields of all settings classes, and a row for each class with
    the fields that it adds to its bases."""
    n_fields = {
        (node.name, path): sum(isinstance(each, ast.AnnAssign) for each in node.body)
        for path, text in under(tree, ("services",), ".py").items()
        for node in parse(text).body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Settings")
    }
    yield Row("settings", str(sum(n_fields.values())))
    for (name, path), n in n_fields.items():
        yield Row(f"fields of `{name}`", f"{n} ({path})")


def prose_rows(tree: Tree) -> Iterator[Row]:
    """Yields rows with the number of docstrings, the number of those with an unclear beginning, and
    the number of words in README and docs."""
    for title, folders in (("outside tests", CODE), ("in tests", ("tests",))):
        files = under(tree, folders, ".py").values()
        found = [docstring.text for each in files for docstring in docstrings(parse(each))]
        n_unclear = sum(bool(UNCLEAR.match(text)) for text in found)
        yield Row(
            f"docstrings {title}; that begin with What, Of, The same",
            f"{len(found)}; {n_unclear}",
        )
    pages = [t for path, t in tree.items() if re.fullmatch(r"README\.md|docs/[^/]*\.md", path)]
    yield Row("words of README.md and docs/*.md", f"{sum(len(page.split()) for page in pages):,}")


MEASURES: tuple[Callable[[Tree], Iterator[Row]], ...] = (
    size_rows,
    twice_rows,
    settings_rows,
    option_rows,
    module_rows,
    length_rows,
    prose_rows,
)


def rows_of(tree: Tree) -> dict[str, str]:
    """Returns the values of all rows for a tree, by their titles."""
    return {row.title: row.figure for measure in MEASURES for row in measure(tree)}
