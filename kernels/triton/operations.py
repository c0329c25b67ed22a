"""All operations of Triton as `Ops`."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from kernels.ops import Ops
from kernels.pytorch.add_scaled import add_scaled
from kernels.pytorch.clamp_and_mul import clamp_and_mul
from kernels.pytorch.gelu import gelu
from kernels.pytorch.gelu_tanh import gelu_tanh
from kernels.pytorch.interpreter import Interpreter
from kernels.pytorch.route import route
from kernels.pytorch.route_in_groups import route_in_groups
from kernels.pytorch.soft_cap import soft_cap


@cache
def triton_ops() -> Ops | None:
    """Returns the operations that are Triton kernels; None where Triton is not installed."""
    if find_spec("triton") is None:
        return None
    # Not above: without Triton there is nothing to import, and loading it for nothing takes a rank
    # on a CPU 0.3 s.
    from triton import knobs

    from kernels.triton.attention import attention
    from kernels.triton.attention_plan import plan_items
    from kernels.triton.delta_net import delta_net
    from kernels.triton.embedding import embedding
    from kernels.triton.expert_mlp import expert_mlp
    from kernels.triton.gelu_and_mul import gelu_and_mul
    from kernels.triton.greedy import greedy
    from kernels.triton.layer_norm import layer_norm
    from kernels.triton.rms_norm import rms_norm
    from kernels.triton.rotary import rotary
    from kernels.triton.rotary_write_kv import rotary_write_kv
    from kernels.triton.sample import sample
    from kernels.triton.sigmoid_and_mul import sigmoid_and_mul
    from kernels.triton.silu_and_mul import silu_and_mul
    from kernels.triton.write_kv import write_kv

    # A product may be added before it is rounded. Unsaid, Triton 3.9 warns of another default.
    knobs.language.default_fp_fusion = True
    return Ops(
        embedding=embedding,
        rms_norm=rms_norm,
        layer_norm=layer_norm,
        rotary=rotary,
        silu_and_mul=silu_and_mul,
        gelu=gelu,
        gelu_tanh=gelu_tanh,
        gelu_and_mul=gelu_and_mul,
        clamp_and_mul=clamp_and_mul,
        sigmoid_and_mul=sigmoid_and_mul,
        add_scaled=add_scaled,
        soft_cap=soft_cap,
        route=route,
        route_in_groups=route_in_groups,
        expert_mlp=expert_mlp,
        write_kv=write_kv,
        rotary_write_kv=rotary_write_kv,
        plan_attention=plan_items,
        attention=attention,
        delta_net=delta_net,
        greedy=greedy,
        sample=sample,
        run_program=Interpreter,
        has_fixed_shapes=True,
    )
