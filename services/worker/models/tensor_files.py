"""The interface of files that hold a checkpoint's tensors, whatever the format of the files.

`DirectoryFiles` and `GgufFile` implement the interface. A family has its own names for tensors, and
`find` translates such a name to the name in the files.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from services.common.cannot_start import CannotStart

_MAX_PROBLEMS = 8  # listed in one error; a wrong checkpoint usually has hundreds


class CheckpointError(CannotStart):
    """The checkpoint's files do not match its configuration; the message names the problems."""


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a tensor in a file: its shape, the name of its element type, and the number of
    bytes of a row."""

    shape: tuple[int, ...]
    element: str
    row_bytes: int  # stored bytes of one index of the first dimension


class TensorFiles(Protocol):
    """The tensors of a checkpoint, read from its files."""

    def find(self, name: str) -> str | None:
        """Translates the family's tensor name to the name in the files. Returns None if the files
        lack the tensor."""

    def header(self, name: str) -> Header:
        """Returns the header of the tensor that has the given name in the files."""

    def read(self, name: str, spans: Sequence[range]) -> Tensor:
        """Reads the index range `spans` of the tensor, one range for each dimension, into CPU
        memory. `name` is the name in the files."""

    def names(self) -> Collection[str]:
        """Returns the names of all tensors in the files. The result is empty for a GGUF file:
        opening it fails if it has a tensor that the architecture does not have."""

    def paths(self) -> Collection[Path]:
        """Returns the files that hold the tensors."""

    @property
    def is_gguf(self) -> bool:
        """Whether the files are a `GgufFile`."""

    def unread_biases(self) -> list[str]:
        """Returns the biases in the files that were never looked up, although another tensor of
        their layer was looked up. The result is empty for files that are not searched for biases.
        """

    def close(self) -> None:
        """Releases the memory of tensors that were read. The files are opened again at the next
        read."""


class TensorFilesView(TensorFiles):
    """Wraps the tensors of other files to change their names or their form. Each method calls the
    method of the same name of these files, unless a subclass overrides it. Quantised tensors of a
    `GgufFile` are read from the file itself, not from a view (`find_in_gguf`)."""

    def __init__(self, files: TensorFiles) -> None:
        self._files = files

    def find(self, name: str) -> str | None:
        return self._files.find(name)

    def header(self, name: str) -> Header:
        return self._files.header(name)

    def read(self, name: str, spans: Sequence[range]) -> Tensor:
        return self._files.read(name, spans)

    def names(self) -> Collection[str]:
        return self._files.names()

    def paths(self) -> Collection[Path]:
        return self._files.paths()

    @property
    def is_gguf(self) -> bool:
        return self._files.is_gguf

    def unread_biases(self) -> list[str]:
        return self._files.unread_biases()

    def close(self) -> None:
        self._files.close()


def enumerate_problems(problems: list[str]) -> str:
    """Returns one line with the first problems, and with the number of problems that are left
    out."""
    rest = len(problems) - _MAX_PROBLEMS
    return "; ".join(problems[:_MAX_PROBLEMS]) + (f"; and {rest} more" if rest > 0 else "")
