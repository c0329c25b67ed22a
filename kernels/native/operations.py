"""The operations of the native library as `Ops`. Operations that are missing in the library are
PyTorch's."""

from __future__ import annotations

import ctypes
from functools import cache, partial

from kernels.native.attention import NativeAttention
from kernels.native.delta_net import NativeDeltaNet
from kernels.native.elementwise import NativeElementwise
from kernels.native.gates import NativeGates
from kernels.native.greedy import NativeGreedy
from kernels.native.layers import run_program
from kernels.native.library import library
from kernels.native.norms import NativeNorms
from kernels.native.rotary import NativeRotary
from kernels.native.routing import NativeRouter
from kernels.ops import Ops
from kernels.pytorch.operations import TORCH
from kernels.pytorch.sample import sample


@cache
def native_ops() -> Ops | None:
    """Returns the operations of the best build for this processor, or None if there is no such
    build."""
    loaded = library()
    return None if loaded is None else ops_of(loaded)


def ops_of(library: ctypes.CDLL) -> Ops:
    """Returns the operations of one build of the library. An operation that is missing in the build
    is PyTorch's."""
    greedy = NativeGreedy(library)
    return Ops.of(
        NativeAttention(library),
        NativeDeltaNet(library),
        NativeElementwise(library),
        NativeGates(library),
        greedy,
        NativeNorms(library),
        NativeRotary(library),
        NativeRouter(library),
        sample=partial(sample, greedy=greedy.greedy),
        run_program=partial(run_program, library),
        otherwise=TORCH,
    )
