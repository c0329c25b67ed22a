"""Answers as JSON."""

from collections.abc import Mapping
from functools import lru_cache

import pydantic_core

SHORT_CHARACTERS, MAX_CACHED = 32, 2**13
"""Largest length of a text whose JSON is kept, in characters, and the largest number of such texts,
which take a megabyte together."""


def to_json(value: Mapping[str, object] | str) -> bytes:
    """Returns a value as JSON in ASCII: some clients of streams take U+2028 or U+0085 for the end
    of a line."""
    return pydantic_core.to_json(value, ensure_ascii=True, inf_nan_mode="null")


def text_json(text: str) -> bytes:
    """Returns a text as JSON. The JSON of short texts, which most single tokens are, is kept."""
    return _short_json(text) if len(text) <= SHORT_CHARACTERS else to_json(text)


_short_json = lru_cache(MAX_CACHED)(to_json)
