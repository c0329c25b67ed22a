"""Products with weights in groups against the dequantised matrix, in every build of the library."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.native.groups import NativeGroupsGatedWeight, NativeGroupsWeight, functions_of
from kernels.native.library import open_library, runnable
from kernels.packing.linear import can_compute, pack, pack_gated, pack_table
from kernels.pytorch.gates import gelu_and_mul, silu_and_mul
from kernels.weights.groups import WHOLE, Bits, GroupedMatrix, GroupForm, joined
from kernels.weights.linear import Gate, Quantization
from kernels.weights.quantise import in_groups
from tests.kernels.gated import gated as gated_product

pytestmark = pytest.mark.skipif(not runnable(), reason="the native library is not built")

BUILDS = {name: functions_of(open_library(name)) for name in runnable()}
CPU = torch.device("cpu")
GATES: dict[Gate, Callable[[Tensor], Tensor]] = {"silu": silu_and_mul, "gelu_tanh": gelu_and_mul}

# Numbers are exact and sums float32; what is left is the rounding of a result.
TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2**-7, 1e-2)}
DTYPES = st.sampled_from(list(TOLERANCES))
# Of e2m1, doubled, as in MXFP4.
OTHER_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def numbers(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator)


def grouped(
    n_out: int,
    n_in: int,
    *,
    bits: Bits,
    size: int,
    has_offsets: bool,
    values: tuple[int, ...] = WHOLE,
    seed: int = 1,
) -> GroupedMatrix:
    """Any numbers, such that sums over the inputs are of the order of 1."""
    generator = torch.Generator().manual_seed(seed)
    form = GroupForm(bits, size, values)
    low, high = (0, 16) if bits == 4 else (-128, 128)
    whole = torch.randint(low, high, (n_out, n_in), generator=generator)
    step = (0.2 if bits == 4 else 0.012) / n_in**0.5
    shape = n_out, form.n_groups(n_in)
    return GroupedMatrix(
        form,
        whole.to(torch.uint8 if bits == 4 else torch.int8),
        (torch.rand(shape, generator=generator) + 0.1) * step,
        torch.randn(shape, generator=generator) * step if has_offsets else None,
    )


def check_close(actual: Tensor, expected: Tensor, *, factor: float = 1.0) -> None:
    rtol, atol = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.float(), expected, rtol=factor * rtol, atol=factor * atol)


@pytest.mark.parametrize("build", BUILDS)
@given(
    n_tokens=st.integers(1, 20) | st.sampled_from([100]),
    n_in=st.integers(1, 300),
    n_out=st.integers(1, 90),
    bits=st.sampled_from([4, 8]),
    size=st.sampled_from([8, 16, 32, 64, 128, 256, 304]),
    has_offsets=st.booleans(),
    values=st.sampled_from([WHOLE, OTHER_VALUES]),
    dtype=DTYPES,
    has_bias=st.booleans(),
    has_residual=st.booleans(),
)
def test_is_the_product_with_the_dequantised_matrix(
    build: str,
    n_tokens: int,
    n_in: int,
    n_out: int,
    bits: Bits,
    size: int,
    has_offsets: bool,
    values: tuple[int, ...],
    dtype: torch.dtype,
    has_bias: bool,
    has_residual: bool,
) -> None:
    matrix = grouped(n_out, n_in, bits=bits, size=size, has_offsets=has_offsets, values=values)
    x = numbers(n_tokens, n_in, seed=2).to(dtype)
    bias = numbers(n_out, seed=3).to(dtype) if has_bias else None
    residual = numbers(n_tokens, n_out, seed=4).to(dtype) if has_residual else None
    expected = x.float() @ matrix.dequantised().t()
    if bias is not None:
        expected = expected + bias.float()
    if residual is not None:
        expected = expected + residual.float()
    packed = NativeGroupsWeight.of(matrix, dtype, BUILDS[build])
    assert packed.shape == (n_out, n_in)
    check_close(packed(x, bias, residual), expected)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_gates_apply_to_what_stands_beside_them(
    build: str, gate: Gate, bits: Bits, dtype: torch.dtype
) -> None:
    matrix = grouped(2 * 48, 130, bits=bits, size=32, has_offsets=True)
    x = numbers(5, 130, seed=2).to(dtype)
    gated = NativeGroupsGatedWeight.of(matrix, dtype, gate, BUILDS[build])
    expected = GATES[gate](x.float() @ matrix.dequantised().t())
    check_close(gated(x), expected, factor=3)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("n_out", [16, 21])
def test_a_gate_of_any_size_is_packed(gate: Gate, n_out: int) -> None:
    weight = numbers(2 * n_out, 64, seed=1) / 8
    x = numbers(3, 64, seed=2)
    expected = GATES[gate](x @ in_groups(weight, 4).dequantised().t())
    packed = pack_gated(weight, gate, "int4", "exact")
    check_close(gated_product(packed, x), expected, factor=3)


@pytest.mark.parametrize("build", BUILDS)
@given(
    n_in=st.integers(1, 300),
    n_out=st.integers(1, 90),
    bits=st.sampled_from([4, 8]),
    size=st.sampled_from([8, 32, 128, 304]),
    has_offsets=st.booleans(),
    dtype=DTYPES,
    data=st.data(),
)
def test_rows_are_those_of_the_dequantised_matrix_to_the_last_bit(
    build: str,
    n_in: int,
    n_out: int,
    bits: Bits,
    size: int,
    has_offsets: bool,
    dtype: torch.dtype,
    data: st.DataObject,
) -> None:
    drawn = data.draw(st.lists(st.integers(0, n_out - 1), max_size=6))
    indices = torch.tensor(drawn, dtype=torch.long)
    matrix = grouped(n_out, n_in, bits=bits, size=size, has_offsets=has_offsets)
    table = NativeGroupsWeight.of(matrix, torch.float32, BUILDS[build])
    assert torch.equal(table.rows(indices), matrix.dequantised()[indices])
    # In bfloat16 scales are float16, which is the finer of the two.
    rough = NativeGroupsWeight.of(matrix, torch.bfloat16, BUILDS[build]).rows(indices)
    torch.testing.assert_close(rough.float(), matrix.dequantised()[indices], rtol=2**-6, atol=1e-3)
    assert rough.dtype == torch.bfloat16


def test_a_row_that_is_not_there_is_refused() -> None:
    table = pack_table(torch.ones(5, 32), "int4")
    for index in (-1, 5):
        with pytest.raises(IndexError, match="rows of a matrix of 5"):
            table.rows(torch.tensor([0, index]))


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_token_has_the_same_bits_in_any_company(
    build: str, bits: Bits, dtype: torch.dtype
) -> None:
    for size, n_in in ((32, 300), (128, 1000), (8, 40)):
        matrix = grouped(70, n_in, bits=bits, size=size, has_offsets=True)
        packed = NativeGroupsWeight.of(matrix, dtype, BUILDS[build])
        x = numbers(45, n_in, seed=2).to(dtype)
        whole = packed(x)
        for first, n in ((0, 1), (3, 1), (5, 2), (9, 3), (1, 4), (20, 9), (7, 17), (2, 40)):
            assert torch.equal(packed(x[first : first + n]), whole[first : first + n])


@pytest.mark.parametrize("build", BUILDS)
def test_many_tokens_are_summed_in_several_passes(build: str) -> None:
    matrix = grouped(40, 3000, bits=4, size=64, has_offsets=True)
    x = numbers(200, 3000, seed=2)
    packed = NativeGroupsWeight.of(matrix, torch.float32, BUILDS[build])
    check_close(packed(x), x @ matrix.dequantised().t(), factor=3)
    assert packed(x[:0]).shape == (0, 40)


def test_scales_that_float16_has_not_are_kept() -> None:
    matrix = grouped(8, 64, bits=4, size=32, has_offsets=False)
    for factor, dtype, expected in (
        (1.0, torch.bfloat16, torch.float16),
        (1.0, torch.float32, torch.float32),
        (1e-7, torch.bfloat16, torch.float32),
        (1e9, torch.bfloat16, torch.float32),
    ):
        scaled = GroupedMatrix(matrix.form, matrix.numbers, matrix.scales * factor)
        assert scaled.scale_type(dtype) == expected
        packed = NativeGroupsWeight.of(scaled, dtype)
        x = numbers(2, 64, seed=2).to(dtype)
        expected_sums = x.float() @ scaled.dequantised().t()
        torch.testing.assert_close(packed(x).float(), expected_sums, rtol=2**-6, atol=factor * 1e-2)
    exact = GroupedMatrix(matrix.form, matrix.numbers, matrix.scales.half().float())
    assert exact.scale_type(torch.float32) == torch.float16


def test_inputs_of_other_sizes_and_types_are_refused() -> None:
    packed = pack(torch.ones(3, 40), "int4")
    with pytest.raises(ValueError, match=r"inputs \[2, 41\] for a weight of 40 inputs"):
        packed(torch.ones(2, 41))
    with pytest.raises(ValueError, match=r"torch\.float32 and torch\.bfloat16 in one product"):
        packed(torch.ones(2, 40), torch.ones(3, dtype=torch.bfloat16))


class TestJoined:
    """Matrices that become one."""

    def check(self, *parts: GroupedMatrix) -> GroupedMatrix:
        whole = joined(parts)
        expected = torch.cat([part.dequantised() for part in parts])
        assert torch.equal(whole.dequantised(), expected)
        x = numbers(3, whole.shape[1], seed=2)
        packed = NativeGroupsWeight.of(whole, torch.float32)
        check_close(packed(x), x @ expected.t())
        return whole

    def test_of_one_form_they_keep_it(self) -> None:
        parts = [grouped(n, 96, bits=4, size=32, has_offsets=False) for n in (5, 7)]
        assert self.check(*parts).form == parts[0].form

    def test_of_other_bits_groups_and_offsets_they_have_the_finest(self) -> None:
        whole = self.check(
            grouped(5, 96, bits=4, size=32, has_offsets=True),
            grouped(9, 96, bits=8, size=16, has_offsets=False),
            grouped(3, 96, bits=4, size=96, has_offsets=False),
        )
        assert (whole.form.bits, whole.form.size) == (8, 16)

    def test_one_scale_for_each_output_joins_any_groups(self) -> None:
        whole = self.check(
            grouped(5, 100, bits=4, size=100, has_offsets=False),
            grouped(9, 100, bits=4, size=24, has_offsets=False),
        )
        assert whole.form.size == 24

    def test_other_values_become_numbers_of_eight_bits(self) -> None:
        parts = (
            grouped(5, 64, bits=4, size=32, has_offsets=False),
            grouped(5, 64, bits=4, size=32, has_offsets=False, values=OTHER_VALUES),
        )
        assert self.check(*parts).form.bits == 8
        assert self.check(parts[1], parts[1]).form == parts[1].form


class TestQuantised:
    """Plain matrices that become numbers when they are loaded."""

    @pytest.mark.parametrize("n_in", [31, 64, 1000])
    def test_an_error_is_a_small_part_of_a_group(self, n_in: int) -> None:
        weight = numbers(50, n_in, seed=1)
        bounds: dict[Bits, float] = {4: 0.095, 8: 0.007}
        for bits, largest in bounds.items():
            error = (in_groups(weight, bits).dequantised() - weight).norm() / weight.norm()
            assert 0 < error < largest

    def test_four_bits_are_better_than_the_largest_weight_at_the_end(self) -> None:
        weight = numbers(50, 640, seed=1)
        groups = weight.view(50, -1, 32)
        scales = groups.gather(2, groups.abs().argmax(2, keepdim=True)) / -8
        plain = (groups / scales).round().clamp(-8, 7) * scales
        ours = in_groups(weight, 4).dequantised()
        assert (ours - weight).norm() < 0.95 * (plain.view(50, -1) - weight).norm()

    def test_zeros_stay_zeros_and_whole_numbers_whole(self) -> None:
        weight = torch.zeros(3, 64)
        weight[1] = torch.arange(64) % 16 - 8
        assert torch.equal(in_groups(weight, 4).dequantised(), weight)
        assert torch.equal(in_groups(weight[:1], 8).dequantised(), weight[:1])

    @pytest.mark.parametrize("quantization", ["int4", "int8"])
    @pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
    def test_an_output_that_is_not_finite_has_no_finite_results(
        self, bad: float, quantization: Quantization
    ) -> None:
        weight = torch.ones(3, 256)
        weight[1, 140] = bad
        is_finite = pack(weight, quantization)(torch.ones(2, 256)).isfinite()
        assert is_finite.tolist() == [[True, False, True]] * 2

    def test_a_group_that_is_not_finite_spoils_no_other(self) -> None:
        weight = torch.ones(1, 256)
        weight[0, 140] = torch.nan
        is_finite = in_groups(weight, 4).dequantised().isfinite()
        assert is_finite.view(-1, 32).all(1).tolist() == [group != 4 for group in range(8)]

    def test_memory_is_what_is_promised(self) -> None:
        weight = numbers(256, 1024, seed=1).bfloat16()
        for quantization, share in (("int8", 8.125 / 16), ("int4", 4.5 / 16)):
            assert pack_table(weight, quantization).nbytes == share * weight.nbytes  # type: ignore[arg-type]

    def test_it_can_be_computed_wherever_the_library_is(self) -> None:
        assert can_compute("int4", CPU)
        assert can_compute("int8", CPU)
        assert not can_compute("int4", torch.device("meta"))
