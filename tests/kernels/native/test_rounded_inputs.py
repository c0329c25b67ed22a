"""Products whose inputs are rounded to int8 in blocks, against the same rounding in PyTorch."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.native.groups import NativeGroupsGatedWeight, NativeGroupsWeight
from kernels.native.library import runnable
from kernels.packing.linear import pack
from kernels.pytorch.gates import silu_and_mul
from kernels.weights.groups import WHOLE, GroupedMatrix
from kernels.weights.quantise import in_groups
from tests.kernels.native.test_groups_linear import (
    BUILDS,
    DTYPES,
    OTHER_VALUES,
    TOLERANCES,
    check_close,
    grouped,
    numbers,
)

pytestmark = pytest.mark.skipif(not runnable(), reason="the native library is not built")

BLOCK = 32
FROM_ZERO = tuple(range(16))
FUSING = [build for build in BUILDS if build != "portable"]


def rounded(x: Tensor, size: int) -> Tensor:
    """The inputs [n_tokens, n_in] as a product in groups of `size` takes them, in float32. A block
    ends with its group."""
    out = torch.empty(x.shape)
    for group, of_group in zip(x.float().split(size, 1), out.split(size, 1), strict=True):
        for block, of_block in zip(group.split(BLOCK, 1), of_group.split(BLOCK, 1), strict=True):
            largest = block.abs().amax(1, keepdim=True)
            steps = torch.where(largest > 1e-30, 127 / largest, 0.0)
            of_block[:] = (block * steps).round() * (largest / 127)
    return out


def rounding(matrix: GroupedMatrix, dtype: torch.dtype, build: str) -> NativeGroupsWeight:
    matrix = matrix.rounding_inputs()
    assert matrix.form.rounds_inputs
    return NativeGroupsWeight.of(matrix, dtype, BUILDS[build])


@pytest.mark.parametrize("build", BUILDS)
@given(
    n_tokens=st.integers(1, 20) | st.sampled_from([100]),
    n_in=st.integers(1, 300),
    n_out=st.integers(1, 90),
    size=st.sampled_from([8, 24, 32, 40, 64, 128, 304]),
    has_offsets=st.booleans(),
    values=st.sampled_from([WHOLE, FROM_ZERO]),
    dtype=DTYPES,
    has_bias=st.booleans(),
)
def test_is_the_product_of_rounded_inputs(
    build: str,
    n_tokens: int,
    n_in: int,
    n_out: int,
    size: int,
    has_offsets: bool,
    values: tuple[int, ...],
    dtype: torch.dtype,
    has_bias: bool,
) -> None:
    matrix = grouped(n_out, n_in, bits=4, size=size, has_offsets=has_offsets, values=values)
    x = numbers(n_tokens, n_in, seed=2).to(dtype)
    bias = numbers(n_out, seed=3).to(dtype) if has_bias else None
    in_use = matrix.without_zeros().in_short_groups().form.size
    expected = rounded(x, in_use) @ matrix.dequantised().t()
    if bias is not None:
        expected = expected + bias.float()
    check_close(rounding(matrix, dtype, build)(x, bias), expected, factor=2)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("size", [8, 32, 128])
def test_sums_are_exact(build: str, size: int) -> None:
    """With scales that are powers of two no result is rounded, so all builds give equal bits."""
    matrix = grouped(70, 256, bits=4, size=size, has_offsets=True)
    scales = torch.exp2(matrix.scales.log2().round())
    matrix = replace(matrix, scales=scales, offsets=2 * scales)
    x = torch.randint(-127, 128, (9, 256), generator=torch.Generator().manual_seed(1)).float()
    x[:, ::8] = 127.0
    assert torch.equal(rounding(matrix, torch.float32, build)(x), x @ matrix.dequantised().t())


@pytest.mark.skipif(len(FUSING) < 2, reason="this processor runs one build that fuses")
@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_builds_that_fuse_products_and_sums_give_equal_bits(
    dtype: torch.dtype, has_offsets: bool
) -> None:
    for size, n_in, values in ((32, 300, WHOLE), (128, 1000, FROM_ZERO), (8, 40, WHOLE)):
        matrix = grouped(70, n_in, bits=4, size=size, has_offsets=has_offsets, values=values)
        x = numbers(9, n_in, seed=2).to(dtype)
        results = [rounding(matrix, dtype, build)(x) for build in FUSING]
        assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_token_has_the_same_bits_in_any_company(build: str, dtype: torch.dtype) -> None:
    for size, n_in in ((32, 300), (128, 1000), (8, 40)):
        packed = rounding(grouped(70, n_in, bits=4, size=size, has_offsets=True), dtype, build)
        x = numbers(45, n_in, seed=2).to(dtype)
        whole = packed(x)
        for first, n in ((0, 1), (3, 1), (5, 2), (9, 3), (1, 4), (20, 9), (7, 17), (2, 40)):
            assert torch.equal(packed(x[first : first + n]), whole[first : first + n])


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_fit(build: str, sign: int) -> None:
    matrix = grouped(40, 256, bits=4, size=128, has_offsets=False, values=FROM_ZERO)
    matrix = replace(matrix, numbers=torch.full_like(matrix.numbers, 15))
    x = torch.full((7, 256), 3.0 * sign)
    expected = x @ matrix.dequantised().t()
    torch.testing.assert_close(rounding(matrix, torch.float32, build)(x), expected)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_token_that_is_not_finite_spoils_no_other(build: str, bad: float) -> None:
    x = numbers(9, 256, seed=2)
    x[4, 77] = bad
    matrix = grouped(40, 256, bits=4, size=32, has_offsets=True)
    is_finite = rounding(matrix, torch.float32, build)(x).isfinite()
    assert is_finite.all(1).tolist() == [token != 4 for token in range(9)]
    assert not is_finite[4].any()


@pytest.mark.parametrize("build", BUILDS)
def test_zeros_and_very_small_inputs_are_nothing(build: str) -> None:
    packed = rounding(grouped(8, 64, bits=4, size=32, has_offsets=True), torch.float32, build)
    for value in (0.0, 1e-38, -1e-42):
        assert packed(torch.full((3, 64), value)).abs().max() < 1e-30


@pytest.mark.parametrize("build", BUILDS)
def test_gates_apply_to_what_stands_beside_them(build: str) -> None:
    matrix = grouped(2 * 48, 130, bits=4, size=32, has_offsets=True).rounding_inputs()
    x = numbers(5, 130, seed=2)
    gated = NativeGroupsGatedWeight.of(matrix, torch.float32, "silu", BUILDS[build])
    check_close(gated(x), silu_and_mul(rounded(x, 32) @ matrix.dequantised().t()), factor=3)


def test_only_numbers_that_follow_each_other_round_their_inputs() -> None:
    for bits, values in ((4, OTHER_VALUES), (8, WHOLE)):
        matrix = grouped(8, 64, bits=bits, size=32, has_offsets=False, values=values)  # type: ignore[arg-type]
        assert matrix.rounding_inputs() is matrix


def test_inputs_stay_exact_where_that_is_asked_for() -> None:
    weight, x = numbers(50, 256, seed=1), numbers(4, 256, seed=2)
    dequantised = in_groups(weight, 4).dequantised()
    check_close(pack(weight, "int4", "exact")(x), x @ dequantised.t(), factor=10)
    by_default = pack(weight, "int4")(x)
    check_close(by_default, rounded(x, 32) @ dequantised.t(), factor=10)
    assert not torch.equal(by_default, pack(weight, "int4", "exact")(x))
