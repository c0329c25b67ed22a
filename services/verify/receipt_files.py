"""Finds receipts in files. A file may have a receipt, JSON lines, or whole answers and streams that
contain receipts.

A receipt is any object whose `type` is `orcinus.receipt`, at any depth. In answers over gRPC a
receipt is a text, which is parsed too. Lines of a saved stream of events begin with `data:`, and
most of these lines have no receipt. Any other line without a receipt is reported, because it should
have one.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common import bounded_file
from services.receipts.receipt import TYPE

MAX_FILE_BYTES = 2**30
"""Largest size in bytes of a file that is searched for receipts."""


class NoReceipts(Exception):
    """A file cannot be read, is not JSON, or has no receipt. The message names the file."""


@dataclass(frozen=True, slots=True)
class FoundReceipt:
    """A receipt in a file, which is not checked yet, or a place in a file where a receipt is
    missing."""

    place: str
    """Name of the file, a colon, and the number of the receipt in the file, from 1."""
    content: dict[str, Any]
    """The receipt; empty if it is missing."""
    complaint: str = ""
    """Reason why there is no receipt at the place. Empty if there is a receipt."""


def receipts_in(path: Path) -> list[FoundReceipt]:
    """Returns all receipts in a file, in order, and the places where a receipt is missing. These
    places are items of a list without a receipt, and lines without a receipt that are not part of a
    stream of events.

    Raises:
        NoReceipts: the file cannot be read, is not JSON, has an object with the same key twice, or
            has no receipt.
    """
    found: list[tuple[dict[str, Any], str]] = []
    try:
        text = bounded_file.read_bytes(path, max_bytes=MAX_FILE_BYTES).decode()
        for value, name in _values(text):
            receipts = [(receipt, "") for receipt in _receipts_of(value)]
            found += receipts or ([({}, f"{name} has no receipt")] if name else [])
    except (OSError, ValueError, RecursionError) as error:
        raise NoReceipts(f"{path}: {error}") from error
    if not any(content for content, _ in found):
        raise NoReceipts(f"{path}: has no receipt, which is an object of the type {TYPE}")
    return [FoundReceipt(f"{path}:{number}", *it) for number, it in enumerate(found, start=1)]


def _values(text: str) -> Iterator[tuple[Any, str]]:
    """Yields the JSON values of a text, each with its name for messages, such as `line 3`. The
    values are the text itself, or the items of a list, or one value per line. The name is empty if
    the value need not have a receipt."""
    try:
        whole = _read(text)
    except _RepeatedKey:
        raise
    except ValueError:
        yield from _values_of_lines(text)
        return
    if isinstance(whole, list):
        yield from ((item, f"item {number}") for number, item in enumerate(whole, start=1))
    else:
        yield whole, ""


def _values_of_lines(text: str) -> Iterator[tuple[Any, str]]:
    for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
        data = line.removeprefix("data:").strip()
        if not data or data == "[DONE]" or line.startswith((":", "event:", "id:")):
            continue
        try:
            yield _read(data), "" if line.startswith("data:") else f"line {number}"
        except _RepeatedKey as error:
            raise ValueError(f"line {number}: {error}") from error
        except ValueError as error:
            raise ValueError(f"line {number} is no JSON: {error}") from error


class _RepeatedKey(ValueError):
    """An object has the same key twice. Programs could read different values of this key."""


def _read(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_object_of)


def _object_of(members: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in members:
        if name in made:
            raise _RepeatedKey(f"an object has the key {name!r} twice")
        made[name] = value
    return made


def _receipts_of(value: Any) -> Iterator[dict[str, Any]]:
    match value:
        case {"type": str(kind)} if kind == TYPE:
            yield value
        case {}:
            for name, member in value.items():
                if name == "receipt" and isinstance(member, str) and TYPE in member:
                    member = _read(member)
                yield from _receipts_of(member)
        case []:
            return
        case [*items]:
            for item in items:
                yield from _receipts_of(item)
