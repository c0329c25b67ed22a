"""Products with int8 weights by Triton against the same numbers multiplied in float32.

On a CUDA device these are tests of the GPU, elsewhere the kernel is interpreted on the CPU.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.reference import operations as reference
from kernels.weights.linear import Gate
from kernels.weights.quantise import quantised
from tests.kernels.implementations import CPU, CUDA

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from kernels.triton import product_tiles
from kernels.triton.linear_int8 import (
    Int8Matrix,
    TritonInt8GatedWeight,
    TritonInt8Weight,
)
from kernels.triton.product_tiles import Product, ProductTiles, cut_product, cut_with, entry
from kernels.triton.quantised_product import multiply
from kernels.triton.tune import product_candidates
from kernels.triton.tuning import Device, save

DEVICE = CUDA if torch.cuda.is_available() else CPU
pytestmark = pytest.mark.gpu if torch.cuda.is_available() else pytest.mark.triton

# Products are exact and sums float32; what is left is the rounding of a result.
TOLERANCES = {
    torch.float32: (2e-5, 2e-5),
    torch.bfloat16: (2**-7, 1e-2),
    torch.float16: (2**-10, 2e-3),
}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
GATES: dict[Gate, Callable[[Tensor], Tensor]] = {
    "silu": reference.silu_and_mul,
    "gelu_tanh": reference.gelu_and_mul,
}


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Rows of very different sizes, such that results are of the order of 1."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(shape, generator=generator) * torch.rand(shape[0], 1, generator=generator)
    return rows.div_(shape[-1] ** 0.25).to(DEVICE, dtype)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """With what the weight is when it is quantised."""
    whole, scales = quantised(weight)
    return x.float() @ (whole.float() * scales[:, None]).t()


def check_close(actual: Tensor, expected: Tensor) -> None:
    rtol, atol = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.float(), expected, rtol=rtol, atol=atol)


@DTYPES
@pytest.mark.parametrize("n_tokens", [1, 2, 15, 16, 17, 65, 300])
@pytest.mark.parametrize(
    ("n_out", "n_in", "has_bias", "has_residual"),
    [(1, 1, True, True), (70, 130, True, False), (64, 256, False, True), (20, 1100, True, True)],
)
def test_is_the_product_with_the_quantised_weight(
    n_tokens: int, n_out: int, n_in: int, dtype: torch.dtype, has_bias: bool, has_residual: bool
) -> None:
    weight = numbers(n_out, n_in, dtype=dtype, seed=1)
    x = numbers(n_tokens, n_in, dtype=dtype, seed=2)
    bias = numbers(1, n_out, dtype=dtype, seed=3)[0] if has_bias else None
    residual = numbers(n_tokens, n_out, dtype=dtype, seed=4) if has_residual else None
    expected = product(x, weight)
    if bias is not None:
        expected = expected + bias.float()
    if residual is not None:
        expected = expected + residual.float()
    packed = TritonInt8Weight.of(weight)
    assert packed.shape == (n_out, n_in)
    out = packed(x, bias, residual)
    check_close(out, expected)
    if residual is not None:
        assert out.data_ptr() == residual.data_ptr()


@DTYPES
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("n_tokens", [1, 16, 33, 130])
@pytest.mark.parametrize(("n_out", "n_in"), [(1, 9), (70, 130), (64, 64), (20, 1100)])
def test_gates_apply_to_what_follows_them(
    gate: Gate, n_tokens: int, n_out: int, n_in: int, dtype: torch.dtype
) -> None:
    weight = numbers(2 * n_out, n_in, dtype=dtype, seed=1)
    x = numbers(n_tokens, n_in, dtype=dtype, seed=2)
    gated = TritonInt8GatedWeight.of(weight, gate)
    assert gated.shape == (2 * n_out, n_in)
    check_close(gated(x), GATES[gate](product(x, weight)))


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(
    n_tokens=st.integers(1, 40),
    n_in=st.integers(1, 700),
    n_out=st.integers(1, 200),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
)
def test_any_shape_is_a_product(
    n_tokens: int, n_in: int, n_out: int, has_bias: bool, has_residual: bool
) -> None:
    test_is_the_product_with_the_quantised_weight(
        n_tokens, n_out, n_in, torch.bfloat16, has_bias, has_residual
    )


def test_a_view_of_something_wider_is_multiplied_and_added_to_as_it_is_seen() -> None:
    weight = numbers(40, 32, dtype=torch.float32, seed=1)
    wide = numbers(5, 96, dtype=torch.float32, seed=2)
    sums = numbers(5, 80, dtype=torch.float32, seed=3)
    before = sums.clone()
    packed = TritonInt8Weight.of(weight)
    x, residual = wide[:, 32:64], sums[:, 20:60]
    expected = product(x, weight) + residual
    check_close(packed(x, None, residual), expected)
    check_close(sums[:, 20:60], expected)
    assert torch.equal(sums[:, :20], before[:, :20])
    assert torch.equal(sums[:, 60:], before[:, 60:])
    turned, added = (numbers(n, 5, dtype=torch.float32, seed=4).t() for n in (32, 40))
    expected = product(turned, weight) + added
    check_close(packed(turned, None, added), expected)


def test_many_tiles_of_tokens_go_over_the_outputs_in_groups() -> None:
    weight = numbers(70, 40, dtype=torch.float32, seed=1)
    x = numbers(600, 40, dtype=torch.float32, seed=2)  # 19 tiles, of which 16 are side by side
    check_close(TritonInt8Weight.of(weight)(x), product(x, weight))


def test_divided_inputs_give_the_same_sums_each_time_and_leave_no_count() -> None:
    weight = numbers(60, 4096, dtype=torch.bfloat16, seed=1)
    packed = TritonInt8Weight.of(weight)
    whole = Product(60, 4096, is_gated=False, dtype=torch.bfloat16)
    assert cut_product(whole, 3, Device("none", 90, 132)).n_parts > 4
    x = numbers(3, 4096, dtype=torch.bfloat16, seed=2)
    first = packed(x)
    for _ in range(3):
        assert torch.equal(packed(x), first)
        assert not packed.matrix.arrivals.any()
    check_close(first, product(x, weight))


@DTYPES
@pytest.mark.parametrize("n_tokens", [9, 150])
def test_every_candidate_computes_the_same(n_tokens: int, dtype: torch.dtype) -> None:
    weight = numbers(2 * 70, 600, dtype=dtype, seed=1)
    x = numbers(n_tokens, 600, dtype=dtype, seed=2)
    expected = reference.silu_and_mul(product(x, weight))
    matrix, shape = Int8Matrix.of(weight), Product(70, 600, is_gated=True, dtype=dtype)
    # How a program waits for memory is not what is computed.
    candidates = {
        replace(tiles, n_warps=4, n_stages=2) for tiles in product_candidates(n_tokens, dtype)
    }
    n_computed = 0
    for tiles in candidates:
        out = x.new_empty(n_tokens, 70)
        cut = cut_with(tiles, shape, n_tokens, Device("none", 90, 8))
        try:
            multiply(matrix, x, None, out, cut, gate=1, has_residual=False)
        except OutOfResources:
            continue  # on a smaller GPU, as in `tune`
        check_close(out, expected)
        n_computed += 1
    assert n_computed


@pytest.mark.gpu
def test_a_recording_computes_again_what_its_inputs_hold() -> None:
    weight = numbers(60, 4096, dtype=torch.bfloat16, seed=1).cuda()
    packed = TritonInt8Weight.of(weight)
    x = numbers(3, 4096, dtype=torch.bfloat16, seed=2).cuda()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        packed(x)  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = packed(x)
    for seed in (3, 4, 5):
        x.copy_(numbers(3, 4096, dtype=torch.bfloat16, seed=seed))
        graph.replay()
        check_close(out, product(x, weight))
        assert torch.equal(out, packed(x))


def test_no_tokens_have_no_results() -> None:
    weight = numbers(34, 8, dtype=torch.bfloat16, seed=1)
    x = weight.new_empty(0, 8)
    assert TritonInt8Weight.of(weight)(x).shape == (0, 34)
    assert TritonInt8GatedWeight.of(weight, "silu")(x).shape == (0, 17)


def test_numbers_and_memory_are_those_of_int8() -> None:
    weight = numbers(256, 1000, dtype=torch.bfloat16, seed=1)
    packed = TritonInt8Weight.of(weight)
    whole, scales = quantised(weight.cpu())
    assert torch.equal(packed.matrix.whole[:, :1000].cpu(), whole)
    assert torch.equal(packed.matrix.scales.cpu(), scales)
    assert weight.nbytes / 2 < packed.nbytes < weight.nbytes / 1.9


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_token_that_is_not_finite_spoils_no_other(bad: float) -> None:
    x = torch.ones(3, 40, device=DEVICE)
    x[1, 7] = bad
    out = TritonInt8Weight.of(torch.ones(5, 40, device=DEVICE))(x)
    assert out.isfinite().all(1).tolist() == [True, False, True]


def test_what_does_not_fit_together_is_refused() -> None:
    packed = TritonInt8Weight.of(torch.ones(3, 4, device=DEVICE))
    x = torch.ones(2, 4, device=DEVICE)
    with pytest.raises(ValueError, match=r"inputs \[2, 5\] and results \[2, 3\] for a weight"):
        packed(torch.ones(2, 5, device=DEVICE))
    with pytest.raises(ValueError, match=r"and results \[2, 1\] for a weight \[3, 4\]"):
        packed(x, None, torch.ones(2, 1, device=DEVICE))
    with pytest.raises(ValueError, match=r"torch\.float32 and torch\.bfloat16 in one product"):
        packed(x, torch.ones(3, dtype=torch.bfloat16, device=DEVICE))
    with pytest.raises(ValueError, match=r"no int8 for torch\.float64 \[3, 4\]"):
        TritonInt8Weight.of(torch.ones(3, 4, dtype=torch.float64))


class TestCut:
    """Into tiles and parts."""

    H100 = Device("none", capability=90, n_multiprocessors=132)
    LLAMA = Product(4096, 14336, is_gated=False, dtype=torch.bfloat16)

    @given(
        n_out=st.integers(1, 40_000),
        n_in=st.integers(1, 40_000),
        is_gated=st.booleans(),
        dtype=st.sampled_from(list(TOLERANCES)),
        n_tokens=st.integers(1, 9000),
    )
    def test_parts_are_all_inputs_and_none_is_empty(
        self, n_out: int, n_in: int, is_gated: bool, dtype: torch.dtype, n_tokens: int
    ) -> None:
        cut = cut_product(Product(n_out, n_in, is_gated, dtype), n_tokens, self.H100)
        part = cut.n_steps * cut.tiles.inputs
        assert (cut.n_parts - 1) * part < n_in <= cut.n_parts * part
        assert cut.n_parts == 1 or cut.n_tiles <= product_tiles.MAX_DIVIDED
        n_wanted = cut.tiles.n_programs * self.H100.n_multiprocessors
        assert cut.n_parts == 1 or cut.n_tiles * cut.n_parts <= n_wanted
        assert cut.n_tiles * cut.tiles.outputs * cut.tiles.tokens >= n_out * n_tokens

    def test_a_decode_has_programs_for_all_multiprocessors(self) -> None:
        cut = cut_product(self.LLAMA, 1, self.H100)
        assert (cut.tiles.tokens, cut.n_parts) == (16, 4)
        assert cut.n_tiles * cut.n_parts == 256

    @pytest.mark.parametrize("n_out", [384, 768, 896, 1152, 1536, 6144])
    def test_powers_of_two_tokens_meet_every_kernel(self, n_out: int) -> None:
        def kernel(n_tokens: int) -> object:
            product = Product(n_out, 4096, is_gated=False, dtype=torch.bfloat16)
            cut = cut_product(product, n_tokens, self.H100)
            return cut.tiles, cut.n_parts, cut.n_steps

        warmed_up = {kernel(n) for n in (8, *(1 << i for i in range(4, 12)))}
        assert {kernel(n) for n in range(1, 2049)} <= warmed_up

    def test_a_prompt_is_not_divided(self) -> None:
        assert cut_product(self.LLAMA, 2048, self.H100).n_parts == 1

    def test_tiles_that_were_measured_are_used(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        tiles = ProductTiles(16, 128, 256, n_programs=0, n_warps=8, n_stages=2)
        device = Device("Some GPU for int8", 90, 132)
        save(device.name, {entry(self.LLAMA, 9): tiles})
        assert cut_product(self.LLAMA, 16, device) == cut_with(tiles, self.LLAMA, 16, device)
        assert cut_product(self.LLAMA, 16, device).tiles == tiles
        for other, n_tokens in (
            (self.LLAMA, 17),
            (replace(self.LLAMA, is_gated=True), 16),
            (replace(self.LLAMA, dtype=torch.float16), 16),
            (replace(self.LLAMA, n_in=4096), 16),
        ):
            assert cut_product(other, n_tokens, device).tiles != tiles
