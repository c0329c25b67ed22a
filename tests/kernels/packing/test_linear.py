"""Every form of a linear layer's weight against the plain product, on sizes that fit nothing."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.native.linear import NativeGatedWeight, NativeWeight, can_gate, can_pack
from kernels.packing.linear import pack, pack_gated, pack_table
from kernels.pytorch.gates import gelu_and_mul, silu_and_mul
from kernels.pytorch.linear import CublasWeight, OneDnnWeight
from kernels.weights.linear import Gate, LinearWeight, PlainWeight, TableWeight
from tests.kernels.gated import gated as gated_product

# Rounding of a result: half a unit in the last place of bfloat16 is 2^-9 of it.
TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2**-7, 1e-2)}
DTYPES = st.sampled_from(list(TOLERANCES))
FORMS: dict[str, Callable[[Tensor], LinearWeight]] = {
    "plain": PlainWeight,
    "cublas": CublasWeight,
    "onednn": OneDnnWeight.of,
    "native": NativeWeight.of,
    "packed": pack,
    "table": pack_table,
}
GATES: dict[Gate, Callable[[Tensor], Tensor]] = {"silu": silu_and_mul, "gelu_tanh": gelu_and_mul}


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Such that sums over the last dimension are about 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).div_(shape[-1] ** 0.5).to(dtype)


def check_close(actual: Tensor, expected: Tensor) -> None:
    rtol, atol = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.float(), expected, rtol=rtol, atol=atol)


def skip_if_absent(form: str, weight: Tensor) -> None:
    if form == "native" and not can_pack(weight):
        pytest.skip("no native library for this element type on this processor")
    is_fast: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if form == "onednn" and weight.dtype == torch.bfloat16 and not is_fast:
        pytest.skip("no instructions for bfloat16 on this processor")


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@given(
    n_tokens=st.integers(1, 40) | st.sampled_from([100, 300]),
    n_in=st.integers(1, 130),
    n_out=st.integers(1, 130),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
)
def test_is_the_plain_product(
    form: str,
    n_tokens: int,
    n_in: int,
    n_out: int,
    dtype: torch.dtype,
    has_bias: bool,
    has_residual: bool,
) -> None:
    weight = numbers(n_out, n_in, dtype=dtype, seed=1)
    skip_if_absent(form, weight)
    x = numbers(n_tokens, n_in, dtype=dtype, seed=2) * n_in**0.5
    bias = numbers(n_out, dtype=dtype, seed=3) if has_bias else None
    residual = numbers(n_tokens, n_out, dtype=dtype, seed=4) if has_residual else None
    expected = x.float() @ weight.float().t()
    if bias is not None:
        expected = expected + bias.float()
    if residual is not None:
        expected = expected + residual.float()
    packed = FORMS[form](weight.clone())
    assert packed.shape == (n_out, n_in)
    check_close(packed(x, bias, residual), expected)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("n_in", [768, 3000])
def test_many_tokens_are_summed_in_several_passes(n_in: int, dtype: torch.dtype) -> None:
    weight = numbers(70, n_in, dtype=dtype, seed=1)
    x = numbers(700, n_in, dtype=dtype, seed=2) * n_in**0.5
    check_close(pack(weight)(x), x.float() @ weight.float().t())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_no_tokens_have_no_results(form: str, dtype: torch.dtype) -> None:
    weight = numbers(33, 8, dtype=dtype, seed=1)
    skip_if_absent(form, weight)
    out = FORMS[form](weight)(weight.new_empty(0, 8))
    assert (out.shape, out.dtype) == ((0, 33), dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_view_of_something_wider_is_multiplied_as_it_is_seen(dtype: torch.dtype) -> None:
    wide = numbers(5, 90, dtype=dtype, seed=1)
    weight = numbers(40, 30, dtype=dtype, seed=2)
    check_close(pack(weight)(wide[:, 30:60]), wide[:, 30:60].float() @ weight.float().t())


@given(n_out=st.integers(1, 130), n_in=st.integers(1, 70), dtype=DTYPES, data=st.data())
def test_a_table_gives_back_its_rows_to_the_last_bit(
    n_out: int, n_in: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    indices = torch.tensor(
        data.draw(st.lists(st.integers(0, n_out - 1), max_size=8)), dtype=torch.long
    )
    weight = numbers(n_out, n_in, dtype=dtype, seed=1)
    table: TableWeight = pack_table(weight.clone())
    assert torch.equal(table.rows(indices), weight[indices])


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
    x = numbers(n_tokens, n_in, dtype=dtype, seed=2) * n_in**0.5
    expected = GATES[gate](F.linear(x.float(), weight.float()))
    gated = pack_gated(weight.clone(), gate)
    assert isinstance(gated, NativeGatedWeight) == can_gate(weight)
    # Where gates are an operation of their own, both of their inputs are rounded, too.
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(gated_product(gated, x).float(), expected, rtol=3 * rtol, atol=atol)


def test_a_matrix_without_outputs_stays_as_it_is() -> None:
    assert isinstance(pack(torch.empty(0, 4)), PlainWeight)
    assert pack(torch.empty(0, 4))(torch.ones(3, 4)).shape == (3, 0)
