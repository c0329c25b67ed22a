"""Finds the token that ends a text for a checkpoint's tokenizer."""

from __future__ import annotations

from pathlib import Path

from services.common.derived import Derived
from services.common.tokenizer_config import CONFIG, Numbers, TokenizerConfig, json_object
from services.common.tokenizer_files.find import default_roles, read_tokenizer, tokenizer_file

_ROLE = "eos_token"


def end_token(directory: Path) -> Derived[int] | None:
    """Returns the id of the end-of-text token and where it was found: in `tokenizer_config.json` or
    other small files of the directory, or in the tokenizer itself. Returns None if no file names
    such a token, or the directory has no tokenizer.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is broken.
    """
    config = TokenizerConfig.of_directory(directory)
    file = tokenizer_file(directory)
    text = config.special_tokens.get(_ROLE) or default_roles(file).get(_ROLE)
    if text is None or not file.is_file():
        return None
    found = Numbers(json_object(read_tokenizer(file))).find(text)
    named_by = CONFIG if _ROLE in config.special_tokens else file.name
    source = f"{config.source.get(_ROLE, named_by)}: {_ROLE} {text[:40]}"
    return None if found is None else Derived(found, source)
