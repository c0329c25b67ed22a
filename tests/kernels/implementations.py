"""Every implementation of the operations that this machine can run.

Where there is no CUDA device, Triton's kernels are interpreted: the same code, one element of a
block after the other in NumPy, on tensors in the host's memory. Triton decides this when it is
imported, so a test must import this file before it imports a kernel.
"""

import os
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from kernels import TORCH, Ops, triton_ops
from kernels.native.library import open_library, runnable
from kernels.native.operations import ops_of

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


@dataclass(frozen=True)
class Implementation:
    """Operations, and where their tensors must be."""

    ops: Ops
    device: torch.device = CPU


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`, in the same layout, which `Tensor.to` makes dense."""
    if tensor.device.type == device.type:
        return tensor
    layout = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return layout.copy_(tensor)


IS_INTERPRETED = find_spec("triton") is not None and not torch.cuda.is_available()


def _triton() -> Ops | None:
    if IS_INTERPRETED:
        # PyTorch's compiler imports Triton, too; what was made before could not be interpreted.
        assert "triton" not in sys.modules or "TRITON_INTERPRET" in os.environ
        os.environ["TRITON_INTERPRET"] = "1"
        interpreter = import_module("tests.kernels.triton.interpreter")
        interpreter.correct_bfloat16()
        interpreter.patch_language()
    return triton_ops()


ON_TORCH = Implementation(TORCH)

# The names of the native builds. The one that this machine would use is tested first, and the
# others, which are compiled from the same sources, where there is time.
BUILDS = [
    pytest.param(name, id=name, marks=pytest.mark.thorough if index else ())
    for index, name in enumerate(runnable())
]
NATIVE = [
    pytest.param(Implementation(ops_of(open_library(name))), id=f"native-{name}", marks=param.marks)
    for name, param in zip(runnable(), BUILDS, strict=True)
]

_TRITON = _triton()

# For `pytest.mark.parametrize`.
COMPILED = [
    pytest.param(ON_TORCH, id="torch-cpu"),
    pytest.param(Implementation(TORCH, CUDA), id="torch-cuda", marks=pytest.mark.gpu),
    *NATIVE,
]
INTERPRETED = []
if _TRITON is not None and IS_INTERPRETED:
    interpreted = Implementation(_TRITON)
    INTERPRETED.append(pytest.param(interpreted, id="triton-interpreted", marks=pytest.mark.triton))
elif _TRITON is not None:
    on_cuda = Implementation(_TRITON, CUDA)
    COMPILED.append(pytest.param(on_cuda, id="triton-cuda", marks=pytest.mark.gpu))

# All. An interpreted program takes milliseconds: tests of very many cases leave these out.
IMPLEMENTATIONS = [*COMPILED, *INTERPRETED]
