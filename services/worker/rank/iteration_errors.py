"""Classifies errors in the middle of an iteration: whether a rank can serve another epoch after the
error.

An iteration that breaks off leaves the request table and the keys and values in an unknown state.
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
"""Part of the text of torch's RuntimeError when the host is out of memory."""


def spares_weights(error: Exception) -> bool:
    """Returns whether `error`, raised in an iteration, leaves the weights usable, so that the rank
    can join another epoch."""
    return isinstance(error, _HARMLESS) or (
        isinstance(error, RuntimeError) and _NO_HOST_MEMORY in str(error)
    )
