"""Matrix products with int8 weights, compared with products with unquantized weights.

The bytes of a case are counted for the int8 weights, the input and the result. The version with
unquantized weights reads two bytes per weight, so its time is always far from this floor.
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
    """Yields a case for each of a layer's products that read the most bytes, over `n` tokens.
    Yields nothing if the device does not support int8."""
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
    """Returns a version that multiplies `x` by random weights in the given form. The weights are
    equal for all versions."""
    generator = torch.Generator(bench.device).manual_seed(0)
    weight = torch.empty((n_rows, x.shape[1]), dtype=bench.dtype, device=bench.device)
    weight.normal_(std=x.shape[1] ** -0.5, generator=generator)
    n_sets = bench.n_sets(weight.numel())
    return Version([partial(form(weight.clone()), x) for _ in range(n_sets)])


def _int8_forms(bench: Bench) -> tuple[Pack, Pack] | None:
    """Returns two functions that make int8 weights for this device: one for a plain matrix, and one
    for a gate and an up matrix. Returns None if the device does not support int8."""
    if IS_INTERPRETED and bench.device.type == "cpu" and bench.ops is triton_ops():
        # A CPU does not pack like a GPU by itself; and without Triton there is nothing to import.
        from kernels.triton.linear_int8 import TritonInt8GatedWeight, TritonInt8Weight

        return TritonInt8Weight.of, partial(TritonInt8GatedWeight.of, gate="silu")
    if can_compute("int8", bench.device):
        return partial(pack, quantization="int8"), partial(_gated, bench.ops, "int8")
    return None


def _gated(ops: Ops, quantization: Quantization, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns a function that multiplies by the gate and up matrices in `weight`, and applies SiLU
    gating."""
    packed = pack_gated(weight, "silu", quantization)
    if not isinstance(packed, GatedInTwo):
        return packed
    return lambda x: ops.silu_and_mul(packed.weight(x))
