"""Files that hold a checkpoint's tensors, whatever their format.

`SafetensorsFiles` and `GgufFile` implement it. Names are those of the family, and each may have
another spelling in the files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from services.common.cannot_start import CannotStart

_MAX_PROBLEMS = 8  # named in one error; a wrong checkpoint usually has hundreds of the same kind


class CheckpointError(CannotStart):
    """The checkpoint's files are not what its configuration promises; the message names them."""


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a tensor in a file: its shape, its element type's name, and a row's bytes."""

    shape: tuple[int, ...]
    element: str
    row_bytes: int  # of all that is in the file for one index of the first dimension


class TensorFiles(Protocol):
    """The tensors of a checkpoint."""

    def find(self, name: str) -> str | None:
        """Returns the name that a tensor of the family has in the files; None if there is none."""

    def header(self, name: str) -> Header:
        """Returns what the file says of the tensor that is called `name` there."""

    def read(self, name: str, spans: Sequence[range]) -> Tensor:
        """Returns a part of that tensor, on the CPU: the indices of `spans` in each dimension."""

    def close(self) -> None:
        """Gives back the memory of what was read; the next read opens files anew."""


def enumerate_problems(problems: list[str]) -> str:
    """Returns the first problems as one line, and how many more there are."""
    rest = len(problems) - _MAX_PROBLEMS
    return "; ".join(problems[:_MAX_PROBLEMS]) + (f"; and {rest} more" if rest > 0 else "")
