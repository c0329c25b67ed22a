"""The operations of the native library as `Ops`; PyTorch has what the library does not."""

from __future__ import annotations

import ctypes
from functools import cache, partial

from kernels.native.attention import Attention
from kernels.native.delta_net import DeltaNet
from kernels.native.elementwise import Elementwise
from kernels.native.gates import Gates
from kernels.native.greedy import Greedy
from kernels.native.layers import run_program
from kernels.native.library import library
from kernels.native.norms import Norms
from kernels.native.rotary import Rotary
from kernels.native.routing import Router
from kernels.ops import Ops
from kernels.pytorch.operations import TORCH
from kernels.pytorch.sample import sample


@cache
def native_ops() -> Ops | None:
    """Returns the operations of the best build for this processor; None if there is none."""
    loaded = library()
    return None if loaded is None else ops_of(loaded)


def ops_of(library: ctypes.CDLL) -> Ops:
    """Returns the operations of one build."""
    greedy = Greedy(library)
    return Ops.of(
        Attention(library),
        DeltaNet(library),
        Elementwise(library),
        Gates(library),
        greedy,
        Norms(library),
        Rotary(library),
        Router(library),
        sample=partial(sample, greedy=greedy.greedy),
        run_program=partial(run_program, library),
        otherwise=TORCH,
    )
