"""Values of options, as people write them."""

import argparse

from pydantic import ByteSize, TypeAdapter, ValidationError


def count(text: str) -> int:
    """Returns a number from 1 on; raises what argparse expects for anything else."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def size(text: str) -> int:
    """Returns bytes, written like 512MiB; raises what argparse expects for anything else."""
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size like 512MiB") from None
