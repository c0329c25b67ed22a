"""Checks the sources from which clients load adapters against a setting that lists allowed
prefixes.

A source is the absolute path of a directory. A prefix allows a source if the source is the prefix
or is below the prefix, after links and `..` have been followed in both paths. So `/adapters` allows
`/adapters/law`, and neither `/adapters-of-others` nor a link to another directory.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator
from pydantic_settings import NoDecode

MAX_SOURCE_BYTES = 1024
"""Largest number of bytes of a source in UTF-8."""

_SEPARATOR = re.compile(r"\s*,\s*")


class SourceRefused(ValueError):
    """A source is not allowed, or its form is not supported. The message names only directories
    that the client has named."""


def _prefixes(value: object) -> object:
    """Returns the prefixes in `value`, the value of the setting that lists allowed prefixes: a text
    or a list of texts. Raises ValueError if a prefix does not have the form of a source, or is
    `/`."""
    texts = value if isinstance(value, list | tuple) else (value,)
    found = [part for text in texts for part in _SEPARATOR.split(str(text).strip()) if part]
    for prefix in found:
        check_form(prefix)
        if not Path(prefix).resolve().parts[1:]:
            raise ValueError("/ would allow every directory")
    return tuple(found)


AdapterSources = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_prefixes)]
"""Type of a setting that lists the prefixes of allowed sources."""


def check_form(source: str) -> None:
    """Raises SourceRefused unless `source` is an absolute path of printable characters that is not
    too long."""
    if not source.isprintable():
        raise SourceRefused("has a character that cannot be printed, such as the end of a line")
    if len(source.encode()) > MAX_SOURCE_BYTES:
        raise SourceRefused(f"exceeds {MAX_SOURCE_BYTES} bytes")
    if not source.startswith("/"):
        raise SourceRefused(
            "must be an absolute directory: workers fetch nothing from a hub or from S3; copy the "
            "adapter to a directory that the workers have"
        )


def directory_of(source: str, prefixes: Iterable[str]) -> Path:
    """Returns the directory that a source names, with links followed. Each file in the directory
    must be checked too, with `check_inside`.

    Raises:
        SourceRefused: no prefix allows the source.
    """
    check_form(source)
    # `..` is followed as the file system does it, not by the text alone.
    return check_inside(Path(source), prefixes)


def check_inside(path: Path, prefixes: Iterable[str]) -> Path:
    """Returns `path` with links followed. Open files by the returned path, because the links in
    `path` may be changed after the check. A link that leads to itself is not followed, and opening
    the returned path then fails.

    Raises:
        SourceRefused: the returned path would not be below a prefix.
    """
    real = _real(path)
    if not any(real.is_relative_to(_real(Path(prefix))) for prefix in prefixes):
        raise SourceRefused("is not below a directory that `allowed_adapter_sources` names")
    return real


def _real(path: Path) -> Path:
    # `Path.resolve` raises RuntimeError for a link that leads to itself.
    return Path(os.path.realpath(path))
