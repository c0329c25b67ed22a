"""Determines the tokens that end an output. Three files of a checkpoint may name such tokens."""

from __future__ import annotations

from typing import Any

from services.common.derived import Derived
from services.worker.models.config import JsonObject

_KEY = "eos_token_id"


def ends_of_turn(
    config: JsonObject,
    generation: JsonObject,
    named: Derived[int] | None,
    default: tuple[int, ...],
) -> Derived[Any]:
    """Returns the tokens that end an output and where they were read. The tokens are not validated
    yet.

    The tokens of `generation` (`generation_config.json`) replace the tokens of `config`, as in
    `transformers`. The token `named` (the `eos_token` of `tokenizer_config.json`) also ends an
    output, as in vLLM: conversations of some checkpoints end with a token that no other file names.
    `default` is the default of the family, for a checkpoint in which no file names a token.
    """
    found: Derived[tuple[Any, ...]] = Derived((), "no file names a token")
    for file, keys in (("generation_config.json", generation), ("config.json", config)):
        value = keys.get(_KEY)
        if value is not None:
            tokens = tuple(value) if isinstance(value, list) else (value,)
            found = Derived(tokens, f"{file}: {_KEY}")
            break
    if named is not None:
        if not found.value:
            return Derived((named.value,), named.source)
        if named.value not in found.value:
            return Derived((*found.value, named.value), f"{found.source}; {named.source}")
    is_unnamed = not found.value and _KEY not in generation and _KEY not in config
    if is_unnamed and default:
        return Derived(default, f"default of the family, since no file has {_KEY}")
    return found
