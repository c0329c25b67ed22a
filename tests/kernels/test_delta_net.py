"""Gated DeltaNet of spans against the reference, which computes whole sequences head by head."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels import DeltaNetForm, Ops, StateSpans
from kernels.native.library import open_library, runnable
from kernels.native.operations import ops_of
from kernels.reference import operations as reference
from tests.kernels.implementations import BUILDS, IMPLEMENTATIONS, Implementation
from tests.kernels.rows import N_THREADS, threads

DTYPES = [torch.float32, torch.bfloat16]

# Key heads, value heads, sizes of their elements, and the tokens that a convolution sees.
SHAPES = [(2, 4, 10, 7, 4), (1, 1, 16, 32, 2), (3, 3, 5, 33, 1), (1, 3, 33, 70, 3)]


@pytest.fixture(name="ops", params=IMPLEMENTATIONS)
def make_ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    """The operations of an implementation; the test's tensors are made on its device."""
    implementation: Implementation = request.param
    torch.manual_seed(0)
    with implementation.device:
        yield implementation.ops


def random_form(shape: Sequence[int]) -> DeltaNetForm:
    n_key_heads, n_value_heads, key_dim, value_dim, kernel_size = shape
    n_channels = 2 * n_key_heads * key_dim + n_value_heads * value_dim
    return DeltaNetForm(
        n_key_heads=n_key_heads,
        n_value_heads=n_value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv=torch.randn(kernel_size, n_channels),
        decay_rate=-torch.rand(n_value_heads) - 0.05,
        step_bias=torch.randn(n_value_heads),
        norm=torch.randn(value_dim),
        eps=1e-5,
    )


def width(form: DeltaNetForm) -> int:
    return form.n_channels + form.n_out + 2 * form.n_value_heads


@dataclass
class Rows:
    """What a layer keeps of requests; their rows hold what others have left there."""

    inputs: Tensor
    states: Tensor

    @classmethod
    def of(cls, form: DeltaNetForm, n_rows: int, dtype: torch.dtype) -> "Rows":
        inputs = torch.full((n_rows, form.kernel_size - 1, form.n_channels), torch.nan, dtype=dtype)
        return cls(
            inputs,
            torch.full((n_rows, form.n_value_heads, form.key_dim, form.value_dim), torch.nan),
        )


Span = tuple[int, int, int]  # sequence, start, tokens


def run(
    ops: Ops, sequences: Sequence[Tensor], rows: Rows, spans: Sequence[Span], form: DeltaNetForm
) -> Sequence[Tensor]:
    """The output of each span, in a batch of them; a sequence has the row of its number."""
    counts = [n for _, _, n in spans]
    firsts = [sum(counts[:i]) for i in range(len(counts))]
    columns = StateSpans(
        torch.tensor(firsts),
        torch.tensor(counts),
        torch.tensor([i for i, _, _ in spans]),
        torch.tensor([start for _, start, _ in spans]),
    )
    projected = torch.cat([sequences[i][start : start + n] for i, start, n in spans])
    before = projected.clone()
    out = ops.delta_net(projected, rows.inputs, rows.states, columns, form)
    assert torch.equal(projected, before)
    return torch.split(out, counts)


