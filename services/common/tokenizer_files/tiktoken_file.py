"""Translates `tiktoken.model`, the tokenizer of Kimi K2 as published.

A line of the file has the bytes of a token in base64 and its rank. The rule that divides texts into
words is only in a Python program in the same directory. This program is not run. This module has
Kimi's rule, and other models are refused. The tokens are followed by 256 special tokens, some of
which `tokenizer_config.json` names.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path

from services.common import bounded_file
from services.common.tokenizer_files.named_tokens import NamedTokens
from services.common.tokenizer_files.ranked_bytes import ranked_tokenizer
from services.common.tokenizer_parts import MAX_TOKENS

FILE = "tiktoken.model"

MAX_BYTES = 64 << 20
"""Largest size of a `tiktoken.model` in bytes, twenty times the size of Kimi's file."""

ROLES: Mapping[str, str] = {"bos_token": "[BOS]", "eos_token": "[EOS]"}
"""Default texts of tokens by their roles. Other files may replace them."""

N_SPECIAL = 256

_KIMI = ("kimi", "deepseek_v3")
"""Values with which `model_type` may begin in the `config.json` of Kimi's models."""

# Words have no Chinese characters, which are words of their own.
_CAPITAL = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_SMALL = r"\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_PATTERN = "|".join((
    r"[\p{Han}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_CAPITAL}]*[{_SMALL}]+{_END}",
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_CAPITAL}]+[{_SMALL}]*{_END}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
))  # fmt: skip


def read_tiktoken(path: Path) -> str:
    """Reads a `tiktoken.model`, and returns it as a `tokenizer.json`.

    Raises:
        OSError: a file cannot be read.
        ValueError, LookupError, TypeError: a file is broken, or the model is not Kimi.
    """
    _check_model(path)
    tokens = _tokens(bounded_file.read_bytes(path, max_bytes=MAX_BYTES))
    named = {token_id: text for text, token_id in NamedTokens.beside(path, ROLES).added.items()}
    special = {
        named.get(token_id, f"<|reserved_token_{token_id}|>"): token_id
        for token_id in range(len(tokens), len(tokens) + N_SPECIAL)
    }
    return ranked_tokenizer(tokens, first_id=0, special=special, pattern=_PATTERN)


def _check_model(path: Path) -> None:
    config = path.with_name("config.json")
    if config.is_file():
        model = bounded_file.read_json_object(config, max_bytes=MAX_BYTES).get("model_type")
        if not str(model).startswith(_KIMI):
            raise ValueError(
                f"how {str(model)[:80]}'s tokenizer divides texts is in no file; Kimi's is known"
            )


def _tokens(content: bytes) -> list[bytes]:
    lines = content.splitlines()
    if not 0 < len(lines) <= MAX_TOKENS:
        raise ValueError(f"has {len(lines)} lines, {MAX_TOKENS} at most")
    found = []
    for rank, line in enumerate(lines):
        token, _, number = line.partition(b" ")
        if number != str(rank).encode():
            raise ValueError(f"line {rank + 1} has no rank {rank}")
        try:
            found.append(base64.b64decode(token, validate=True))
        except binascii.Error as error:
            raise ValueError(f"line {rank + 1} is not base64: {error}") from error
    return found
