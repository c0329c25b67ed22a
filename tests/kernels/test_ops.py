"""Every operation that works token by token against its reference, on odd sizes."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels import Ops, ops_for, reference

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [1, 7, 16, 33]


@pytest.fixture(name="ops", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def make_ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    """The operations of a device, which is where the test's tensors are made."""
    torch.manual_seed(0)
    with torch.device(request.param) as device:
        yield ops_for(device)


def assert_close(ours: Tensor, expected: Tensor) -> None:
    """Equal up to a few roundings of the element type."""
    tolerance = 1e-5 if expected.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


def test_a_device_without_kernels_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'meta'"):
        ops_for(torch.device("meta"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_tokens", SIZES)
def test_rms_norm(ops: Ops, n_tokens: int, dtype: torch.dtype) -> None:
    x, weight = 3 * torch.randn(n_tokens, 35, dtype=dtype), torch.randn(35, dtype=dtype)
    x[0] = 0  # the epsilon matters only here
    assert_close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


def test_rms_norm_of_bfloat16_is_closer_to_exact_than_the_reference(ops: Ops) -> None:
    x, weight = torch.randn(64, 96).bfloat16(), torch.randn(96).bfloat16()
    exact = reference.rms_norm(x.float(), weight.float(), 1e-5)
    ours = ops.rms_norm(x, weight, 1e-5).float() - exact
    theirs = reference.rms_norm(x, weight, 1e-5).float() - exact
    assert 0 < ours.abs().mean() <= theirs.abs().mean()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_tokens", SIZES)
@pytest.mark.parametrize("head_dim", [2, 10, 64])
def test_rotary(ops: Ops, n_tokens: int, head_dim: int, dtype: torch.dtype) -> None:
    # Heads cut out of a wider row, as queries and keys are cut out of the fused projection.
    x = torch.randn(n_tokens, 5, head_dim, dtype=dtype)[:, :3]
    angles = 6 * torch.rand(n_tokens, 1, head_dim // 2)
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    turned = ops.rotary(x, cos, sin)
    assert_close(turned, reference.rotary(x, cos, sin))
    assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert not torch.equal(turned, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_tokens", SIZES)
def test_silu_and_mul(ops: Ops, n_tokens: int, dtype: torch.dtype) -> None:
    gate_up = 4 * torch.randn(n_tokens, 2 * 19, dtype=dtype)
    before = gate_up.clone()
    assert_close(ops.silu_and_mul(gate_up), reference.silu_and_mul(gate_up))
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_tokens", SIZES)
def test_gelu_and_mul(ops: Ops, n_tokens: int, dtype: torch.dtype) -> None:
    gate_up = 4 * torch.randn(n_tokens, 2 * 19, dtype=dtype)
    before = gate_up.clone()
    assert_close(ops.gelu_and_mul(gate_up), reference.gelu_and_mul(gate_up))
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_tokens", SIZES)
def test_layer_norm(ops: Ops, n_tokens: int, dtype: torch.dtype) -> None:
    x = 3 * torch.randn(n_tokens, 35, dtype=dtype) + 1
    weight, bias = torch.randn(2, 35, dtype=dtype)
    x[0] = 0  # the epsilon matters only here
    expected = reference.layer_norm(x, weight, bias, 1e-5)
    assert_close(ops.layer_norm(x, weight, bias, 1e-5), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_tokens", SIZES)
@pytest.mark.parametrize(("n_experts", "n_chosen"), [(5, 2), (3, 3), (40, 1)])
def test_expert_mlp(
    ops: Ops, n_experts: int, n_chosen: int, n_tokens: int, dtype: torch.dtype
) -> None:
    x = torch.randn(n_tokens, 12, dtype=dtype)
    gate_up = torch.randn(n_experts, 2 * 7, 12, dtype=dtype) / 4
    down = torch.randn(n_experts, 12, 7, dtype=dtype) / 4
    scores = torch.rand(n_tokens, n_experts)
    scores[:, 1] = 0  # where there are enough others, one is chosen by nobody
    weights, experts = scores.topk(n_chosen)
    ours = ops.expert_mlp(x, gate_up, down, experts, weights)
    assert_close(ours, reference.expert_mlp(x, gate_up, down, experts, weights))
    assert ours.abs().max() > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_tokens", SIZES)
def test_write_kv(ops: Ops, n_tokens: int, dtype: torch.dtype) -> None:
    rows = torch.randn(n_tokens, 7, 6, dtype=dtype)
    k, v = rows[:, 1:4], rows[:, 4:]  # [n_tokens, 3, 6], not contiguous
    slots = torch.randperm(15 * 5)[:n_tokens]
    ours = torch.randn(2, 15, 5, 3, 6, dtype=dtype)
    expected = ours.clone()
    ops.write_kv(k, v, ours[0], ours[1], slots)
    reference.write_kv(k, v, expected[0], expected[1], slots)
    assert torch.equal(ours, expected)
