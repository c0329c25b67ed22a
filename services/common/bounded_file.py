"""Reads the small files of a checkpoint, and never more bytes than such a file should have.

A checkpoint may come from an untrusted source. A file that is far too large is refused before it
takes memory. JSON that is nested too deeply for the parser is refused, too. Errors name the file.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

Opener = Callable[[Path], BinaryIO]
"""A function that opens a file for reading."""


def _open(path: Path) -> BinaryIO:
    return path.open("rb")


def read_bytes(path: Path, *, max_bytes: int, opener: Opener = _open) -> bytes:
    """Returns the content of a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file has more than `max_bytes` bytes.
    """
    with opener(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"{path} has more than {max_bytes} bytes")
    return content


def read_json(path: Path, *, max_bytes: int, opener: Opener = _open) -> Any:
    """Returns the JSON value in a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file has more than `max_bytes` bytes, or is not JSON.
    """
    content = read_bytes(path, max_bytes=max_bytes, opener=opener)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def read_json_object(path: Path, *, max_bytes: int, opener: Opener = _open) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file has more than `max_bytes` bytes, or is not a JSON object.
    """
    value = read_json(path, max_bytes=max_bytes, opener=opener)
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")
    return value
