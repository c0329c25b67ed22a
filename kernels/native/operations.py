"""All operations of the native library as `Ops`."""

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
from kernels.native.route import Router
from kernels.ops import Ops
from kernels.pytorch.attention import plan_attention
from kernels.pytorch.embedding import embedding
from kernels.pytorch.expert_mlp import expert_mlp
from kernels.pytorch.sample import sample


@cache
def native_ops() -> Ops | None:
    """Returns the operations of the best build for this processor; None if there is none."""
    loaded = library()
    return None if loaded is None else ops_of(loaded)


def ops_of(library: ctypes.CDLL) -> Ops:
    """Returns the operations of one build."""
    norms, gates, rotary = Norms(library), Gates(library), Rotary(library)
    router = Router(library)
    elementwise, greedy = Elementwise(library), Greedy(library).greedy
    return Ops(
        embedding=embedding,
        rms_norm=norms.rms_norm,
        layer_norm=norms.layer_norm,
        rotary=rotary.rotary,
        silu_and_mul=gates.silu_and_mul,
        gelu=gates.gelu,
        gelu_tanh=gates.gelu_tanh,
        gelu_and_mul=gates.gelu_and_mul,
        clamp_and_mul=gates.clamp_and_mul,
        sigmoid_and_mul=gates.sigmoid_and_mul,
        add_scaled=elementwise.add_scaled,
        soft_cap=elementwise.soft_cap,
        route=router.route,
        route_in_groups=router.route_in_groups,
        expert_mlp=expert_mlp,
        write_kv=rotary.write_kv,
        rotary_write_kv=rotary.rotary_write_kv,
        plan_attention=plan_attention,
        attention=Attention(library).attention,
        delta_net=DeltaNet(library).delta_net,
        greedy=greedy,
        sample=partial(sample, greedy=greedy),
        run_program=partial(run_program, library),
    )
