"""Translates `tekken.json`, the tokenizer format of Mistral's own libraries, which Devstral and
Magistral use.

The file has the bytes of each token in the order of merging, as `tiktoken` reads them, and the
special tokens, which come first in the model's vocabulary. A file of a version before 11 may leave
out the special tokens. If it does, the twenty special tokens in this module are used.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from services.common import bounded_file
from services.common.tokenizer_files.ranked_bytes import ranked_tokenizer
from services.common.tokenizer_parts import MAX_TOKENS, Json

FILE = "tekken.json"

MAX_BYTES = 128 << 20
"""Largest size of a `tekken.json` in bytes, eight times the size of published files."""

NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
"""The special tokens by the names that chat templates use."""

_OLD_SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]",
    "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)  # fmt: skip
_FILLER = "<SPECIAL_{}>"


def read_tekken(path: Path) -> str:
    """Reads a `tekken.json`, and returns it as a `tokenizer.json`.

    Raises:
        OSError: the file cannot be read.
        ValueError, LookupError, TypeError: the file is broken.
    """
    contents = _contents(path)
    config = contents["config"]
    special = _special_tokens(contents, config["default_num_special_tokens"])
    tokens = _tokens(contents["vocab"], config["default_vocab_size"] - len(special))
    return ranked_tokenizer(
        tokens,
        first_id=len(special),
        special={text: token_id for token_id, text in enumerate(special)},
        pattern=str(config["pattern"]),
        start=NAMED["bos_token"],
    )


def tekken_version(path: Path) -> int:
    """Returns the version of Mistral's conversation format, such as 11 for "v11".

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is broken.
    """
    config = _contents(path).get("config")
    version = config.get("version") if isinstance(config, dict) else None
    digits = str(version).removeprefix("v").split("m")[0]
    if not digits.isdecimal() or len(digits) > 3:
        raise ValueError(f"{path}: config.version {str(version)[:80]!r} is no version")
    return int(digits)


def reasoning_efforts(path: Path) -> tuple[str, ...]:
    """Returns the values that a conversation's `reasoning_effort` may have, the default first.
    Files have such values from version 15 on. Returns an empty tuple if the file has none.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is broken.
    """
    said: Any = _contents(path).get("model_settings_builder") or {}
    effort = said.get("reasoning_effort") if isinstance(said, dict) else said
    if effort is None:
        return ()
    if not isinstance(effort, dict) or not isinstance(effort.get("values"), list):
        raise ValueError(f"{path}: model_settings_builder.reasoning_effort has no values")
    values = [
        value for value in effort["values"] if isinstance(value, str) and value.isidentifier()
    ]
    default = effort.get("default")
    if default not in values or len(values) < len(effort["values"]):
        raise ValueError(
            f"{path}: model_settings_builder.reasoning_effort.default {str(default)[:80]!r} is not "
            "one of its values, which are words"
        )
    return (default, *(value for value in values if value != default))


def special_tokens(path: Path) -> frozenset[str]:
    """Returns the texts of the special tokens that a `tekken.json` lists. If a file has no such
    list, returns the twenty special tokens of old files.

    Raises:
        OSError: the file cannot be read.
        ValueError, LookupError, TypeError: the file is broken.
    """
    return frozenset(str(token["token_str"]) for token in _listed(_contents(path)))


def _listed(contents: Json) -> list[Json]:
    listed: Any = contents.get("special_tokens")
    if listed is None:
        return [{"rank": rank, "token_str": text} for rank, text in enumerate(_OLD_SPECIAL)]
    return list(listed)


def _contents(path: Path) -> Json:
    return bounded_file.read_json_object(path, max_bytes=MAX_BYTES)


def _special_tokens(contents: Json, n_special: int) -> list[str]:
    """Returns the texts of all special tokens in the order of their ids."""
    listed = _listed(contents)
    by_rank = {int(token["rank"]): str(token["token_str"]) for token in listed}
    if not len(by_rank) == len(listed) <= n_special <= MAX_TOKENS:
        raise ValueError(f"special_tokens are {len(listed)}, of {n_special} at most")
    found = [by_rank.get(rank, _FILLER.format(rank)) for rank in range(n_special)]
    if len(set(found)) < n_special or not by_rank.keys() <= set(range(n_special)):
        raise ValueError("special_tokens have a text or a rank twice, or a rank out of range")
    return found


def _tokens(vocab: list[Json], n_tokens: int) -> list[bytes]:
    """Returns the bytes of each of the first `n_tokens` tokens in `vocab`. The file may list more
    tokens than the model has."""
    if not 0 < n_tokens <= min(len(vocab), MAX_TOKENS):
        raise ValueError(f"vocab has {len(vocab)} tokens, and the model {n_tokens}")
    try:
        return [base64.b64decode(token["token_bytes"], validate=True) for token in vocab[:n_tokens]]
    except binascii.Error as error:
        raise ValueError(f"vocab has a token that is not base64: {error}") from error
