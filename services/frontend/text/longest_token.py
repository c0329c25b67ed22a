"""Finds the largest number of characters that one token can stand for, from the description of the
tokenizer.

With this number, a lower bound on the number of a text's tokens is known before the text is
tokenized. Some parts of tokenizers make texts shorter: normalizers that strip, pre-tokenizers that
drop spaces, a token for any unknown text. So a bound is given only if all parts of the tokenizer
are known to keep every character.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import tokenizers

COMPOSED_CHARACTERS = 4
"""Largest number of characters that Unicode's composed forms (NFC, NFKC) join into one."""

N_BYTES = 256

Part = Mapping[str, Any]


def longest_token(tokenizer: tokenizers.Tokenizer) -> int | None:
    """Returns the largest number of characters of a text that one token stands for. Returns None if
    no bound is known."""
    parts: Part = json.loads(tokenizer.to_str())
    shrinking = _shrinking(parts["normalizer"])
    spans = [token["lstrip"] or token["rstrip"] for token in parts["added_tokens"]]
    if shrinking is None or any(spans) or not _keeps_all(parts["pre_tokenizer"]):
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary or not _spells_all(parts, vocabulary):
        return None
    return shrinking * max(map(len, vocabulary))


def _shrinking(normalizer: Part | None) -> int | None:
    """Returns the largest number of characters of a text that a normalizer turns into one
    character. Returns None if the number is not known."""
    factor = 1
    for part in _flat(normalizer, "normalizers"):
        match part:
            case {"type": "NFC" | "NFKC"}:
                factor *= COMPOSED_CHARACTERS
            case {"type": "NFD" | "NFKD" | "Lowercase" | "ByteLevel" | "Prepend"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
                if len(content) < len(pattern):
                    return None
            case _:
                return None
    return factor


def _keeps_all(pre_tokenizer: Part | None) -> bool:
    """Returns whether a pre-tokenizer keeps every character of a text."""
    for part in _flat(pre_tokenizer, "pretokenizers"):
        match part:
            case {"type": "ByteLevel" | "Metaspace" | "Digits"}:
                pass
            case {"type": "Split", "behavior": str(behavior)} if behavior != "Removed":
                pass
            case _:
                return False
    return True


def _spells_all(parts: Part, vocabulary: Mapping[str, int]) -> bool:
    """Returns whether the tokenizer's model keeps every unknown character: it neither drops a
    character nor joins several characters into one token."""
    model = parts["model"]
    if model["type"] != "BPE":
        return False
    if model["unk_token"] is not None and not model["fuse_unk"]:
        return True
    if model["byte_fallback"]:
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(N_BYTES))
    is_byte_level = _has_byte_level(parts["normalizer"], "normalizers") or _has_byte_level(
        parts["pre_tokenizer"], "pretokenizers"
    )
    alphabet: Callable[[], list[str]] = tokenizers.pre_tokenizers.ByteLevel.alphabet
    return is_byte_level and all(character in vocabulary for character in alphabet())


def _has_byte_level(part: Part | None, key: str) -> bool:
    return any(one["type"] == "ByteLevel" for one in _flat(part, key))


def _flat(part: Part | None, key: str) -> list[Part]:
    """Returns the simple parts of which a normalizer or pre-tokenizer consists. A part of the type
    `Sequence` lists its parts under `key`, and may contain further sequences."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [one for inner in part[key] for one in _flat(inner, key)]
    return [part]
