"""Translates a GGUF file's vocabulary to the form of `tokenizer.json`.

Two kinds of vocabulary are supported. "gpt2" is byte-level BPE with merges; the file gives the name
of its rule for splitting texts. "llama" is SentencePiece: pieces and scores, from which the merges
are made here. Other kinds are refused with their name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.common.gguf.header import read_header

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # types of tokens
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space

Json = dict[str, Any]

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_GPT2_WORDS = {**_BYTE_LEVEL, "use_regex": True}

# The pattern that divides texts into words for Llama 3 and Qwen 2, after OpenAI's cl100k. The two
# models differ in the number of digits that stay together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _sequence(*steps: Json) -> Json:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _cut_by(digits: str) -> Json:
    split = {
        "type": "Split",
        "pattern": {"Regex": _WORDS % digits},
        "behavior": "Isolated",
        "invert": False,
    }
    return _sequence(split, {**_BYTE_LEVEL, "use_regex": False})


_SINGLE_DIGITS = _sequence({"type": "Digits", "individual_digits": True}, _GPT2_WORDS)

# What a text is cut by before it is merged, by `tokenizer.ggml.pre`.
_CUTS: Mapping[str, Json] = {
    "deepseek-r1-qwen": _cut_by(""),
    "gpt-2": _GPT2_WORDS,
    "llama-bpe": _cut_by("{1,3}"),
    "llama3": _cut_by("{1,3}"),
    "qwen2": _cut_by(""),
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
}
_COMPOSED = frozenset(("qwen2", "deepseek-r1-qwen"))  # texts are brought into the form NFC
# Words that are tokens stay whole, and texts begin with a token for that unless the file says no.
_LLAMA3 = frozenset(("llama-bpe", "llama3"))


def read_gguf_tokenizer(path: Path) -> str:
    """Returns the `tokenizer.json` of a GGUF file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is broken, or its vocabulary is of an unknown kind.
    """
    header = read_header(path)
    try:
        return tokenizer_json(header.metadata)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def tokenizer_json(metadata: Mapping[str, Any]) -> str:
    """Returns the `tokenizer.json` of a GGUF file's metadata.

    Raises:
        ValueError: the vocabulary is missing, or of an unknown kind; the message says which.
    """
    kind = metadata.get("tokenizer.ggml.model")
    vocabulary = _GgufVocabulary(metadata)
    if kind == "gpt2":
        parts = _byte_level(vocabulary, metadata)
    elif kind == "llama":
        parts = _sentence_piece(vocabulary, metadata)
    else:
        raise ValueError(f"tokenizer.ggml.model {repr(kind)[:80]} is not one of ['gpt2', 'llama']")
    return json.dumps({
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(vocabulary.added()),
        **parts,
    })  # fmt: skip


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Returns the texts of the tokens that chat templates use by name."""
    names = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "pad_token": "padding_token_id",
        "unk_token": "unknown_token_id",
    }
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    ids = {name: metadata.get(f"tokenizer.ggml.{key}") for name, key in names.items()}
    return {
        name: tokens[token_id]
        for name, token_id in ids.items()
        if isinstance(token_id, int) and 0 <= token_id < len(tokens)
    }


class _GgufVocabulary:
    """The tokens of a vocabulary and their types."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        tokens = metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
            raise ValueError("tokenizer.ggml.tokens is no list of texts")
        types = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
        if isinstance(types, (int, str)) or len(types) != len(tokens):
            raise ValueError("tokenizer.ggml.token_type is not as long as tokenizer.ggml.tokens")
        self.tokens: list[str] = tokens
        self.types: Sequence[int] = types

    def ids(self, *, without: Sequence[int] = ()) -> dict[str, int]:
        """Returns the number of each token, without the tokens of some types."""
        return {
            token: token_id
            for token_id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind not in without
        }

    def added(self) -> Iterator[Json]:
        """Yields the added tokens, which are found in a text before the rest is tokenized."""
        for token_id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token:
                yield {
                    "id": token_id,
                    "content": token,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": kind != _USER_DEFINED,
                }


def _byte_level(vocabulary: _GgufVocabulary, metadata: Mapping[str, Any]) -> Json:
    """Returns the parts of byte-level BPE."""
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in _CUTS:
        raise ValueError(f"tokenizer.ggml.pre {repr(pre)[:80]} is not one of {sorted(_CUTS)}")
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ValueError("tokenizer.ggml.merges is no list of texts")
    pairs = [str(merge).split(" ", 1) for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError("tokenizer.ggml.merges has an entry that is no pair")
    around = _around(vocabulary, metadata, by_default=pre in _LLAMA3)
    byte_level = {**_BYTE_LEVEL, "trim_offsets": False, "use_regex": True}
    return {
        "normalizer": {"type": "NFC"} if pre in _COMPOSED else None,
        "pre_tokenizer": _CUTS[pre],
        "post_processor": around or byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in _LLAMA3,
            "vocab": vocabulary.ids(without=(_UNUSED,)),
            "merges": pairs,
        },
    }


def _sentence_piece(vocabulary: _GgufVocabulary, metadata: Mapping[str, Any]) -> Json:
    """Returns the parts of SentencePiece's BPE, which falls back to bytes."""
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or isinstance(scores, str) or len(scores) != len(vocabulary.tokens):
        raise ValueError("tokenizer.ggml.scores is not as long as tokenizer.ggml.tokens")
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True) is not False
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    has_unknown = isinstance(unknown, int) and 0 <= unknown < len(vocabulary.tokens)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prefix = {"type": "Prepend", "prepend": _SPACE}
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": [prefix, spaces]}
        if has_prefix
        else spaces,
        "pre_tokenizer": None,
        "post_processor": _around(vocabulary, metadata, by_default=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": vocabulary.tokens[unknown] if has_unknown else None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary.ids(),
            "merges": _merges(vocabulary, scores),
        },
    }


def _merges(vocabulary: _GgufVocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Returns the merges that make the pieces, in the order of the pieces' scores, the best first.

    Every pair of pieces whose concatenation is a piece becomes a merge. For one piece, the pairs
    with the lowest numbers come first.
    """
    ids = vocabulary.ids(without=(_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE))
    ranked = []
    for piece, token_id in ids.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                ranked.append((-scores[token_id], token_id, ids[left], ids[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _around(
    vocabulary: _GgufVocabulary, metadata: Mapping[str, Any], *, by_default: bool
) -> Json | None:
    """Returns the part that adds tokens before and behind a text; None if no token is added."""
    ends = []
    for end, default in (("bos", by_default), ("eos", False)):
        wants = metadata.get(f"tokenizer.ggml.add_{end}_token", default)
        token_id = metadata.get(f"tokenizer.ggml.{end}_token_id")
        has = isinstance(token_id, int) and 0 <= token_id < len(vocabulary.tokens)
        ends.append(token_id if wants and has else None)
    if ends == [None, None]:
        return None
    names = [None if one is None else vocabulary.tokens[one] for one in ends]

    def template(kind: int, *texts: str) -> list[Json]:
        steps: list[Json] = []
        for text in texts:
            steps += [{"SpecialToken": {"id": names[0], "type_id": kind}}] if names[0] else []
            steps.append({"Sequence": {"id": text, "type_id": kind if text == "B" else 0}})
            steps += [{"SpecialToken": {"id": names[1], "type_id": kind}}] if names[1] else []
        return steps

    return {
        "type": "TemplateProcessing",
        "single": template(0, "A"),
        "pair": template(1, "A", "B"),
        "special_tokens": {
            name: {"id": name, "ids": [one], "tokens": [name]}
            for name, one in zip(names, ends, strict=True)
            if name
        },
    }
