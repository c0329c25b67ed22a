"""Errors in the middle of an iteration: after which of them a rank can serve another epoch.

An iteration that breaks off leaves a request table and keys and values of which nothing is certain.
Both belong to the epoch, so the rank leaves the epoch, and its weights are not affected. This does
not hold after errors of a device, which may make every later call fail.
"""

import torch

_HARMLESS = (
    ArithmeticError,
    LookupError,
    MemoryError,
    TimeoutError,
    TypeError,
    ValueError,
    torch.OutOfMemoryError,
)

_NO_HOST_MEMORY = "can't allocate memory"
"""Part of the text of the RuntimeError that torch raises when the host has no memory."""


def spares_weights(error: Exception) -> bool:
    """Returns whether a rank can join another epoch with its weights after `error` in an
    iteration."""
    return isinstance(error, _HARMLESS) or (
        isinstance(error, RuntimeError) and _NO_HOST_MEMORY in str(error)
    )
