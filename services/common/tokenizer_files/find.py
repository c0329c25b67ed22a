"""Determines which file of a checkpoint is its tokenizer, and reads the file as a
`tokenizer.json`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from services.common import bounded_file
from services.common.gguf.header import is_gguf
from services.common.gguf.tokenizer import read_gguf_tokenizer
from services.common.tokenizer_config import completed_tokenizer
from services.common.tokenizer_files import bpe_files, sentence_piece, tekken, tiktoken_file

TOKENIZER_JSON = "tokenizer.json"

MAX_FILE_BYTES = 256 << 20
"""Largest size of a `tokenizer.json` in bytes, five times the size of the largest published
files."""

_TRANSLATED: Mapping[str, Callable[[Path], str]] = {
    tekken.FILE: tekken.read_tekken,
    sentence_piece.FILE: sentence_piece.read_sentence_piece,
    tiktoken_file.FILE: tiktoken_file.read_tiktoken,
    bpe_files.VOCABULARY: bpe_files.read_bpe_files,
}
"""For each file name other than `tokenizer.json`, the function that reads such a file as a
`tokenizer.json`. If a checkpoint has several of these files, the first in this order is read."""

_ROLES: Mapping[str, Callable[[Path], Mapping[str, str]]] = {
    tekken.FILE: lambda file: tekken.NAMED,
    sentence_piece.FILE: sentence_piece.default_roles,
    tiktoken_file.FILE: lambda file: tiktoken_file.ROLES,
    bpe_files.VOCABULARY: bpe_files.default_roles,
}

_BESIDE = {bpe_files.VOCABULARY: bpe_files.MERGES}
"""For a tokenizer that consists of two files, the name of the second file, keyed by the name of the
first. Both files must be in the checkpoint's directory."""


def tokenizer_in(names: Collection[str]) -> str | None:
    """Returns the name of the tokenizer file among `names`, the names of a directory's files.
    Returns None if there is no tokenizer."""
    for name in (TOKENIZER_JSON, *_TRANSLATED):
        if name in names and _BESIDE.get(name, name) in names:
            return name
    return None


def tokenizer_file(model: Path) -> Path:
    """Returns the path of the file that has a model's vocabulary: a file in the model's directory,
    or the GGUF file itself. If the directory has no such file, returns the path that a
    `tokenizer.json` would have."""
    if is_gguf(model):
        return model
    names = [name for name in (TOKENIZER_JSON, *_TRANSLATED, *_BESIDE.values())]
    found = tokenizer_in([name for name in names if (model / name).is_file()])
    return model / (found or TOKENIZER_JSON)


def default_roles(file: Path) -> Mapping[str, str]:
    """Returns the texts of tokens by their roles, such as `bos_token`, from the tokenizer's own
    file. Returns an empty mapping for a `tokenizer.json`, because other files name the roles of its
    tokens.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is broken.
    """
    of_file = _ROLES.get(file.name)
    return {} if of_file is None or not file.is_file() else of_file(file)


def read_tokenizer(file: Path) -> str:
    """Reads a tokenizer file that `tokenizer_file` has found, and returns it as a `tokenizer.json`.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is broken, or of an unknown kind; the message names the file.
    """
    if is_gguf(file):
        return read_gguf_tokenizer(file)
    try:
        return _TRANSLATED.get(file.name, _read_whole)(file)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, ValueError) and str(file.parent) in str(error):
            raise
        raise ValueError(f"{file}: {error}") from error


def _read_whole(file: Path) -> str:
    content = bounded_file.read_bytes(file, max_bytes=MAX_FILE_BYTES).decode()
    return completed_tokenizer(content, file.parent)
