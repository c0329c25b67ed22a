"""Products with int8 weights, beside the same with weights of the tokens' element type.

Bytes are those of the int8 weights, and of tokens and results. So the second version, which reads
twice as many for its weights, is far from a floor that is not its own.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.bench import IS_INTERPRETED, OURS, Bench, Case, Version
from kernels import TORCH, Ops, triton_ops
from kernels.packing.linear import can_compute, pack, pack_gated
from kernels.weights.gated_in_two import GatedInTwo
from kernels.weights.linear import Quantization

Product = Callable[[Tensor], Tensor]
Pack = Callable[[Tensor], Product]


def int8_cases(bench: Bench, n: int) -> Iterator[Case]:
    """The products of a layer that read most, over `n` tokens; none where there is no int8."""
    forms = _int8_forms(bench)
    if forms is None:
        return
    shape = bench.scale.model
    n_qkv = (shape.n_heads + 2 * shape.n_kv_heads) * shape.head_dim
    plain: tuple[Pack, Pack] = forms[0], pack
    gated: tuple[Pack, Pack] = (forms[1], partial(_gated, TORCH, "none"))
    for name, n_out, n_in, n_matrices, packs in (
        ("qkv", n_qkv, shape.hidden, 1, plain),
        ("down", shape.hidden, shape.inner, 1, plain),
        ("gate and up", shape.inner, shape.hidden, 2, gated),
    ):
        x = torch.empty((n, n_in), dtype=bench.dtype, device=bench.device).normal_()
        n_weights = n_matrices * n_out * n_in
        versions = {
            version: partial(_version, bench, x, n_matrices * n_out, form)
            for version, form in zip((OURS, "torch"), packs, strict=True)
        }
        yield Case(
            f"int8 {name}, {n} tokens",
            n_bytes=n_weights + n * (n_in + n_out) * bench.dtype.itemsize,
            n_flops=2 * n * n_weights,
            versions=versions,
        )


def _version(bench: Bench, x: Tensor, n_rows: int, form: Pack) -> Version:
    """Weights of its own, the same for every version but for their form."""
    generator = torch.Generator(bench.device).manual_seed(0)
    weight = torch.empty((n_rows, x.shape[1]), dtype=bench.dtype, device=bench.device)
    weight.normal_(std=x.shape[1] ** -0.5, generator=generator)
    n_sets = bench.n_sets(weight.numel())
    return Version([partial(form(weight.clone()), x) for _ in range(n_sets)])


def _int8_forms(bench: Bench) -> tuple[Pack, Pack] | None:
    """Returns two functions that make int8 weights for this device: of one matrix, and of two that
    are gated; None where it computes none."""
    if IS_INTERPRETED and bench.device.type == "cpu" and bench.ops is triton_ops():
        # A CPU does not pack like a GPU by itself; and without Triton there is nothing to import.
        from kernels.triton.linear_int8 import TritonInt8GatedWeight, TritonInt8Weight

        return TritonInt8Weight.of, partial(TritonInt8GatedWeight.of, gate="silu")
    if can_compute("int8", bench.device):
        return partial(pack, quantization="int8"), partial(_gated, bench.ops, "int8")
    return None


def _gated(ops: Ops, quantization: Quantization, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns a function that multiplies with `weight` and gates."""
    packed = pack_gated(weight, "silu", quantization)
    if not isinstance(packed, GatedInTwo):
        return packed
    return lambda x: ops.silu_and_mul(packed.weight(x))
