"""Translates `vocab.json` with `merges.txt`, the files in which GPT-2 and OPT publish byte-level
BPE.

The two files do not say how a text is divided into words. This is determined by the name of the
tokenizer's class or by the model's type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.common import bounded_file
from services.common.tokenizer_files.named_tokens import NamedTokens
from services.common.tokenizer_parts import (
    BYTE_LEVEL,
    CL100K_WORDS,
    MAX_TOKENS,
    Json,
    around,
    bpe,
    cut_by,
    document,
)

VOCABULARY, MERGES = "vocab.json", "merges.txt"

MAX_BYTES = 64 << 20
"""Largest size in bytes of either file, sixteen times the size of GPT-2's files."""

_VERSION = "#version"
"""Beginning of an optional first line of `merges.txt`. A line that begins so is not a merge."""

_END = "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class _Kind:
    """A variant of byte-level BPE: the step that divides texts into words, the Unicode normal form
    of texts, and the default roles of tokens."""

    words: Json
    normalizer: Json | None
    roles: Mapping[str, str]


_GPT2 = _Kind(
    {**BYTE_LEVEL, "use_regex": True},
    None,
    {"bos_token": _END, "eos_token": _END, "unk_token": _END},
)
_QWEN2 = _Kind(
    cut_by(CL100K_WORDS % ""),
    {"type": "NFC"},
    {"eos_token": _END, "pad_token": _END, "unk_token": _END},
)
_OF_CLASS = {"GPT2": _GPT2, "CodeGen": _GPT2, "Qwen2": _QWEN2}
"""The variant of byte-level BPE for each name of a tokenizer's class. Endings such as `Tokenizer`
are left out of the names."""

_OF_MODEL = {"gpt2": _GPT2, "opt": _GPT2, "phi": _GPT2, "qwen2": _QWEN2, "qwen3": _QWEN2,
             "qwen2_moe": _QWEN2, "qwen3_moe": _QWEN2}  # fmt: skip
"""The variant of byte-level BPE for each `model_type` of `config.json`."""


def read_bpe_files(path: Path) -> str:
    """Reads a `vocab.json` and the `merges.txt` in the same directory, and returns them as one
    `tokenizer.json`.

    Raises:
        OSError: a file cannot be read.
        ValueError, LookupError, TypeError: a file is broken, or the variant is unknown.
    """
    kind = _kind_of(path)
    named = NamedTokens.beside(path, kind.roles)
    vocab = _vocabulary(path)
    has_prefix = named.flag("add_prefix_space", default=False)
    starts, ends = (named.flag(f"add_{end}_token", default=False) for end in ("bos", "eos"))
    words = {**kind.words, "add_prefix_space": has_prefix} if kind is _GPT2 else kind.words
    return document(
        named.tokens(vocab),
        normalizer=kind.normalizer,
        pre_tokenizer=words,
        post_processor=around(
            named.with_role("bos_token", vocab) if starts else None,
            named.with_role("eos_token", vocab) if ends else None,
            otherwise={**BYTE_LEVEL, "trim_offsets": False, "use_regex": True},
        ),
        decoder={**BYTE_LEVEL, "use_regex": True},
        model=bpe({**vocab, **named.added}, _merges(path.with_name(MERGES))),
    )


def default_roles(path: Path) -> Mapping[str, str]:
    """Returns the default texts of tokens by their roles, such as `bos_token`. Other files may name
    other tokens for these roles.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is broken, or the variant of byte-level BPE is unknown.
    """
    return _kind_of(path).roles


def _kind_of(path: Path) -> _Kind:
    config = _json(path.with_name("tokenizer_config.json"))
    name = str(config.get("tokenizer_class") or "").removesuffix("Fast").removesuffix("Tokenizer")
    if name in _OF_CLASS:
        return _OF_CLASS[name]
    model = str(_json(path.with_name("config.json")).get("model_type"))
    if model in _OF_MODEL:
        return _OF_MODEL[model]
    raise ValueError(
        f"how {name or model}'s tokenizer divides texts is in no file; make a tokenizer.json with "
        "transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
    )


def _vocabulary(path: Path) -> dict[str, int]:
    vocab = bounded_file.read_json_object(path, max_bytes=MAX_BYTES)
    if not all(type(token_id) is int and 0 <= token_id < MAX_TOKENS for token_id in vocab.values()):
        raise ValueError("has a token without a number")
    if len(set(vocab.values())) < len(vocab):
        raise ValueError("has two tokens with one number")
    return vocab


def _merges(path: Path) -> list[tuple[str, str]]:
    content = bounded_file.read_bytes(path, max_bytes=MAX_BYTES).decode()
    lines = [line.rstrip("\r") for line in content.split("\n")]
    found = []
    for number, line in enumerate(lines, start=1):
        if not line or (number == 1 and line.startswith(_VERSION)):
            continue
        left, _, right = line.partition(" ")
        if not (left and right) or " " in right:
            raise ValueError(f"{path}: line {number} is no pair: {line[:80]!r}")
        found.append((left, right))
    return found


def _json(path: Path) -> Json:
    if not path.is_file():
        return {}
    return bounded_file.read_json_object(path, max_bytes=MAX_BYTES)
