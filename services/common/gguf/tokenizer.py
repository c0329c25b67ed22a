"""Translates a GGUF file's vocabulary to the form of `tokenizer.json`.

Three kinds of vocabulary are supported. "gpt2" is byte-level BPE with merges. The file names the
rule that divides texts into words, and `pre_tokenizers.py` has the rules. "llama" is SentencePiece:
pieces and scores, from which the merges are made here. "gemma4" is SentencePiece with merges. Other
kinds are refused, with an error that names the kind.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.common.gguf.header import read_header, token_id_of
from services.common.gguf.pre_tokenizers import PRE_TOKENIZERS
from services.common.tokenizer_parts import around, merges_of

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # types of tokens
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space

Json = dict[str, Any]

_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": False,
    "use_regex": True,
}
_KINDS = ("gemma4", "gpt2", "llama")


def read_gguf_tokenizer(path: Path) -> str:
    """Returns a `tokenizer.json` that is made from the vocabulary of a GGUF file.

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
    """Returns a `tokenizer.json` that is made from the metadata of a GGUF file.

    Raises:
        ValueError: the vocabulary is missing, or of an unknown kind. The message names the kind.
    """
    kind = metadata.get("tokenizer.ggml.model")
    vocabulary = _GgufVocabulary(metadata)
    if kind == "gpt2":
        parts = _byte_level(vocabulary, metadata)
    elif kind == "llama":
        scores = metadata.get("tokenizer.ggml.scores")
        if scores is None or isinstance(scores, str) or len(scores) != len(vocabulary.tokens):
            raise ValueError("tokenizer.ggml.scores is not as long as tokenizer.ggml.tokens")
        parts = _sentence_piece(vocabulary, metadata, _merges(vocabulary, scores))
    elif kind == "gemma4":
        parts = _sentence_piece(vocabulary, metadata, _stored_merges(metadata))
    else:
        raise ValueError(f"tokenizer.ggml.model {repr(kind)[:80]} is not one of {[*_KINDS]}")
    return json.dumps({
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(vocabulary.added()),
        **parts,
    })  # fmt: skip


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Returns the texts of the special tokens, keyed by the names that chat templates use, such as
    `bos_token`."""
    names = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "pad_token": "padding_token_id",
        "unk_token": "unknown_token_id",
        "sep_token": "seperator_token_id",  # spelled so in the format
        "cls_token": "cls_token_id",
        "mask_token": "mask_token_id",
    }
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    ids = {name: metadata.get(f"tokenizer.ggml.{key}") for name, key in names.items()}
    return {
        name: tokens[token_id]
        for name, token_id in ids.items()
        if isinstance(token_id, int) and 0 <= token_id < len(tokens)
    }


class _GgufVocabulary:
    """The tokens of a GGUF vocabulary and their types."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        tokens = metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
            raise ValueError("tokenizer.ggml.tokens is no list of texts")
        types = metadata.get("tokenizer.ggml.token_type")
        types = _types_by_names(tokens, metadata) if types is None else types
        if isinstance(types, (int, float, str)) or len(types) != len(tokens):
            raise ValueError("tokenizer.ggml.token_type is not as long as tokenizer.ggml.tokens")
        self.tokens: list[str] = tokens
        self.types: Sequence[int] = types

    def ids(self, *, without: Sequence[int] = ()) -> dict[str, int]:
        """Returns the id of each token, by the text of the token. Leaves out tokens whose type is
        in `without`."""
        return {
            token: token_id
            for token_id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind not in without
        }

    def added(self) -> Iterator[Json]:
        """Yields the added tokens, which the tokenizer looks for in a text before it divides the
        rest of the text into words."""
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


def _types_by_names(tokens: Sequence[str], metadata: Mapping[str, Any]) -> Sequence[int]:
    """Returns the type of each token of a file that does not list types. A token whose id is the
    value of a key, such as `bos_token_id`, is special. All other tokens are normal."""
    named = {
        value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.") and key.endswith("_token_id") and type(value) is int
    }
    return [_CONTROL if token_id in named else _NORMAL for token_id in range(len(tokens))]


def _byte_level(vocabulary: _GgufVocabulary, metadata: Mapping[str, Any]) -> Json:
    """Returns the sections of `tokenizer.json` that make byte-level BPE."""
    pre = metadata.get("tokenizer.ggml.pre")
    if pre is None:
        raise ValueError(
            "tokenizer.ggml.pre is missing: the file is too old to say how texts are split, take a "
            "newer one"
        )
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise ValueError(f"tokenizer.ggml.pre {repr(pre)[:80]} is not one of {[*PRE_TOKENIZERS]}")
    rule = PRE_TOKENIZERS[pre]
    return {
        "normalizer": {"type": "NFC"} if rule.is_composed else None,
        "pre_tokenizer": rule.cut,
        "post_processor": _around(vocabulary, metadata, by_default=rule.adds_bos) or _BYTE_LEVEL,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": rule.ignores_merges,
            "vocab": vocabulary.ids(without=(_UNUSED,)),
            "merges": _stored_merges(metadata),
        },
    }


def _stored_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the merges that the file lists, each as the pair of texts that is merged, in the
    order of merging."""
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ValueError("tokenizer.ggml.merges is no list of texts")
    pairs = []
    for merge in map(str, merges):
        cut = merge.find(" ", 1)  # the first part may be a space
        if cut < 0:
            raise ValueError("tokenizer.ggml.merges has an entry that is no pair")
        pairs.append((merge[:cut], merge[cut + 1 :]))
    return pairs


def _sentence_piece(
    vocabulary: _GgufVocabulary, metadata: Mapping[str, Any], merges: Sequence[tuple[str, str]]
) -> Json:
    """Returns the sections of `tokenizer.json` that make SentencePiece's BPE with fallback to
    bytes."""
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
            "merges": merges,
        },
    }


def _merges(vocabulary: _GgufVocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Returns the merges that make the pieces of a SentencePiece vocabulary. The merges of the
    piece with the highest score come first.

    Every pair of pieces whose concatenation is a piece becomes a merge. If several pairs make one
    piece, pairs of pieces with lower ids come first.
    """
    ids = vocabulary.ids(without=(_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE))
    return merges_of({piece: -scores[token_id] for piece, token_id in ids.items()})


def _around(
    vocabulary: _GgufVocabulary, metadata: Mapping[str, Any], *, by_default: bool
) -> Json | None:
    """Returns the section of `tokenizer.json` that adds a token before or after each text, or None
    if no token is added. If the file does not say whether a token is added before texts,
    `by_default` decides. A token is added after texts only if the file says so."""
    ends = []
    for end, default in (("bos", by_default), ("eos", False)):
        wants = metadata.get(f"tokenizer.ggml.add_{end}_token", default)
        token_id = token_id_of(metadata, f"{end}_token_id")
        has = token_id is not None and 0 <= token_id < len(vocabulary.tokens)
        ends.append(token_id if wants and has else None)
    before, after = (None if one is None else (vocabulary.tokens[one], one) for one in ends)
    return around(before, after)