def cut(length: int, chance: random.Random) -> list[int]:
    """Lengths of spans that make up a sequence."""
    spans: list[int] = []
    while sum(spans) < length:
        spans.append(min(chance.choice([1, 1, 2, 5, 17]), length - sum(spans)))
    return spans


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_spans_of_sequences_in_any_batch(
    ops: Ops, shape: Sequence[int], dtype: torch.dtype
) -> None:
    chance, form = random.Random(1), random_form(shape)
    lengths = [1, 2, 23, 9]
    sequences = [torch.randn(n, width(form)).to(dtype) for n in lengths]
    rows = Rows.of(form, len(lengths), dtype)
    left = [cut(n, chance) for n in lengths]
    starts, outs = [0] * len(lengths), [list[Tensor]() for _ in lengths]
    while any(left):
        ready = [i for i, spans in enumerate(left) if spans]
        chosen = chance.sample(ready, chance.randint(1, len(ready)))
        spans = [(i, starts[i], left[i].pop(0)) for i in chosen]
        for (i, _, n), out in zip(spans, run(ops, sequences, rows, spans, form), strict=True):
            starts[i] += n
            outs[i].append(out)
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    for i, sequence in enumerate(sequences):
        expected, inputs, state = reference.delta_net(sequence, form)
        torch.testing.assert_close(torch.cat(outs[i]), expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(rows.inputs[i], inputs)
        torch.testing.assert_close(rows.states[i], state, rtol=1e-4, atol=1e-5)


def test_gates_at_their_limits(ops: Ops) -> None:
    form = random_form(SHAPES[0])
    sequence = torch.randn(6, width(form))
    gates = sequence[:, form.n_channels + form.n_out :].view(6, 2, form.n_value_heads)
    gates[:, 0], gates[:, 1] = torch.randn(6, 1) * 200, torch.randn(6, 1) * 200
    rows = Rows.of(form, 1, torch.float32)
    (out,) = run(ops, [sequence], rows, [(0, 0, 6)], form)
    expected, _, _ = reference.delta_net(sequence, form)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gate_size", [19, 1])
def test_sigmoid_and_mul(ops: Ops, dtype: torch.dtype, gate_size: int) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for n_tokens in (0, 1, 7, 33):
        # The gates are cut out of a wider row, as those of attention are.
        gate, x = (
            4 * torch.randn(n_tokens, 30, dtype=dtype)[:, 5:][:, :gate_size],
            torch.randn(n_tokens, 19, dtype=dtype),
        )
        expected = reference.sigmoid_and_mul(gate, x)
        torch.testing.assert_close(
            ops.sigmoid_and_mul(gate, x), expected, rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 4, 64, 64, 4)], ids=str)
def test_a_token_has_the_same_bits_in_any_span_and_batch(
    build: str, shape: Sequence[int], dtype: torch.dtype
) -> None:
    torch.manual_seed(2)
    ops, form, chance = ops_of(open_library(build)), random_form(shape), random.Random(2)
    lengths = [70, 1, 33]
    sequences = [torch.randn(n, width(form)).to(dtype) for n in lengths]
    whole = Rows.of(form, len(lengths), dtype)
    with threads(1):
        expected = [run(ops, sequences, whole, [(i, 0, n)], form)[0] for i, n in enumerate(lengths)]
    rows = Rows.of(form, len(lengths), dtype)
    left, starts = [cut(n, chance) for n in lengths], [0] * len(lengths)
    while any(left):
        ready = [i for i, spans in enumerate(left) if spans]
        chosen = chance.sample(ready, chance.randint(1, len(ready)))
        spans = [(i, starts[i], left[i].pop(0)) for i in chosen]
        with threads(chance.choice(N_THREADS)):
            outs = run(ops, sequences, rows, spans, form)
        for (i, start, n), out in zip(spans, outs, strict=True):
            assert torch.equal(out, expected[i][start : start + n])
            starts[i] += n
    assert torch.equal(rows.inputs, whole.inputs)
    assert torch.equal(rows.states, whole.states)


@pytest.mark.skipif(not runnable(), reason="the native library is not built")
@pytest.mark.parametrize("gate_size", [37, 1])
def test_a_gate_has_the_same_bits_in_any_company(gate_size: int) -> None:
    torch.manual_seed(3)
    ops = ops_of(open_library(runnable()[0]))
    gate, x = torch.randn(30, gate_size), torch.randn(30, 37)
    whole = ops.sigmoid_and_mul(gate, x)
    for n in (1, 2, 3, 17):
        assert torch.equal(ops.sigmoid_and_mul(gate[:n], x[:n]), whole[:n])
