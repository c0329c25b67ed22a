"""Products with weights in groups by Triton against the dequantised matrix.

On a CUDA device these are tests of the GPU, elsewhere the kernel is interpreted on the CPU.
"""

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.reference import operations as reference
from kernels.weights.groups import WHOLE, Bits, GroupedMatrix
from kernels.weights.linear import Gate
from tests.kernels.implementations import CPU, CUDA
from tests.kernels.native.test_groups_linear import OTHER_VALUES, grouped, numbers

pytest.importorskip("triton")

from kernels.triton.linear_groups import TritonGroupsGatedWeight, TritonGroupsWeight
from kernels.triton.product_tiles import Product, cut_product
from kernels.triton.tuning import Device

DEVICE = CUDA if torch.cuda.is_available() else CPU
pytestmark = pytest.mark.gpu if torch.cuda.is_available() else pytest.mark.triton

# A weight is rounded to the type of tokens, as one of a dequantised matrix is, and so is a result.
TOLERANCES = {
    torch.float32: (2e-5, 2e-5),
    torch.bfloat16: (2**-6, 2e-2),
    torch.float16: (2**-9, 4e-3),
}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
GATES: dict[Gate, Callable[[Tensor], Tensor]] = {
    "silu": reference.silu_and_mul,
    "gelu_tanh": reference.gelu_and_mul,
}


def matrix_of(n_out: int, n_in: int, bits: Bits, size: int, **how: object) -> GroupedMatrix:
    has_offsets = bool(how.get("has_offsets", True))
    values = OTHER_VALUES if how.get("has_other_values") else WHOLE
    made = grouped(n_out, n_in, bits=bits, size=size, has_offsets=has_offsets, values=values)
    return made.to(DEVICE)


def tokens(*shape: int, dtype: torch.dtype, seed: int = 2) -> Tensor:
    return numbers(*shape, seed=seed).to(DEVICE, dtype)


def check_close(actual: Tensor, expected: Tensor) -> None:
    rtol, atol = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.float(), expected, rtol=rtol, atol=atol)


def check_product(
    matrix: GroupedMatrix, n_tokens: int, dtype: torch.dtype, has_bias: bool, has_residual: bool
) -> None:
    n_out, n_in = matrix.shape
    x = tokens(n_tokens, n_in, dtype=dtype)
    bias = tokens(n_out, dtype=dtype, seed=3) if has_bias else None
    residual = tokens(n_tokens, n_out, dtype=dtype, seed=4) if has_residual else None
    expected = x.float() @ matrix.dequantised().t()
    if bias is not None:
        expected = expected + bias.float()
    if residual is not None:
        expected = expected + residual.float()
    packed = TritonGroupsWeight.of(matrix, dtype)
    assert packed.shape == (n_out, n_in)
    out = packed(x, bias, residual)
    check_close(out, expected)
    if residual is not None:
        assert out.data_ptr() == residual.data_ptr()


@DTYPES
@pytest.mark.parametrize("n_tokens", [1, 17, 65])
@pytest.mark.parametrize(
    ("n_out", "n_in", "size", "has_offsets"),
    [(70, 130, 32, True), (64, 256, 128, False), (20, 1100, 1104, True), (9, 40, 8, True)],
)
@pytest.mark.parametrize("bits", [4, 8])
def test_is_the_product_with_the_dequantised_matrix(
    bits: Bits,
    n_tokens: int,
    n_out: int,
    n_in: int,
    size: int,
    has_offsets: bool,
    dtype: torch.dtype,
) -> None:
    matrix = matrix_of(n_out, n_in, bits, size, has_offsets=has_offsets)
    check_product(matrix, n_tokens, dtype, has_bias=True, has_residual=True)


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(
    n_tokens=st.integers(1, 40),
    n_in=st.integers(1, 500),
    n_out=st.integers(1, 150),
    bits=st.sampled_from([4, 8]),
    size=st.sampled_from([16, 32, 64, 128, 504]),
    has_offsets=st.booleans(),
    has_other_values=st.booleans(),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
)
def test_any_shape_is_a_product(
    n_tokens: int,
    n_in: int,
    n_out: int,
    bits: Bits,
    size: int,
    has_offsets: bool,
    has_other_values: bool,
    has_bias: bool,
    has_residual: bool,
) -> None:
    how = {"has_offsets": has_offsets, "has_other_values": has_other_values}
    matrix = matrix_of(n_out, n_in, bits, size, **how)
    check_product(matrix, n_tokens, torch.bfloat16, has_bias, has_residual)


@DTYPES
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("bits", [4, 8])
def test_gates_apply_to_what_follows_them(gate: Gate, bits: Bits, dtype: torch.dtype) -> None:
    for n_tokens, n_out, n_in in ((1, 1, 9), (33, 70, 130), (16, 20, 1100)):
        matrix = matrix_of(2 * n_out, n_in, bits, 32)
        x = tokens(n_tokens, n_in, dtype=dtype)
        gated = TritonGroupsGatedWeight.of(matrix, dtype, gate)
        assert gated.shape == (2 * n_out, n_in)
        check_close(gated(x), GATES[gate](x.float() @ matrix.dequantised().t()))


def test_divided_inputs_give_the_same_sums_each_time_and_leave_no_count() -> None:
    matrix = matrix_of(60, 4096, 4, 128)
    packed = TritonGroupsWeight.of(matrix, torch.bfloat16)
    whole = Product(60, 4096, is_gated=False, dtype=torch.bfloat16)
    assert cut_product(whole, 3, Device("none", 90, 132)).n_parts > 4
    x = tokens(3, 4096, dtype=torch.bfloat16)
    first = packed(x)
    for _ in range(2):
        assert torch.equal(packed(x), first)
        assert not packed.matrix.arrivals.any()
    check_close(first, x.float() @ matrix.dequantised().t())


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_are_those_of_the_dequantised_matrix(bits: Bits) -> None:
    matrix = matrix_of(30, 70, bits, 32)
    table = TritonGroupsWeight.of(matrix, torch.float32)
    indices = torch.tensor([3, 29, 0, 3], device=DEVICE)
    torch.testing.assert_close(table.rows(indices), matrix.dequantised()[indices], rtol=0, atol=0)
    of_half = TritonGroupsWeight.of(matrix, torch.bfloat16)
    assert of_half.rows(indices).dtype == torch.bfloat16


def test_memory_is_that_of_four_bits() -> None:
    packed = TritonGroupsWeight.of(matrix_of(256, 4096, 4, 128, has_offsets=False), torch.bfloat16)
    assert 256 * 4096 / 2 < packed.nbytes < 256 * 4096 * 0.53


def test_what_does_not_fit_together_is_refused() -> None:
    packed = TritonGroupsWeight.of(matrix_of(3, 32, 4, 32), torch.float32)
    with pytest.raises(ValueError, match=r"inputs \[2, 5\] and results \[2, 3\] for a weight"):
        packed(torch.ones(2, 5, device=DEVICE))
    with pytest.raises(ValueError, match=r"torch\.float32 and torch\.bfloat16 in one product"):
        packed(torch.ones(2, 32, device=DEVICE), torch.ones(3, dtype=torch.bfloat16, device=DEVICE))
