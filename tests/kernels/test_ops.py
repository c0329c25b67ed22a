"""Every operation that works token by token against its reference, on odd sizes."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor

from kernels import HeadNorms, Ops, ops_for
from kernels.forms.experts import ExpertForm
from kernels.forms.routing import RoutingForm
from kernels.reference import operations as reference
from kernels.weights.linear import Clamp, Gate
from tests.kernels.implementations import IMPLEMENTATIONS, Implementation

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [1, 7, 16, 33]


@pytest.fixture(name="ops", params=IMPLEMENTATIONS)
def make_ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    """The operations of an implementation; the test's tensors are made on its device."""
    implementation: Implementation = request.param
    torch.manual_seed(0)
    with implementation.device:
        yield implementation.ops


def assert_close(ours: Tensor, expected: Tensor, case: str = "") -> None:
    """Equal up to a few roundings of the element type."""
    tolerance = 1e-5 if expected.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        ours, expected, rtol=tolerance, atol=tolerance, msg=lambda why: f"{case}\n{why}"
    )


def test_a_device_without_kernels_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'meta'"):
        ops_for(torch.device("meta"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(ops: Ops, dtype: torch.dtype) -> None:
    for n_tokens in SIZES:
        x, weight = 3 * torch.randn(n_tokens, 35, dtype=dtype), torch.randn(35, dtype=dtype)
        x[0] = 0  # the epsilon matters only here
        expected = reference.rms_norm(x, weight, 1e-5)
        assert_close(ops.rms_norm(x, weight, 1e-5), expected, f"{n_tokens} tokens")


def test_rms_norm_of_bfloat16_is_closer_to_exact_than_the_reference(ops: Ops) -> None:
    x, weight = torch.randn(64, 96).bfloat16(), torch.randn(96).bfloat16()
    exact = reference.rms_norm(x.float(), weight.float(), 1e-5)
    ours = ops.rms_norm(x, weight, 1e-5).float() - exact
    theirs = reference.rms_norm(x, weight, 1e-5).float() - exact
    assert 0 < ours.abs().mean() <= theirs.abs().mean()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [2, 10, 64])
def test_rotary(ops: Ops, head_dim: int, dtype: torch.dtype) -> None:
    for n_tokens in SIZES:
        # Heads cut out of a wider row, as queries and keys are cut out of the fused projection.
        x = torch.randn(n_tokens, 5, head_dim, dtype=dtype)[:, :3]
        angles = 6 * torch.rand(n_tokens, 1, head_dim // 2)
        cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
        sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
        turned = ops.rotary(x, cos, sin)
        assert_close(turned, reference.rotary(x, cos, sin), f"{n_tokens} tokens")
        assert_close(turned.norm(dim=-1), x.norm(dim=-1), f"{n_tokens} tokens")
        assert not torch.equal(turned, x), f"{n_tokens} tokens"


def test_heads_that_do_not_lie_side_by_side(ops: Ops) -> None:
    x = torch.randn(5, 4, 12)[:, 1:, 4:]
    cos, sin = torch.randn(2, 5, 1, 8)
    cos[..., :4], sin[..., :4] = cos[..., 4:], -sin[..., 4:]
    assert_close(ops.rotary(x, cos, sin), reference.rotary(x, cos, sin))
    k, v = x[:, :2], torch.randn(5, 2, 8)
    ours = torch.randn(2, 3, 5, 2, 8)
    expected = ours.clone()
    slots = torch.tensor([14, 0, 7, 3, 1])
    ops.write_kv(k, v, ours[0], ours[1], slots)
    reference.write_kv(k, v, expected[0], expected[1], slots)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_and_mul(ops: Ops, dtype: torch.dtype) -> None:
    for n_tokens in SIZES:
        gate_up = 4 * torch.randn(n_tokens, 2 * 19, dtype=dtype)
        before = gate_up.clone()
        expected = reference.silu_and_mul(gate_up)
        assert_close(ops.silu_and_mul(gate_up), expected, f"{n_tokens} tokens")
        assert torch.equal(gate_up, before), f"{n_tokens} tokens"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu(ops: Ops, dtype: torch.dtype) -> None:
    for n_tokens in SIZES:
        x = 4 * torch.randn(n_tokens, 19, dtype=dtype)
        before = x.clone()
        assert_close(ops.gelu(x), reference.gelu(x), f"{n_tokens} tokens")
        assert torch.equal(x, before), f"{n_tokens} tokens"


def test_gelu_of_large_numbers_is_all_or_nothing(ops: Ops) -> None:
    x = torch.tensor([[-1e30, -40.0, -0.0, 40.0, 1e30]])
    assert torch.equal(ops.gelu(x), torch.tensor([[0.0, 0.0, 0.0, 40.0, 1e30]]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_tanh(ops: Ops, dtype: torch.dtype) -> None:
    for n_tokens in SIZES:
        x = 4 * torch.randn(n_tokens, 19, dtype=dtype)
        before = x.clone()
        assert_close(ops.gelu_tanh(x), reference.gelu_tanh(x), f"{n_tokens} tokens")
        assert torch.equal(x, before), f"{n_tokens} tokens"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_and_mul(ops: Ops, dtype: torch.dtype) -> None:
    for n_tokens in SIZES:
        gate_up = 4 * torch.randn(n_tokens, 2 * 19, dtype=dtype)
        before = gate_up.clone()
        expected = reference.gelu_and_mul(gate_up)
        assert_close(ops.gelu_and_mul(gate_up), expected, f"{n_tokens} tokens")
        assert torch.equal(gate_up, before), f"{n_tokens} tokens"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_clamp_and_mul(ops: Ops, dtype: torch.dtype) -> None:
    for n_tokens in SIZES:
        gate_up = 4 * torch.randn(n_tokens, 2 * 19, dtype=dtype)
        before, clamp = gate_up.clone(), Clamp(1.7, 2.5)
        expected = reference.clamp_and_mul(gate_up, clamp)
        assert_close(ops.clamp_and_mul(gate_up, clamp), expected, f"{n_tokens} tokens")
        assert torch.equal(gate_up, before), f"{n_tokens} tokens"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sigmoid_and_mul(ops: Ops, dtype: torch.dtype) -> None:
    for n_tokens in SIZES:
        gates, x = 3 * torch.randn(n_tokens, 1, dtype=dtype), torch.randn(n_tokens, 19, dtype=dtype)
        expected = reference.sigmoid_and_mul(gates, x)
        assert_close(ops.sigmoid_and_mul(gates, x.clone()), expected, f"{n_tokens} tokens")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_scaled(ops: Ops, dtype: torch.dtype) -> None:
    for n_tokens, factor in product(SIZES, [1.0, 0.22]):
        x, y = torch.randn(2, n_tokens, 35, dtype=dtype)
        expected = reference.add_scaled(x, y, factor)
        assert_close(ops.add_scaled(x.clone(), y, factor), expected, f"{n_tokens} tokens")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_soft_cap(ops: Ops, dtype: torch.dtype) -> None:
    for n_tokens in SIZES:
        x = 5 * torch.randn(n_tokens, 35, dtype=dtype)
        before = x.clone()
        capped = ops.soft_cap(x, 3.0)
        assert capped.dtype == torch.float32
        assert_close(capped, reference.soft_cap(x, 3.0), f"{n_tokens} tokens")
        assert torch.equal(x, before), f"{n_tokens} tokens"


@pytest.mark.parametrize("normalises", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n_experts", "n_chosen"), [(5, 2), (3, 3), (128, 8), (33, 1)])
def test_route(
    ops: Ops, n_experts: int, n_chosen: int, dtype: torch.dtype, normalises: bool
) -> None:
    for n_tokens in SIZES:
        # All different, as far as they are: of equal ones any may be chosen.
        places = torch.rand(n_tokens, n_experts).argsort(-1)
        scores = (places.to(torch.get_default_dtype()) / 8 - 3).to(dtype)
        weights, experts = ops.route(scores, n_chosen, normalises)
        expected_weights, expected = reference.route(scores, n_chosen, normalises)
        assert experts.tolist() == expected.tolist(), f"{n_tokens} tokens"
        assert weights.dtype == torch.float32
        torch.testing.assert_close(
            weights, expected_weights.to(weights), rtol=1e-5, atol=1e-7, check_device=False
        )


@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("normalises", [False, True], ids=["", "normalised"])
@pytest.mark.parametrize("is_softmax", [False, True], ids=["sigmoid", "softmax"])
@pytest.mark.parametrize(
    ("n_groups", "n_chosen_groups", "n_best"), [(1, 1, 1), (4, 2, 1), (3, 2, 2), (12, 11, 3)]
)
def test_route_in_groups(
    ops: Ops,
    n_groups: int,
    n_chosen_groups: int,
    n_best: int,
    is_softmax: bool,
    normalises: bool,
    has_bias: bool,
) -> None:
    form = RoutingForm(
        n_chosen=5,
        is_softmax=is_softmax,
        normalises=normalises,
        factor=2.5,
        n_groups=n_groups,
        n_chosen_groups=n_chosen_groups,
        n_best=n_best,
        bias=torch.randn(36) if has_bias else None,
    )
    for n_tokens in SIZES:
        logits = 3 * torch.randn(n_tokens, 36)
        before = logits.clone()
        weights, experts = ops.route_in_groups(logits, form)
        expected_weights, expected = reference.route_in_groups(logits.cpu(), form)
        assert experts.tolist() == expected.tolist(), f"{n_tokens} tokens"
        assert_close(weights, expected_weights.to(weights), f"{n_tokens} tokens")
        assert torch.equal(logits, before), f"{n_tokens} tokens"


def test_scores_far_from_zero_are_their_limits(ops: Ops) -> None:
    form = RoutingForm(n_chosen=4, is_softmax=False, normalises=False, factor=1.0)
    weights, experts = ops.route_in_groups(torch.tensor([[-120.0, -1e4, 0.0, 120.0]]), form)
    assert experts.tolist()[0][:2] == [3, 2]
    assert_close(weights, torch.tensor([[1.0, 0.5, 0.0, 0.0]]))


def test_route_of_what_is_not_a_number_chooses_different_experts(ops: Ops) -> None:
    for wrong in (torch.nan, torch.inf, -torch.inf):
        scores = torch.randn(4, 9)
        scores[1, 7], scores[2] = wrong, wrong
        weights, experts = ops.route(scores, 4, True)
        assert all(len({*row}) == 4 and {*row} <= {*range(9)} for row in experts.tolist())
        assert weights[[0, 3]].isfinite().all()
        assert weights[2].isnan().all()
        assert weights[1].isnan().all() == (wrong != -torch.inf)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm(ops: Ops, dtype: torch.dtype) -> None:
    for n_tokens in SIZES:
        x = 3 * torch.randn(n_tokens, 35, dtype=dtype) + 1
        weight, bias = torch.randn(2, 35, dtype=dtype)
        x[0] = 0  # the epsilon matters only here
        expected = reference.layer_norm(x, weight, bias, 1e-5)
        assert_close(ops.layer_norm(x, weight, bias, 1e-5), expected, f"{n_tokens} tokens")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n_experts", "n_chosen"), [(5, 2), (3, 3), (40, 1)])
def test_expert_mlp(ops: Ops, n_experts: int, n_chosen: int, dtype: torch.dtype) -> None:
    for n_tokens in SIZES:
        x = torch.randn(n_tokens, 12, dtype=dtype)
        gate_up = torch.randn(n_experts, 2 * 7, 12, dtype=dtype) / 4
        down = torch.randn(n_experts, 12, 7, dtype=dtype) / 4
        scores = torch.rand(n_tokens, n_experts)
        scores[:, 1] = 0  # no token chooses it if there are enough others
        weights, experts = scores.topk(n_chosen)
        ours = ops.expert_mlp(x, gate_up, down, experts, weights)
        assert_close(
            ours, reference.expert_mlp(x, gate_up, down, experts, weights), f"{n_tokens} tokens"
        )
        assert ours.abs().max() > 0, f"{n_tokens} tokens"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("n_tokens", "n_experts", "n_chosen", "hidden", "size"),
    [(90, 4, 2, 64, 128), (130, 2, 1, 128, 36), (300, 3, 2, 20, 64)],
    ids=["some of each", "many of each", "many and more"],
)
def test_expert_mlp_of_many_tokens(
    ops: Ops,
    n_tokens: int,
    n_experts: int,
    n_chosen: int,
    hidden: int,
    size: int,
    dtype: torch.dtype,
) -> None:
    x = torch.randn(n_tokens, hidden, dtype=dtype)
    gate_up = torch.randn(n_experts, 2 * size, hidden, dtype=dtype) / hidden**0.5
    down = torch.randn(n_experts, hidden, size, dtype=dtype) / size**0.5
    weights, experts = torch.rand(n_tokens, n_experts).topk(n_chosen)
    ours = ops.expert_mlp(x, gate_up, down, experts, weights)
    assert_close(ours, reference.expert_mlp(x, gate_up, down, experts, weights))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("gate", "clamp"),
    [("silu", None), ("gelu_tanh", None), ("silu", Clamp(slope=1.702, limit=1.5))],
    ids=["silu", "gelu", "clamped"],
)
@pytest.mark.parametrize("biases", ["both", "inside", "outside"])
@pytest.mark.parametrize(("n_tokens", "hidden", "size"), [(1, 12, 7), (19, 20, 64), (90, 36, 33)])
def test_expert_mlp_of_other_forms(
    ops: Ops,
    n_tokens: int,
    hidden: int,
    size: int,
    biases: str,
    gate: Gate,
    clamp: Clamp | None,
    dtype: torch.dtype,
) -> None:
    x = torch.randn(n_tokens, hidden, dtype=dtype)
    gate_up = torch.randn(5, 2 * size, hidden, dtype=dtype) / hidden**0.5
    down = torch.randn(5, hidden, size, dtype=dtype) / size**0.5
    form = ExpertForm(
        None if biases == "outside" else torch.randn(5, 2 * size, dtype=dtype) / 4,
        None if biases == "inside" else torch.randn(5, hidden, dtype=dtype) / 4,
        clamp,
        gate,
    )
    weights, experts = torch.rand(n_tokens, 5).topk(2)
    ours = ops.expert_mlp(x, gate_up, down, experts, weights, form)
    assert_close(ours, reference.expert_mlp(x, gate_up, down, experts, weights, form))


@pytest.mark.parametrize("n_tokens", [1, 16, 17, 270])
@pytest.mark.parametrize("chosen", [0, 6])
def test_all_tokens_choose_the_same_expert(ops: Ops, n_tokens: int, chosen: int) -> None:
    x = torch.randn(n_tokens, 16)
    gate_up, down = torch.randn(7, 2 * 8, 16) / 4, torch.randn(7, 16, 8) / 4
    experts = torch.full((n_tokens, 1), chosen)
    weights = torch.rand(n_tokens, 1)
    ours = ops.expert_mlp(x, gate_up, down, experts, weights)
    assert_close(ours, reference.expert_mlp(x, gate_up, down, experts, weights))


def test_a_token_that_is_not_a_number_spoils_no_other(ops: Ops) -> None:
    x = torch.randn(20, 16)
    x[3] = torch.nan
    gate_up, down = torch.randn(3, 2 * 8, 16), torch.randn(3, 16, 8)
    weights, experts = torch.rand(20, 3).topk(2)
    is_spoiled = ops.expert_mlp(x, gate_up, down, experts, weights).isnan().any(1)
    assert is_spoiled.nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_write_kv(ops: Ops, dtype: torch.dtype) -> None:
    for n_tokens in SIZES:
        rows = torch.randn(n_tokens, 7, 6, dtype=dtype)
        k, v = rows[:, 1:4], rows[:, 4:]  # [n_tokens, 3, 6], not contiguous
        slots = torch.randperm(15 * 5)[:n_tokens]
        ours = torch.randn(2, 15, 5, 3, 6, dtype=dtype)
        expected = ours.clone()
        ops.write_kv(k, v, ours[0], ours[1], slots)
        reference.write_kv(k, v, expected[0], expected[1], slots)
        assert torch.equal(ours, expected), f"{n_tokens} tokens"


def test_slots_lie_beyond_what_32_bits_can_count(ops: Ops) -> None:
    n_heads, n_kv_heads, head_dim, block_size = 3, 2, 64, 16
    block = block_size * n_kv_heads * head_dim
    n_blocks = (2**31 + 2**20) // block
    # Never touched but at its end, so it takes no memory; values are a block behind the keys.
    storage = torch.empty((n_blocks + 1) * block, dtype=torch.bfloat16)
    keys, values = (
        storage[first : first + n_blocks * block].view(-1, block_size, n_kv_heads, head_dim)
        for first in (0, block)
    )
    slots = torch.tensor([n_blocks * block_size - 3, n_blocks * block_size - 2])
    k, v = torch.randn(2, 2, n_kv_heads, head_dim).bfloat16()
    ops.write_kv(k, v, keys, values, slots)
    assert torch.equal(keys[-1, -3:-1], k)
    assert torch.equal(values[-1, -3:-1], v)
    qkv = torch.randn(2, (n_heads + 2 * n_kv_heads) * head_dim).bfloat16()
    k, v = qkv.view(2, -1, head_dim)[:, n_heads:].clone().chunk(2, 1)
    cos, sin = torch.ones(2, 1, head_dim).bfloat16(), torch.zeros(2, 1, head_dim).bfloat16()
    ops.rotary_write_kv(qkv, cos, sin, keys, values, slots, n_heads)
    assert torch.equal(keys[-1, -3:-1], k)
    assert torch.equal(values[-1, -3:-1], v)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [2, 10, 64])
def test_rotary_write_kv(ops: Ops, head_dim: int, dtype: torch.dtype) -> None:
    for n_tokens in SIZES:
        n_heads, n_kv_heads = 5, 2
        qkv = torch.randn(n_tokens, (n_heads + 2 * n_kv_heads) * head_dim, dtype=dtype)
        heads = qkv.clone().view(n_tokens, -1, head_dim)
        q, k, v = heads[:, :n_heads], heads[:, n_heads:-n_kv_heads], heads[:, -n_kv_heads:]
        cos, sin = torch.randn(2, n_tokens, 1, head_dim, dtype=dtype)
        cos[..., head_dim // 2 :] = cos[..., : head_dim // 2]
        sin[..., head_dim // 2 :] = -sin[..., : head_dim // 2]
        slots = torch.randperm(15 * 5)[:n_tokens]
        ours = torch.randn(2, 15, 5, n_kv_heads, head_dim, dtype=dtype)
        expected = ours.clone()
        turned = ops.rotary_write_kv(qkv, cos, sin, ours[0], ours[1], slots, n_heads)
        turned_k = reference.rotary(k, cos, sin)
        reference.write_kv(turned_k, v, expected[0], expected[1], slots)
        assert_close(turned, reference.rotary(q, cos, sin), f"{n_tokens} tokens")
        assert_close(ours[0], expected[0], f"{n_tokens} tokens")
        assert torch.equal(ours[1], expected[1]), f"{n_tokens} tokens"


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=lambda dtype: f"weights of {dtype}")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [2, 10, 64, 96])
def test_rotary_write_kv_of_normal_heads(
    ops: Ops, head_dim: int, dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    for n_tokens in SIZES:
        n_heads, n_kv_heads = 5, 2
        heads = 3 * torch.randn(n_tokens, n_heads + 2 * n_kv_heads, head_dim, dtype=dtype)
        heads[0, 1] = heads[-1, n_heads] = 0  # the epsilon matters only here
        before = heads.clone()
        q, k, v = before[:, :n_heads], before[:, n_heads:-n_kv_heads], before[:, -n_kv_heads:]
        angles = 6 * torch.rand(n_tokens, 1, head_dim // 2)
        cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
        sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
        q_norm, k_norm = torch.randn(2, head_dim, dtype=weight_dtype)
        norms = HeadNorms(q_norm, k_norm, 1e-5)
        slots = torch.randperm(15 * 5)[:n_tokens]
        ours = torch.randn(2, 15, 5, n_kv_heads, head_dim, dtype=dtype)
        expected = ours.clone()
        turned = ops.rotary_write_kv(
            heads.flatten(1), cos, sin, ours[0], ours[1], slots, n_heads, norms
        )
        normal_q, normal_k = (
            reference.rms_norm(part.float(), weight.float(), norms.eps).to(dtype)
            for part, weight in ((q, norms.q), (k, norms.k))
        )
        reference.write_kv(reference.rotary(normal_k, cos, sin), v, expected[0], expected[1], slots)
        assert_close(turned, reference.rotary(normal_q, cos, sin), f"{n_tokens} tokens")
        assert_close(ours[0], expected[0], f"{n_tokens} tokens")
        assert torch.equal(ours[1], expected[1]), f"{n_tokens} tokens"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 40, 1100])
def test_embedding_of_a_share_of_the_vocabulary(ops: Ops, size: int, dtype: torch.dtype) -> None:
    shares = [(0, 90), (0, 30), (30, 30), (60, 30), (90, 0), (20, 1)]
    for (first, n_rows), n_tokens in product(shares, SIZES):
        table = torch.randn(n_rows, size, dtype=dtype)
        token_ids = torch.randint(90, (n_tokens,))
        token_ids[0], token_ids[-1] = first % 90, (first - 1) % 90  # at the edge, and beyond it
        ours = ops.embedding(table, token_ids, first)
        expected = reference.embedding(table, token_ids, first)
        assert torch.equal(ours, expected), f"{n_tokens} tokens, {n_rows} rows from {first}"


def test_embedding_in_a_table_of_more_elements_than_32_bits_can_count(ops: Ops) -> None:
    size = 1 << 16
    n_rows = (1 << 15) + 5
    # Never touched but at its end, so it takes no memory.
    table = torch.empty(n_rows, size, dtype=torch.bfloat16)
    table[-1] = torch.randn(size)
    ours = ops.embedding(table, torch.tensor([7 + n_rows - 1, 7 + n_rows]), 7)
    assert torch.equal(ours, torch.stack((table[-1], torch.zeros_like(table[-1]))))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "form", ["heads cut out of rows", "parts of heads", "columns", "one row", "rows of rows"]
)
def test_norms_of_what_lies_otherwise_in_memory(ops: Ops, form: str, dtype: torch.dtype) -> None:
    x = {
        "heads cut out of rows": torch.randn(5, 7, 20, dtype=dtype)[:, 2:5],
        "parts of heads": torch.randn(5, 7, 24, dtype=dtype)[:, 2:5, 4:],
        "columns": torch.randn(20, 6, dtype=dtype).t(),
        "one row": torch.randn(20, dtype=dtype),
        "rows of rows": torch.randn(2, 3, 4, 20, dtype=dtype)[:, 1:],
    }[form]
    weight, bias = torch.randn(2, 20, dtype=dtype)
    assert_close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    expected = reference.layer_norm(x, weight, bias, 1e-5)
    assert_close(ops.layer_norm(x, weight, bias, 1e-5), expected)


def test_layer_norm_of_what_lies_far_from_zero(ops: Ops) -> None:
    x = 1000 + torch.randn(3, 64)
    ours = ops.layer_norm(x, torch.ones(64), torch.zeros(64), 1e-5)
    exact = torch.nn.functional.layer_norm(x.double(), (64,))
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_of_what_is_cut_out_of_rows(ops: Ops, dtype: torch.dtype) -> None:
    gate_up = torch.randn(6, 60, dtype=dtype)[:, 12:44]
    assert_close(ops.silu_and_mul(gate_up), reference.silu_and_mul(gate_up))
    assert_close(ops.gelu_and_mul(gate_up), reference.gelu_and_mul(gate_up))
    assert_close(ops.silu_and_mul(gate_up.t()), reference.silu_and_mul(gate_up.t()))


def test_rms_norm_with_a_weight_of_float32(ops: Ops) -> None:
    x, weight = torch.randn(9, 35).bfloat16(), torch.randn(35)
    ours = ops.rms_norm(x, weight, 1e-5)
    assert ours.dtype == torch.bfloat16
    assert_close(ours, reference.rms_norm(x.float(), weight, 1e-5).bfloat16())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 5, 16, 1000, 32003])
