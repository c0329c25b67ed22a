"""Copies what the host has prepared to the device, without waiting for the device."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """`values` on `device`; on a CPU it is the same memory.

    From pageable memory the copy would make the host wait until the device has done all that was
    queued before it; from pinned memory it takes its place in the queue.
    """
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
