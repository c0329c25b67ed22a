"""Converts answers and texts to JSON."""

from collections.abc import Mapping
from functools import lru_cache

import pydantic_core

SHORT_CHARACTERS, MAX_CACHED = 32, 2**13
"""`SHORT_CHARACTERS`: largest length of a text whose JSON is cached, in characters. `MAX_CACHED`:
largest number of cached texts. Together these take about one megabyte."""


def to_json(value: Mapping[str, object] | str) -> bytes:
    """Returns a value as JSON in ASCII. Characters outside ASCII are escaped, because some clients
    read U+2028 or U+0085 in a stream as the end of a line."""
    return pydantic_core.to_json(value, ensure_ascii=True, inf_nan_mode="null")


def text_json(text: str) -> bytes:
    """Returns a text as JSON. The JSON of short texts is cached, because most tokens are short
    texts that occur again and again."""
    return _short_json(text) if len(text) <= SHORT_CHARACTERS else to_json(text)


_short_json = lru_cache(MAX_CACHED)(to_json)
