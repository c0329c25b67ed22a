"""Products with int8 weights against the same arithmetic spelt out, on sizes that fit nothing."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.native.linear import NativeInt8GatedWeight, NativeInt8Weight, has_int8
from kernels.packing.linear import can_compute, pack, pack_gated
from kernels.pytorch.gates import gelu_and_mul, silu_and_mul
from kernels.reference import operations as reference
from kernels.weights.linear import Gate, PlainWeight
from kernels.weights.quantise import quantised
from tests.kernels.gated import gated as gated_product

pytestmark = pytest.mark.skipif(not has_int8(), reason="no native library or no VNNI")

# Whole numbers are exact; what is left is the rounding of a result.
TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2**-7, 1e-2)}
DTYPES = st.sampled_from(list(TOLERANCES))
GATES: dict[Gate, Callable[[Tensor], Tensor]] = {"silu": silu_and_mul, "gelu_tanh": gelu_and_mul}


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Rows of very different sizes, such that results are of the order of 1."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(shape, generator=generator) * torch.rand(shape[0], 1, generator=generator)
    return rows.div_(shape[-1] ** 0.25).to(dtype)


def check_close(actual: Tensor, expected: Tensor) -> None:
    rtol, atol = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.float(), expected, rtol=rtol, atol=atol)


@given(
    n_tokens=st.integers(1, 40) | st.sampled_from([100, 300]),
    n_in=st.integers(1, 130),
    n_out=st.integers(1, 130),
    dtype=DTYPES,
    has_bias=st.booleans(),
    has_residual=st.booleans(),
)
def test_is_the_arithmetic_of_the_reference(
    n_tokens: int, n_in: int, n_out: int, dtype: torch.dtype, has_bias: bool, has_residual: bool
) -> None:
    weight = numbers(n_out, n_in, dtype=dtype, seed=1)
    x = numbers(n_tokens, n_in, dtype=dtype, seed=2)
    bias = numbers(1, n_out, dtype=dtype, seed=3)[0] if has_bias else None
    residual = numbers(n_tokens, n_out, dtype=dtype, seed=4) if has_residual else None
    expected = reference.int8_linear(x, weight)
    if bias is not None:
        expected = expected + bias.float()
    if residual is not None:
        expected = expected + residual.float()
    packed = pack(weight.clone(), "int8")
    assert isinstance(packed, NativeInt8Weight)
    assert packed.shape == (n_out, n_in)
    check_close(packed(x, bias, residual), expected)


@pytest.mark.parametrize("gate", GATES)
@given(
    n_tokens=st.integers(1, 40),
    n_in=st.integers(1, 70),
    n_out=st.integers(1, 70) | st.sampled_from([16, 32, 64, 128]),
    dtype=DTYPES,
)
def test_gates_apply_to_what_stands_beside_them(
    gate: Gate, n_tokens: int, n_in: int, n_out: int, dtype: torch.dtype
) -> None:
    weight = numbers(2 * n_out, n_in, dtype=dtype, seed=1)
    x = numbers(n_tokens, n_in, dtype=dtype, seed=2)
    gated = pack_gated(weight.clone(), gate, "int8")
    assert isinstance(gated, NativeInt8GatedWeight) == (n_out % 16 == 0)
    check_close(gated_product(gated, x), GATES[gate](reference.int8_linear(x, weight)))


@pytest.mark.parametrize("n_in", [768, 3000])
def test_many_tokens_are_summed_in_several_passes(n_in: int) -> None:
    weight = numbers(70, n_in, dtype=torch.float32, seed=1)
    x = numbers(1500, n_in, dtype=torch.float32, seed=2)
    expected = reference.int8_linear(x, weight)
    torch.testing.assert_close(pack(weight, "int8")(x), expected, rtol=1e-5, atol=1e-4)


def test_sums_of_the_largest_numbers_stay_whole() -> None:
    n_in = 100_000  # a sum of 1.6e9; with inputs that are counted from -128 it is twice that
    weight, x = torch.ones(1, n_in), torch.ones(2, n_in)
    x[1] = -1
    assert pack(weight, "int8")(x).tolist() == [[n_in], [-n_in]]


def test_tokens_and_outputs_of_zeros_are_zeros() -> None:
    weight, x = torch.ones(3, 9), torch.ones(2, 9)
    weight[1], x[1] = 0, 0
    out = pack(weight, "int8")(x)
    torch.testing.assert_close(out, torch.tensor([[9.0, 0, 9], [0, 0, 0]]))


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_token_that_is_not_finite_has_no_finite_results(bad: float) -> None:
    x = torch.ones(3, 40)
    x[1, 7] = bad
    assert pack(torch.ones(5, 40), "int8")(x).isfinite().all(1).tolist() == [True, False, True]


def test_no_tokens_have_no_results() -> None:
    assert pack(torch.ones(33, 8), "int8")(torch.empty(0, 8)).shape == (0, 33)


def test_a_weight_is_within_half_a_step_of_what_it_was() -> None:
    weight = numbers(3000, 50, dtype=torch.bfloat16, seed=1)
    whole, scales = quantised(weight)
    assert whole.abs().amax(1).eq(127).all()
    error = (whole * scales[:, None] - weight.float()).abs()
    assert (error <= 0.5001 * scales[:, None]).all()


def test_it_takes_half_of_the_memory() -> None:
    weight = numbers(256, 1024, dtype=torch.bfloat16, seed=1)
    packed = pack(weight, "int8")
    assert weight.nbytes / 2 < packed.nbytes < weight.nbytes / 1.9


def test_what_has_no_elements_stays_as_it_is() -> None:
    assert isinstance(pack(torch.empty(0, 4), "int8"), PlainWeight)
    assert isinstance(pack(torch.empty(3, 4, device="meta"), "int8"), PlainWeight)


def test_what_cannot_be_quantised_is_refused() -> None:
    assert not can_compute("int8", torch.device("meta"))
    with pytest.raises(ValueError, match="no form for"):
        pack(torch.ones(3, 4, dtype=torch.float64), "int8")