def test_greedy_is_the_first_of_the_largest(ops: Ops, vocab_size: int, dtype: torch.dtype) -> None:
    # In bfloat16 many are equal. Rows are cut out of wider ones.
    logits = torch.randn(9, vocab_size + 3, dtype=dtype)[:, :vocab_size]
    logits[0] = -1e30
    tokens = ops.greedy(logits)
    assert tokens.dtype == torch.int64
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert tokens.tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_greedy_of_many_rows(ops: Ops, dtype: torch.dtype) -> None:
    logits = torch.randn(70, 8200, dtype=dtype)
    logits[5, 8199], logits[69, 4100] = torch.nan, torch.inf
    expected = [row.index(max(row)) for row in logits.tolist()]
    expected[5] = expected[69] = -1
    assert ops.greedy(logits).tolist() == expected
    assert ops.greedy(logits[:4].t().contiguous().t()).tolist() == expected[:4]


@pytest.mark.parametrize("place", [0, 9000, 19999])
def test_greedy_refuses_long_rows_with_numbers_that_are_none(ops: Ops, place: int) -> None:
    logits = torch.randn(2, 20000)
    logits[1, place] = -torch.inf
    assert ops.greedy(logits).tolist() == [logits[0].argmax().item(), -1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_greedy_refuses_rows_with_numbers_that_are_none(ops: Ops, dtype: torch.dtype) -> None:
    for place, wrong in product([0, 77, 99], [torch.nan, torch.inf, -torch.inf]):
        logits = torch.randn(3, 100, dtype=dtype)
        first, _, last = logits.argmax(-1).tolist()
        logits[1, place] = wrong
        assert ops.greedy(logits).tolist() == [first, -1, last], f"{wrong} at {place}"


def test_what_is_not_a_number_stays_so(ops: Ops) -> None:
    for dtype in DTYPES:
        gate_up = torch.full((1, 32), torch.nan, dtype=dtype)
        assert ops.silu_and_mul(gate_up).isnan().all()
        assert ops.rms_norm(gate_up, gate_up[0], 1e-5).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_of_large_numbers_are_finite(ops: Ops, dtype: torch.dtype) -> None:
    gate_up = torch.tensor([[-1e4, 1e4, -200.0, 90.0, 1, 1, 1, 1]], dtype=dtype)
    for gate in (ops.silu_and_mul, ops.gelu_and_mul):
        assert_close(gate(gate_up), torch.relu(gate_up[:, :4]))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_nothing_of_no_tokens(ops: Ops, dtype: torch.dtype) -> None:
    assert ops.silu_and_mul(torch.empty(0, 8, dtype=dtype)).shape == (0, 4)
    assert ops.rms_norm(torch.empty(0, 8, dtype=dtype), torch.ones(8, dtype=dtype), 0).numel() == 0
    assert ops.greedy(torch.empty(0, 8, dtype=dtype)).shape == (0,)


def test_experts_of_no_tokens(ops: Ops) -> None:
    gate_up, down = torch.ones(4, 2 * 8, 16), torch.ones(4, 16, 8)
    experts = torch.empty(0, 2, dtype=torch.int64)
    out = ops.expert_mlp(torch.empty(0, 16), gate_up, down, experts, torch.empty(0, 2))
    assert out.shape == (0, 16)
