"""The step that is a Python function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kernels.steps.buffer import Buffer


@dataclass(frozen=True, slots=True)
class Call:
    """Computes what no other step does: `outputs = function(*inputs)`.

    The function gets a tensor [n, width] for each input, and returns a tensor for each output, or
    the tensor itself if there is one output. It may change and return an input that is an output,
    too; other inputs stay as they are, and other results are new.
    """

    name: str  # what is computed, for readers of a program
    function: Callable[..., Tensor | tuple[Tensor, ...]]
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
