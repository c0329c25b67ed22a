"""The step that is Python's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kernels.steps.buffer import Buffer


@dataclass(frozen=True, slots=True)
class Call:
    """Calls Python: `function(batch, kv, *tensors)`, with a tensor for each buffer.

    The batch and the layers' storage are what the program runs with.
    """

    function: Callable[..., None]
    buffers: tuple[Buffer, ...]
