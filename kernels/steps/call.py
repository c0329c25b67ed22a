"""A step that calls a Python function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kernels.steps.buffer import Buffer


@dataclass(frozen=True, slots=True)
class Call:
    """Calls a Python function: `outputs = function(*inputs)`.

    The function receives a tensor [n, width] for each input. The function returns a tuple with a
    tensor for each output, or only the tensor if there is one output. If a buffer is an input and
    an output, the function may change the tensor in place and return the changed tensor. The
    function must not change other inputs, and other results must be new tensors.
    """

    name: str  # a description of the computation, for readers of a program
    function: Callable[..., Tensor | tuple[Tensor, ...]]
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
