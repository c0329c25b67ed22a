"""Translates byte-level BPE in the form of the library `tiktoken`: a list of the tokens' bytes in
the order of merging."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.common.tokenizer_files.byte_characters import characters_of
from services.common.tokenizer_parts import (
    BYTE_LEVEL,
    added_token,
    around,
    bpe,
    cut_by,
    document,
    merges_of,
)


def ranked_tokenizer(
    tokens: Sequence[bytes],
    *,
    first_id: int,
    special: Mapping[str, int],
    pattern: str,
    start: str | None = None,
) -> str:
    """Returns a `tokenizer.json` for `tokens`, whose ids begin at `first_id`.

    `pattern` divides texts into words, and `start` is the special token in front of each text.

    Raises:
        ValueError: a token occurs twice, or is too long.
        KeyError: `start` is not a special token.
    """
    ranked = {characters_of(token): float(rank) for rank, token in enumerate(tokens)}
    vocab = {token: place + first_id for place, token in enumerate(ranked)}
    vocab |= special
    if len(ranked) < len(tokens) or len(vocab) < len(tokens) + len(special):
        raise ValueError("has a token twice")
    return document(
        (added_token(text, token_id, special=True) for text, token_id in special.items()),
        pre_tokenizer=cut_by(pattern),
        post_processor=around(None if start is None else (start, special[start]), None),
        decoder={**BYTE_LEVEL, "use_regex": True},
        # A word that is a token is not made of merges.
        model=bpe(vocab, merges_of(ranked), ignore_merges=True),
    )
