"""Operations on a CPU give a token the same bits in any company.

Attention of a sequence is computed whole, and then again as any span in any batch. Other operations
work row by row (`tests.kernels.rows`).
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import AttentionForm, HeadNorms, Ops
from kernels.forms.routing import RoutingForm
from kernels.native import groups, heads, linear
from kernels.native.library import open_library, runnable
from kernels.native.operations import ops_of
from kernels.packing import linear as packed_linear
from kernels.packing.experts import pack_experts
from kernels.packing.heads import pack_heads
from kernels.packing.linear import pack, pack_gated
from kernels.upload import uploads_for
from kernels.weights.gated_in_two import GatedMatrix
from kernels.weights.linear import Clamp, LinearWeight, Quantization
from tests.kernels.gated import gated as gated_product
from tests.kernels.gated import mixed
from tests.kernels.implementations import BUILDS, CPU
from tests.kernels.rows import N_THREADS, Draws, check_rows, threads

pytestmark = pytest.mark.skipif(not runnable(), reason="the native library is not built")

DTYPES = [torch.float32, torch.bfloat16]
HEAD_DIMS = [8, 16, 33, 64, 64, 80, 96, 128]
QUANTIZATIONS: tuple[Quantization, ...] = ("none", "int8", "int4")


_CACHED = (linear._functions, linear._int8_functions, heads._functions)


@pytest.fixture(name="build", params=BUILDS)
def use_build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ops]:
    """The operations of one build, whose linear layers `pack` picks, too."""
    library = open_library(request.param)
    for module in (groups, heads, linear):
        monkeypatch.setattr(module, "library", lambda: library)
    caches = (
        groups._functions,
        heads._functions,
        linear._functions,
        linear._int8_functions,
        packed_linear._int8_forms,
    )
    for cached in caches:
        cached.cache_clear()
    yield ops_of(library)
    for cached in caches:
        cached.cache_clear()


Span = tuple[int, int, int]  # sequence, start, tokens


@dataclass(frozen=True)
class Sequences:
    """Random queries, keys and values of sequences, stored in blocks anywhere."""

    queries: Sequence[Tensor]  # [length, n_heads, head_dim] each
    keys: Tensor
    values: Tensor
    tables: Sequence[Sequence[int]]

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        *,
        n_kv_heads: int,
        group_size: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        value_dim: int | None = None,
    ) -> "Sequences":
        """With `value_dim` values are as many first elements of keys."""
        generator = torch.Generator().manual_seed(sum(lengths))
        n_blocks = [-(-length // block_size) for length in lengths]
        ids = torch.randperm(sum(n_blocks), generator=generator).tolist()
        shape = (sum(n_blocks), block_size, n_kv_heads, head_dim)
        keys, values = torch.randn(2, *shape, generator=generator).to(dtype)
        if value_dim is not None:
            values = keys[..., :value_dim]
        n_heads = n_kv_heads * group_size
        queries = [
            torch.randn(length, n_heads, head_dim, generator=generator).to(dtype)
            for length in lengths
        ]
        return cls(queries, keys, values, [[ids.pop() for _ in range(n)] for n in n_blocks])

    def attention(self, ops: Ops, form: AttentionForm, spans: Sequence[Span]) -> Sequence[Tensor]:
        """The attention of each span in a batch of `spans`."""
        tables = np.zeros((len(spans), max(len(self.tables[i]) for i, _, _ in spans)), np.int64)
        for row, (i, _, _) in zip(tables, spans, strict=True):
            row[: len(self.tables[i])] = self.tables[i]
        q = torch.cat([self.queries[i][start : start + n] for i, start, n in spans])
        uploads = uploads_for(CPU)
        plan = ops.plan_attention(
            np.array([start for _, start, _ in spans]),
            np.array([n for _, _, n in spans]),
            block_tables=tables,
            key_caches=[self.keys],
            n_heads=q.shape[1],
            windows=(form.window,),
            uploads=uploads,
        )
        uploads.flush()
        attended = ops.attention(q, self.keys, self.values, plan, form)
        return torch.split(attended, [n for _, _, n in spans])


def check_attention(
    ops: Ops, seed: int, *, head_dims: Sequence[int] = HEAD_DIMS, has_latents: bool = False
) -> None:
    """Draws sequences and batches by `seed`; all heads attend to latents, or none do."""
    chance = random.Random(seed)
    form = AttentionForm(
        window=chance.choice([None, None, 7, 64, 100, 300]), soft_cap=chance.choice([None, 2.0])
    )
    lengths = [chance.choice([5, 40, 130, 300, 700, 1300]) for _ in range(chance.randint(1, 4))]
    n_kv_heads = chance.choice([1, 2, 4])
    group_size, head_dim = chance.choice([1, 2, 3, 4, 7]), chance.choice(head_dims)
    value_dim = None
    if has_latents:
        n_kv_heads, group_size = 1, chance.choice([1, 5, 16, 100])
        head_dim, value_dim = chance.choice([(80, 64), (33, 20), (24, 16), (576, 512)])
    sequences = Sequences.of(
        lengths,
        n_kv_heads=n_kv_heads,
        group_size=group_size,
        head_dim=head_dim,
        value_dim=value_dim,
        block_size=chance.choice([1, 4, 16]),
        dtype=chance.choice(DTYPES),
    )
    with threads(1):
        whole = [sequences.attention(ops, form, [(i, 0, n)])[0] for i, n in enumerate(lengths)]
    for _ in range(4):
        spans = []
        for i in chance.sample(range(len(lengths)), chance.randint(1, len(lengths))):
            n = chance.choice([1, 1, chance.randint(1, min(lengths[i], 14)), lengths[i]])
            n = chance.choice([n, chance.randint(1, lengths[i])])
            spans.append((i, chance.randint(0, lengths[i] - n), n))
        with threads(chance.choice(N_THREADS)):
            attended = sequences.attention(ops, form, spans)
        for (i, start, n), ours in zip(spans, attended, strict=True):
            assert torch.equal(ours, whole[i][start : start + n]), (form, lengths, spans, i)


@pytest.mark.parametrize("seed", range(12))
def test_attention_of_any_span_is_that_of_the_whole_sequence(build: Ops, seed: int) -> None:
    check_attention(build, seed)


@pytest.mark.parametrize("head_dim", [256, 512])
def test_attention_of_large_heads(build: Ops, head_dim: int) -> None:
    check_attention(build, head_dim, head_dims=[head_dim])


@pytest.mark.parametrize("seed", range(6))
def test_attention_of_any_span_to_latents(build: Ops, seed: int) -> None:
    check_attention(build, seed, has_latents=True)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(6, 20))
def test_attention_of_many_more_spans_to_latents(build: Ops, seed: int) -> None:
    check_attention(build, seed, has_latents=True)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(12, 48))
def test_attention_of_many_more_spans(build: Ops, seed: int) -> None:
    check_attention(build, seed)


def _product(form: LinearWeight, x: Tensor, bias: Tensor, residual: Tensor, rows: Tensor) -> Tensor:
    return form(x[rows], bias, residual[rows])


def _gated(build: Ops, matrix: GatedMatrix, x: Tensor, rows: Tensor) -> Tensor:
    return gated_product(matrix, x[rows], build)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n_in", "n_out"), [(64, 64), (51, 75), (1030, 130)])
def test_products_of_a_token(build: Ops, n_in: int, n_out: int, dtype: torch.dtype) -> None:
    torch.manual_seed(n_in)
    x, weight = torch.randn(200, n_in).to(dtype), torch.randn(n_out, n_in).to(dtype)
    bias, residual = torch.randn(n_out).to(dtype), torch.randn(200, n_out).to(dtype)
    for quantization in QUANTIZATIONS:
        form = pack(weight, quantization)
        check_rows(partial(_product, form, x, bias, residual), 200)
        matrix = pack_gated(weight[: n_out // 2 * 2], "gelu_tanh", quantization)
        check_rows(partial(_gated, build, matrix, x), 200)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n_in", "n_out"), [(128, 512), (9, 20), (51, 75)])
def test_products_of_a_tokens_heads(build: Ops, n_in: int, n_out: int, dtype: torch.dtype) -> None:
    torch.manual_seed(n_in)
    x, weight = torch.randn(200, 5, n_in).to(dtype), torch.randn(5, n_out, n_in).to(dtype)
    form = pack_heads(weight)
    assert isinstance(form, heads.NativeHeads)
    check_rows(lambda rows: form(x[rows]), 200)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_among_the_tokens_of_its_experts(build: Ops, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x = torch.randn(90, 52).to(dtype)
    gate_up, down = torch.randn(6, 2 * 40, 52).to(dtype), torch.randn(6, 52, 40).to(dtype)
    weights, experts = torch.rand(90, 6).softmax(-1).topk(3)
    matrices = pack_experts(gate_up, down)
    check_rows(lambda rows: mixed(matrices, x[rows], experts[rows], weights[rows], build), 90)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [48, 75, 1030])
def test_norms_and_activations_of_a_token(build: Ops, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    x, weight, bias = torch.randn(90, size).to(dtype), torch.randn(size), torch.randn(size)
    for call in (
        lambda rows: build.rms_norm(x[rows], weight, 1e-5),
        lambda rows: build.layer_norm(x[rows], weight, bias, 1e-5),
        lambda rows: build.gelu(x[rows]),
        lambda rows: build.gelu_tanh(x[rows]),
        lambda rows: build.silu_and_mul(x[rows, : size // 2 * 2]),
        lambda rows: build.gelu_and_mul(x[rows, : size // 2 * 2]),
        lambda rows: build.clamp_and_mul(x[rows, : size // 2 * 2], Clamp(1.7, 0.9)),
        lambda rows: build.sigmoid_and_mul(x[rows, :1], x[rows]),
        lambda rows: build.add_scaled(x[rows], x[rows].flip(1), 0.3),
        lambda rows: build.soft_cap(x[rows], 30.0),
        # PyTorch's, of which families make use.
        lambda rows: torch.tanh(x[rows].float() / 30),
        lambda rows: x[rows].float().softmax(-1),
    ):
        check_rows(call, 90)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_chosen", [1, 2, 3, 8, 10])
def test_chosen_experts_of_a_token(build: Ops, n_chosen: int, dtype: torch.dtype) -> None:
    scores = torch.randn(90, 67, generator=torch.Generator().manual_seed(1)).to(dtype)
    for normalises in (True, False):
        for part in (0, 1):  # weights and experts
            check_rows(partial(_routed, build, scores, n_chosen, normalises, part), 90)


@pytest.mark.parametrize("is_softmax", [False, True], ids=["sigmoid", "softmax"])
def test_experts_of_a_token_that_are_chosen_in_groups(build: Ops, is_softmax: bool) -> None:
    logits = torch.randn(90, 72, generator=torch.Generator().manual_seed(1))
    form = RoutingForm(
        n_chosen=6,
        is_softmax=is_softmax,
        normalises=True,
        factor=2.5,
        n_groups=8,
        n_chosen_groups=3,
        n_best=2,
        bias=torch.randn(72, generator=torch.Generator().manual_seed(2)),
    )
    check_rows(lambda rows: build.route_in_groups(logits[rows], form)[0], 90)
    check_rows(lambda rows: build.route_in_groups(logits[rows], form)[1], 90)


def _routed(
    build: Ops, scores: Tensor, n_chosen: int, normalises: bool, part: int, rows: Tensor
) -> Tensor:
    return build.route(scores[rows], n_chosen, normalises)[part]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_turned_and_normalised_heads_of_a_token(build: Ops, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    n, head_dim = 90, 20
    qkv = torch.randn(n, 5 * head_dim).to(dtype)
    cos, sin = torch.randn(2, n, 1, head_dim).to(dtype)
    norms = HeadNorms(torch.randn(head_dim), torch.randn(head_dim), 1e-6)

    def turned(rows: Tensor) -> Tensor:
        keys, values = torch.zeros(2, len(rows), 1, 1, head_dim, dtype=dtype)
        q = build.rotary_write_kv(
            qkv[rows], cos[rows], sin[rows], keys, values, torch.arange(len(rows)), 3, norms
        )
        return torch.cat([q, keys[:, 0], values[:, 0]], 1)

    check_rows(turned, n)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [199, 4000])
def test_draws_of_a_row(build: Ops, vocab_size: int, dtype: torch.dtype) -> None:
    check_rows(Draws(90, vocab_size, dtype).sampled_by(build), 90)


def test_the_check_of_rows_finds_what_depends_on_company() -> None:
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    with pytest.raises(AssertionError):
        check_rows(lambda rows: x[rows] - x[rows].mean(), 200)
    check_rows(partial(torch.index_select, x, 0), 200)
