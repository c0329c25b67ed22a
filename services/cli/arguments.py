"""Functions that parse the values of command-line options."""

import argparse

from pydantic import ByteSize, TypeAdapter, ValidationError


def count(text: str) -> int:
    """Returns the whole number in a text.

    Raises:
        argparse.ArgumentTypeError: the text is not a whole number, or is below 1.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def size(text: str) -> int:
    """Returns the number of bytes that a text such as `512MiB` stands for.

    Raises:
        argparse.ArgumentTypeError: the text is not a size.
    """
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size like 512MiB") from None
