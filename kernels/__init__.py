"""The tensor operations of a stage, chosen by device, and the programs that run them.

`ops_for(device)` returns the operations. `kernels.packing` returns matrices in the forms that these
operations take. The operations and their types are listed once, in `kernels.ops`; each
implementation is a folder:

    reference  a slow and obvious version of each operation, which defines its result; for tests
    pytorch    every operation, for every device, and an interpreter of programs
    native     C++ for CPUs, if it is built; tensors that it does not support go to `pytorch`
    triton     kernels for GPUs, if Triton is installed

`forms` and `weights` describe the arguments of operations. `steps` and `program` describe programs.
An implementation for another device is another folder; nothing outside this package changes.

This package handles tensors only: no requests, no models, no processes.
"""

from __future__ import annotations

import torch

from kernels.forms.attention import AttentionForm
from kernels.forms.delta_net import DeltaNetForm
from kernels.forms.head_norms import HeadNorms
from kernels.forms.state_spans import StateSpans
from kernels.native.library import instruction_set
from kernels.native.operations import native_ops
from kernels.ops import AttentionPlan, Ops
from kernels.pytorch.operations import TORCH
from kernels.triton.operations import triton_ops

__all__ = [
    "TORCH",
    "AttentionForm",
    "AttentionPlan",
    "DeltaNetForm",
    "HeadNorms",
    "Ops",
    "StateSpans",
    "kernels_name",
    "native_ops",
    "ops_for",
    "triton_ops",
]


def kernels_name(device: torch.device) -> str:
    """Returns the name of the operations that `ops_for` returns: `native-` and the instruction set
    of the native library, `pytorch-` and the type of the device, or `triton-` and the name of the
    GPU."""
    if ops_for(device) is TORCH:
        return f"pytorch-{device.type}"
    if device.type == "cpu":
        return f"native-{instruction_set()}"
    return f"triton-{torch.cuda.get_device_name(device)}"


def ops_for(device: torch.device) -> Ops:
    """Returns the fastest operations for `device`. Raises ValueError unless the device is a CPU or
    a CUDA device."""
    if device.type == "cpu":
        return native_ops() or TORCH
    if device.type == "cuda":
        return triton_ops() or TORCH
    raise ValueError(f"no kernels for device type {device.type!r}; have cpu and cuda")
