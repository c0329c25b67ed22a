"""The corpus: the prose of the Python standard library, without repeats.

Every machine with Python has this text, so that nothing is downloaded: docstrings (read from the
source with `ast`, or from compiled modules at run time), the language reference that `help()`
shows, text files and longer comments. Code, tables and doctests are left out.
"""

import ast
import hashlib
import importlib
import inspect
import logging
import pydoc_data.topics
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

log = logging.getLogger(__name__)

HELD_OUT_PERCENT = 2

LEFT_OUT = {
    "site-packages", "dist-packages", "__pycache__", "__phello__", "_bundled",
    "test", "tests", "idle_test",
    "encodings",  # a hundred codecs with identical docstrings
    "pydoc_data",  # `other_documents` reads its topics
}  # fmt: skip
PUBLIC_NAMES = {"builtins": "", "posix": "os", "nt": "os", "posixpath": "os.path"}
BULLET = re.compile(r"\s*([-*+o•]|\d+[.)]|\(\w\)|@\w+|:\w+|\S+ --?)\s")
RULE = re.compile(r"\s*[^\w\s]{3,}\s*")
CODE = re.compile(r"(?m)^\s*(?:def|class|import|from \w+ import|@)\b|[:;{]$| = ")
ROLE = re.compile(r":[\w:]+:`~?([^`]+)`")


@dataclass(frozen=True, slots=True)
class Document:
    """A cleaned text, with the name of the module, class or function that it explains, if any."""

    text: str
    name: str | None = None

    @property
    def answer(self) -> str | None:
        """The first paragraph that is a sentence, used as an answer; None if the paragraph is
        incomplete or too long."""
        for paragraph in self.text.split("\n\n"):
            if len(paragraph.split()) >= 4 and paragraph[0].isupper():
                is_whole = len(paragraph) <= 700 and paragraph.endswith((".", "!", "?", ")"))
                return paragraph if is_whole else None
        return None

    @property
    def is_held_out(self) -> bool:
        """Whether the document is held out of the training. The decision depends on its first
        paragraph, so that copies of a held-out document are held out too."""
        opening = " ".join(self.text.split("\n\n")[0].lower().split())
        return int(hashlib.sha256(opening.encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT


def reflow(paragraph: str) -> str:
    """Joins lines that were wrapped at a width; lists and other layouts stay unchanged."""
    lines: list[str] = []
    width = 0
    for line in textwrap.dedent(paragraph).splitlines():
        is_wrapped = width >= 55 and not BULLET.match(line) and not lines[-1].endswith(":")
        if is_wrapped:
            lines[-1] += " " + line.strip()
        else:
            lines.append(line.rstrip())
        width = len(line)
    return "\n".join(lines)


def is_prose(paragraph: str) -> bool:
    """Returns whether a paragraph is prose, and not code, a table or a doctest."""
    if ">>>" in paragraph or "::=" in paragraph or re.match(r"\s*[.$]{2,}", paragraph):
        return False
    n_plain = sum(char.isalpha() or char in " ,.'\n" for char in paragraph)
    code_lines = len(CODE.findall(paragraph))
    return n_plain / len(paragraph) >= 0.85 and code_lines * 3 <= len(paragraph.splitlines())


def clean(text: str) -> str:
    """Returns the text dedented and unwrapped, without rules, code, tables and markup."""
    text = ROLE.sub(r"`\1`", inspect.cleandoc(text)).replace("``", "`").replace("::\n", ":\n")
    text = "\n".join("" if RULE.fullmatch(line) else line for line in text.splitlines())
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(reflow(p) for p in paragraphs if p.strip() and is_prose(p)).strip()


def source_files(stdlib: Path, suffixes: set[str]) -> Iterator[Path]:
    for path in sorted(stdlib.rglob("*")):
        if path.suffix in suffixes and not LEFT_OUT & set(path.relative_to(stdlib).parts):
            yield path


def docstrings(node: ast.AST, name: str) -> Iterator[Document]:
    """Yields the docstrings at and under a node; names with a private part are left out."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text:
            yield Document(text, None if "._" in f".{name}" else name)
    for child in ast.iter_child_nodes(node):
        inner = getattr(child, "name", None) if isinstance(child, ast.stmt) else None
        yield from docstrings(child, f"{name}.{inner}" if inner else name)


def comment_blocks(source: str) -> Iterator[Document]:
    """Yields runs of three or more comment lines."""
    for block in re.findall(r"(?m)(?:^[ \t]*#.*\n){3,}", source):
        yield Document("\n".join(re.sub(r"^\s*#+:? ?", "", line) for line in block.splitlines()))


def python_documents(stdlib: Path) -> Iterator[Document]:
    for path in source_files(stdlib, {".py"}):
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (UnicodeDecodeError, SyntaxError):
            log.info("not read: %s", path.name)
            continue
        module = ".".join(path.relative_to(stdlib).with_suffix("").parts).removesuffix(".__init__")
        yield from docstrings(tree, PUBLIC_NAMES.get(module, module))
        yield from comment_blocks(source)


def compiled_modules(stdlib: Path) -> set[str]:
    """Returns the modules without Python source, whose docstrings exist only at run time."""
    suffixes = tuple(EXTENSION_SUFFIXES)
    files = (path.name for path in stdlib.glob("lib-dynload/*") if path.name.endswith(suffixes))
    names = set(sys.builtin_module_names) | {name.split(".")[0] for name in files}
    return {name for name in names if "test" not in name and not name.startswith("_xx")}


def object_documents(owner: object, prefix: str) -> Iterator[Document]:
    for key, value in sorted(vars(owner).items()):
        text = inspect.getdoc(value) if callable(value) or inspect.isdatadescriptor(value) else None
        if key.startswith("_") or not text:
            continue
        name = f"{prefix}.{key}".strip(".")
        yield Document(text, name)
        if isinstance(value, type):
            yield from object_documents(value, name)


def compiled_documents(stdlib: Path) -> Iterator[Document]:
    for name in sorted(compiled_modules(stdlib)):
        try:
            module = importlib.import_module(name)
        except ImportError:
            log.info("not built here: %s", name)
            continue
        public = PUBLIC_NAMES.get(name, name.lstrip("_"))
        if module.__doc__:
            yield Document(module.__doc__, name if public == name else None)
        yield from object_documents(module, public)


def other_documents(stdlib: Path) -> Iterator[Document]:
    """Yields the pages of `help()` about the language, and the text files of the library."""
    for name, text in sorted(pydoc_data.topics.topics.items()):
        yield Document(text, name)
    for path in source_files(stdlib, {".txt", ".rst"}):
        for section in re.split(r"\n\n\n+", path.read_text(encoding="utf-8", errors="replace")):
            yield Document(section)


def collect(stdlib: Path) -> list[Document]:
    """Returns the cleaned corpus without repeats, in an order that depends only on the text."""
    documents: dict[str, Document] = {}
    for source in (compiled_documents, python_documents, other_documents):
        for raw in source(stdlib):
            document = Document(clean(raw.text), raw.name)
            key = " ".join(document.text.lower().split())
            if len(key.split()) >= 6 and (key not in documents or not documents[key].name):
                documents[key] = document
    return [documents[key] for key in sorted(documents)]


def n_bytes(documents: list[Document]) -> int:
    return sum(len(document.text.encode()) for document in documents)
