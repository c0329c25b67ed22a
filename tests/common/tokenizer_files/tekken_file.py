"""Makes `tekken.json` files with a small vocabulary."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import tokenizers

from tests.common.tokenizer_files.strange_texts import TRAINING

PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NAMES = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]"]
N_SPECIAL = 30


def trained_tokens() -> list[bytes]:
    """Returns single bytes and merges of them, in the order of merging."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained.pre_tokenizer = byte_level
    alphabet = sorted(byte_level.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=380, initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator(
        (word for text in TRAINING for word in text.replace(" ", "\0 ").split("\0")), trainer
    )
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in printable]
    characters |= {chr(0x100 + place): byte for place, byte in enumerate(rest)}
    spelled = sorted(trained.get_vocab().items(), key=lambda pair: pair[1])
    merged = [bytes(characters[one] for one in token) for token, _ in spelled if len(token) > 1]
    return [*(bytes([byte]) for byte in range(256)), *merged]


TOKENS = trained_tokens()


def contents(
    *, names: Sequence[str] = NAMES, version: str = "v11", **changes: Any
) -> dict[str, Any]:
    """Returns the contents of a file, with some keys changed."""
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(TOKENS)
    ]
    special = [
        {"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(names)
    ]
    n_vocab = changes.pop("n_vocab", len(TOKENS))
    return {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(TOKENS),
            "default_vocab_size": n_vocab + N_SPECIAL,
            "default_num_special_tokens": N_SPECIAL,
            "version": version,
        },
        "vocab": vocab,
        "special_tokens": special,
        **changes,
    }
