"""Parsers of option values that people write."""

import argparse

from pydantic import ByteSize, TypeAdapter, ValidationError


def count(text: str) -> int:
    """Returns a whole number of at least 1; raises argparse's error for any other text."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def size(text: str) -> int:
    """Returns a number of bytes, written like 512MiB; raises argparse's error for any other
    text."""
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size like 512MiB") from None
