"""Finds receipts in files: a receipt, JSON lines, or whole answers and streams that have receipts.

A receipt is any object whose `type` is `orcinus.receipt`, at any depth. Over gRPC a receipt is a
text, which is read too. Lines of a saved stream of events begin with `data:`.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common import bounded_file
from services.receipts.receipt import TYPE

MAX_FILE_BYTES = 2**30
"""Largest size of a file with receipts, in bytes."""


class NoReceipts(Exception):
    """A file cannot be read, is no JSON, or has no receipt. The message names the file."""


@dataclass(frozen=True, slots=True)
class FoundReceipt:
    """A receipt in a file, not checked yet."""

    place: str
    """File and number of the receipt in the file, from 1."""
    content: dict[str, Any]


def receipts_in(path: Path) -> list[FoundReceipt]:
    """Returns all receipts in a file, in order.

    Raises:
        NoReceipts: the file cannot be read, is no JSON, or has no receipt.
    """
    try:
        text = bounded_file.read_bytes(path, max_bytes=MAX_FILE_BYTES).decode()
        found = [receipt for value in _values(text) for receipt in _receipts_of(value)]
    except (OSError, ValueError, RecursionError) as error:
        raise NoReceipts(f"{path}: {error}") from error
    if not found:
        raise NoReceipts(f"{path}: has no receipt, which is an object of the type {TYPE}")
    return [FoundReceipt(f"{path}:{number}", it) for number, it in enumerate(found, start=1)]


def _values(text: str) -> Iterator[Any]:
    """Yields the JSON values of a text: the whole text, or else one for each line."""
    try:
        yield json.loads(text)
        return
    except ValueError:
        lines = [line.strip() for line in text.splitlines()]
    for number, line in enumerate(lines, start=1):
        data = line.removeprefix("data:").strip()
        if not data or data == "[DONE]" or line.startswith((":", "event:", "id:")):
            continue
        try:
            yield json.loads(data)
        except ValueError as error:
            raise ValueError(f"line {number} is no JSON: {error}") from error


def _receipts_of(value: Any) -> Iterator[dict[str, Any]]:
    match value:
        case {"type": str(kind)} if kind == TYPE:
            yield value
        case {}:
            for name, member in value.items():
                if name == "receipt" and isinstance(member, str) and TYPE in member:
                    member = json.loads(member)
                yield from _receipts_of(member)
        case []:
            return
        case [*items]:
            for item in items:
                yield from _receipts_of(item)
