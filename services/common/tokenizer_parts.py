"""Makes the parts of a `tokenizer.json` that several kinds of tokenizers share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

Json = dict[str, Any]

MAX_PIECE_LENGTH = 1024
"""Largest length of a token that is made by merges, in characters. The longest tokens of published
vocabularies have less than a quarter of this length."""

MAX_CUTS = 1 << 24
"""Largest number of ways to cut a token of a vocabulary in two, summed over all tokens. Published
vocabularies have at most an eighth of this number."""

MAX_TOKENS = 1 << 21
"""Largest number of tokens of a vocabulary, eight times as many as published vocabularies have."""

BYTE_LEVEL: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
"""The step of `tokenizer.json` that writes bytes as characters, before and after the byte-level BPE
model."""

CL100K_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern of OpenAI's cl100k, which divides texts into words. `%s` must be replaced by a
quantifier for the digits of a number: `{1,3}` keeps three digits together, and an empty text
separates all digits."""


def cut_by(pattern: str) -> Json:
    """Returns the step of `tokenizer.json` that divides texts by a regular expression, for
    byte-level BPE."""
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [split, {**BYTE_LEVEL, "use_regex": False}]}


def added_token(content: str, token_id: int, *, special: bool, normalized: bool = False) -> Json:
    """Returns the entry of a `tokenizer.json` for an added token. The tokenizer looks for added
    tokens in a text before it divides the rest."""
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": normalized,
        "special": special,
    }


def bpe(vocab: Mapping[str, int], merges: Iterable[tuple[str, str]], **others: object) -> Json:
    """Returns the model section of a `tokenizer.json` for byte pair encoding. `others` are further
    keys of the section."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": dict(vocab),
        "merges": list(merges),
        **others,
    }


def document(added: Iterable[Json], **parts: object) -> str:
    """Returns a complete `tokenizer.json`. `added` are the added tokens, and `parts` are the other
    sections."""
    return json.dumps({
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(added, key=lambda token: token["id"]),
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        **parts,
    })  # fmt: skip


def around(
    before: tuple[str, int] | None, after: tuple[str, int] | None, *, otherwise: Json | None = None
) -> Json | None:
    """Returns the step of `tokenizer.json` that puts the token `before` in front of each text, and
    the token `after` behind the text. Each is a pair of the token's text and its id, or None. If
    both are None, returns `otherwise`."""
    if before is None and after is None:
        return otherwise

    def template(kind: int, *texts: str) -> list[Json]:
        steps: list[Json] = []
        for text in texts:
            if before is not None:
                steps.append({"SpecialToken": {"id": before[0], "type_id": kind}})
            steps.append({"Sequence": {"id": text, "type_id": kind if text == "B" else 0}})
            if after is not None:
                steps.append({"SpecialToken": {"id": after[0], "type_id": kind}})
        return steps

    return {
        "type": "TemplateProcessing",
        "single": template(0, "A"),
        "pair": template(1, "A", "B"),
        "special_tokens": {
            text: {"id": text, "ids": [token_id], "tokens": [text]}
            for text, token_id in filter(None, (before, after))
        },
    }


def merges_of(ranked: Mapping[str, float]) -> list[tuple[str, str]]:
    """Returns the merges of byte pair encoding that make the pieces in `ranked`. Every pair of
    pieces whose concatenation is a piece becomes a merge.

    `ranked` has the rank of each piece. Merges are sorted by the rank of the piece that they make.
    Where ranks are equal, the piece that comes first in `ranked` comes first. Merges that make one
    piece are sorted by the positions in `ranked` of their left parts.

    Raises:
        ValueError: a piece is too long, or all pieces together are.
    """
    if (n_cuts := sum(map(len, ranked))) > MAX_CUTS:
        raise ValueError(f"tokens have {n_cuts} characters together, {MAX_CUTS} at most")
    positions = {piece: position for position, piece in enumerate(ranked)}
    found = []
    for piece, rank in ranked.items():
        if len(piece) > MAX_PIECE_LENGTH:
            raise ValueError(f"a token has {len(piece)} characters, {MAX_PIECE_LENGTH} at most")
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in positions and right in positions:
                order = rank, positions[piece], positions[left], positions[right]
                found.append((*order, left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]
