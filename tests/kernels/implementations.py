"""Every implementation of the operations that this machine can run."""

from dataclasses import dataclass

import pytest
import torch

from kernels import TORCH, Ops
from kernels.native.library import open_library, runnable
from kernels.native.operations import ops_of

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Implementation:
    """Operations, and where their tensors must be."""

    ops: Ops
    device: torch.device = CPU


ON_TORCH = Implementation(TORCH)

NATIVE = [
    pytest.param(Implementation(ops_of(open_library(name))), id=f"native-{name}")
    for name in runnable()
]

# For `pytest.mark.parametrize`.
IMPLEMENTATIONS = [
    pytest.param(ON_TORCH, id="torch-cpu"),
    pytest.param(
        Implementation(TORCH, torch.device("cuda")), id="torch-cuda", marks=pytest.mark.gpu
    ),
    *NATIVE,
]
