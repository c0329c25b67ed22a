"""Steps of programs: what the native library and the interpreter compute, and what is refused."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import TORCH, AttentionForm, DeltaNetForm, Ops, StateSpans, native_ops
from kernels.forms.routing import RoutingForm
from kernels.native.checks import check
from kernels.ops import LayerKV
from kernels.packing.heads import pack_heads
from kernels.packing.linear import pack, pack_gated
from kernels.program import Program
from kernels.pytorch.interpreter import Interpreter
from kernels.steps import Buffer, Expert, Gated, Heads, RMSNormPart, Route

HIDDEN, N_EXPERTS, N_CHOSEN = 16, 8, 2
HEADS, PLAIN = Heads(n_heads=2, n_kv_heads=1, head_dim=8), AttentionForm()
IN_GROUPS = RoutingForm(
    n_chosen=8, is_softmax=True, normalises=True, factor=1.0, n_groups=4, n_chosen_groups=2
)
STATES = DeltaNetForm(
    n_key_heads=1,
    n_value_heads=1,
    key_dim=8,
    value_dim=8,
    conv=torch.ones(2, 24) / 4,
    decay_rate=-torch.ones(1),
    step_bias=torch.ones(1),
    norm=torch.ones(8),
    eps=1e-5,
)


@dataclass
class Batch:
    """A batch for layers without attention."""

    positions: Tensor
    states: StateSpans | None
    ranks: Any = None

    def of_groups(self) -> Sequence[Any]:
        return [self]


@pytest.fixture(name="library")
def native() -> Ops:
    """The native operations."""
    ops = native_ops()
    if ops is None:
        pytest.skip("no native kernels")
    return ops


@pytest.fixture(name="ops", params=[None, Interpreter], ids=["library", "interpreter"])
def in_both_ways(library: Ops, request: pytest.FixtureRequest) -> Ops:
    """The native operations, which run programs by the library or by the interpreter."""
    return library if request.param is None else replace(library, run_program=request.param)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def computed(
    ops: Ops,
    describe: Callable[[Program, Buffer], Buffer],
    x: Tensor,
    positions: Tensor | None = None,
    kv: Sequence[LayerKV] = (),
    states: StateSpans | None = None,
) -> Tensor:
    """What a program makes of hidden states `x`, which stay as they are, on two threads."""
    program = Program(x.dtype)
    program.end_layers(describe(program, program.take_in(x.shape[1])))
    runner = ops.runner(program)
    places = torch.zeros(len(x), dtype=torch.int64) if positions is None else positions
    batch: Any = Batch(places, states)
    n_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        return runner(x.clone(), batch, kv)
    finally:
        torch.set_num_threads(n_threads)


@DTYPES
@pytest.mark.parametrize("n_tokens", [1, 3, 700])
@pytest.mark.parametrize(
    ("first", "size", "n"), [(0, 23, 1), (0, 16, 1), (3, 17, 1), (22, 1, 1), (2, 5, 4), (1, 1, 9)]
)
def test_parts_of_a_row_are_normalised_alone(
    ops: Ops, first: int, size: int, n: int, n_tokens: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n_tokens, 23, generator=generator).to(dtype)
    weight = torch.randn(size, generator=generator)

    def describe(to: Program, hidden: Buffer) -> Buffer:
        to.rms_norm_parts(hidden, first, weight, 1e-5, n=n)
        return hidden

    expected = x.clone()
    parts = expected[:, first : first + n * size].view(n_tokens, n, size)
    parts.copy_(ops.rms_norm(parts, weight, 1e-5))
    assert torch.equal(computed(ops, describe, x), expected)


@DTYPES
@pytest.mark.parametrize("n_tokens", [1, 3, 700])
def test_the_first_elements_are_scaled_by_position(
    ops: Ops, n_tokens: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n_tokens, 40, generator=generator).to(dtype)
    factors = torch.randn(5, generator=generator).to(dtype)
    positions = torch.randint(15, (n_tokens,), generator=generator)

    def describe(to: Program, hidden: Buffer) -> Buffer:
        to.scale_by_position(hidden, 21, factors, 3)
        return hidden

    expected = x.clone()
    expected[:, :21] *= factors[positions // 3, None]
    assert torch.equal(computed(ops, describe, x, positions), expected)
    positions[-1] = 15
    with pytest.raises(IndexError, match=r"1 tokens or positions|out of bounds|out of range"):
        computed(ops, describe, x, positions)


def test_queries_that_are_scaled_whole_are_dense() -> None:
    """Queries lie among keys and values before; attention may depend on that in its last bits."""
    program = Program(torch.float32)
    x = program.take_in(4)
    program.scale_by_position(x, 4, torch.tensor([2.0, 3.0]), 2)
    program.end_layers(x)
    batch: Any = Batch(torch.arange(3), None)
    scaled = TORCH.runner(program)(torch.ones(3, 7)[:, :4], batch, ())
    assert scaled.is_contiguous()
    assert torch.equal(scaled, torch.tensor([2.0, 2.0, 3.0])[:, None].expand(3, 4))


@DTYPES
@pytest.mark.parametrize("n_tokens", [1, 3, 700])
def test_parts_of_rows_are_copied_multiplied_and_widened(
    ops: Ops, n_tokens: int, dtype: torch.dtype
) -> None:
    x = torch.randn(n_tokens, 60, generator=torch.Generator().manual_seed(0)).to(dtype)

    def describe(to: Program, hidden: Buffer) -> Buffer:
        product = to.mul(to.take_part(hidden, 3, 35), hidden, 21)
        to.copy_part(product, 30, 5, hidden, 55)
        return hidden

    expected = x.clone()
    expected[:, 55:] = (x[:, 3:38] * x[:, 21:56])[:, 30:]
    assert torch.equal(computed(ops, describe, x), expected)
    wide = computed(ops, lambda to, hidden: to.widened(hidden), x)
    assert wide.dtype == torch.float32
    assert torch.equal(wide, x.float())


@pytest.mark.parametrize(
    ("describe", "match"),
    [
        (lambda to, x: to.copy_part(x, 9, 8, x, 0), "8 elements from 9"),
        (lambda to, x: to.copy_part(x, 0, 8, x, 9), "8 elements from 9"),
        (lambda to, x: to.copy_part(x, 0, 8, to.buffer(8, torch.float64), 0), "float64"),
        (lambda to, x: to.mul(to.buffer(8), x, 9), "8 elements from 9"),
        (lambda to, x: to.mul(to.buffer(16, torch.bfloat16), x), "in one product"),
        (lambda to, x: to.sigmoid_and_mul(x, to.buffer(8), 9), "gates from 9"),
        (lambda to, x: to.scale_by_position(x, 17, torch.ones(2), 4), "17 elements"),
        (lambda to, x: to.scale_by_position(x, 8, torch.ones(2).bfloat16(), 4), "bfloat16"),
        (lambda to, x: to.turn_heads(x, x, n_heads=4, rotary=0, size=6), "of which 6 turn"),
        (lambda to, x: to.turn_heads(x, x, n_heads=3, rotary=0, size=4), "3 heads in 16"),
        (
            lambda to, x: to.multiply_heads(pack_heads(torch.ones(4, 8, 5)), x, to.buffer(32)),
            "of heads in 16",
        ),
        (
            lambda to, x: to.multiply_heads(
                pack_heads(torch.ones(4, 8, 4).bfloat16()), x, to.buffer(32)
            ),
            "bfloat16",
        ),
        (lambda to, x: to.attend(x, HEADS, PLAIN, None, layer=0, n_shared=9), "values of 9"),
        (lambda to, x: to.route_in_groups(x, replace(IN_GROUPS, n_groups=3)), "16 experts"),
        (lambda to, x: to.route_in_groups(x, replace(IN_GROUPS, n_chosen=9)), "16 experts"),
        (lambda to, x: to.route_in_groups(x, replace(IN_GROUPS, bias=torch.ones(15))), "bias"),
        (lambda to, x: to.delta_net(x, STATES, layer=0), "16 elements for a form of 34"),
        (
            lambda to, x: to.delta_net(
                to.buffer(34), replace(STATES, norm=torch.ones(8).bfloat16()), layer=0
            ),
            "norm",
        ),
    ],
)
def test_steps_that_the_library_would_misread_are_refused(
    library: Ops, describe: Callable[[Program, Buffer], object], match: str
) -> None:
    program = Program(torch.float32)
    describe(program, program.take_in(HIDDEN))
    with pytest.raises(ValueError, match=match):
        check(program)


@DTYPES
def test_calls_read_and_write_buffers(ops: Ops, dtype: torch.dtype) -> None:
    def parted(x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, :3] + 1, x[:, 3:].float() - 1

    def doubled(x: Tensor) -> Tensor:
        return x.mul_(2)

    def describe(to: Program, hidden: Buffer) -> Buffer:
        first, second = to.buffer(3), to.buffer(2, torch.float32)
        to.call("parts", parted, (hidden,), first, second)
        to.scale(hidden, 0.5)
        to.call("a part in place", doubled, (first,), first)
        to.call("joined", lambda *each: torch.cat(each, 1).to(dtype), (first, second), hidden)
        return hidden

    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = torch.cat(((x[:, :3] + 1) * 2, (x[:, 3:].float() - 1).to(dtype)), 1)
    assert torch.equal(computed(ops, describe, x), expected)


def test_a_step_of_an_unknown_kind_is_refused(ops: Ops) -> None:
    program = Program(torch.float32)
    hidden = program.take_in(HIDDEN)
    program.steps.append(hidden)
    program.end_layers(hidden)
    with pytest.raises(TypeError, match="cannot be run: Buffer"):
        ops.runner(program)


class TestStates:
    """A layer that keeps states, alone in a program."""

    def storage(self) -> LayerKV:
        return torch.zeros(2, 1, 24), torch.zeros(2, 1, 8, 8)

    def spans(self) -> StateSpans:
        return StateSpans(*torch.tensor([[0, 2], [2, 3], [1, 0], [0, 0]]))

    def computed(self, ops: Ops, storage: LayerKV, spans: StateSpans | None) -> Tensor:
        x = torch.randn(5, 34, generator=torch.Generator().manual_seed(0))
        return computed(
            ops, lambda to, x: to.delta_net(x, STATES, layer=0), x, None, [storage], spans
        )

    def test_is_computed_as_well(self, ops: Ops) -> None:
        ours, theirs = self.storage(), self.storage()
        x = torch.randn(5, 34, generator=torch.Generator().manual_seed(0))
        expected = ops.delta_net(x, *theirs, self.spans(), STATES)
        assert torch.equal(self.computed(ops, ours, self.spans()), expected)
        assert all(map(torch.equal, ours, theirs))

    def test_storage_of_other_forms_is_refused(self, library: Ops) -> None:
        inputs, states = self.storage()
        wrong = [
            (inputs.bfloat16(), states),
            (inputs, states.bfloat16()),
            (inputs[..., :23], states),
            (inputs, states[..., :7]),
            (inputs[:1], states),
        ]
        for storage in wrong:
            with pytest.raises(ValueError, match="with 24 channels"):
                self.computed(library, storage, self.spans())

    def test_a_batch_without_states_is_refused(self, ops: Ops) -> None:
        with pytest.raises(ValueError, match="does not say where the states"):
            self.computed(ops, self.storage(), None)


@pytest.mark.parametrize("first", [-1, 8])
def test_a_part_that_leaves_its_row_is_refused(first: int) -> None:
    program = Program(torch.float32)
    program.rms_norm_parts(program.take_in(HIDDEN), first, torch.ones(9), 1e-5)
    with pytest.raises(ValueError, match="9 elements"):
        check(program)


def test_a_part_needs_a_weight_for_each_element() -> None:
    program = Program(torch.float32)
    x = program.take_in(HIDDEN)
    program.steps.append(RMSNormPart(x, 0, 1, 8, torch.ones(9), 1e-5))
    with pytest.raises(ValueError, match="need 8 elements"):
        check(program)


def routed() -> tuple[Program, Route]:
    program = Program(torch.float32)
    program.route(program.take_in(N_EXPERTS), N_CHOSEN, normalises=True)
    step = program.steps.pop()
    assert isinstance(step, Route)
    return program, step


def test_a_sound_choice_of_experts_is_taken() -> None:
    program, step = routed()
    program.steps.append(step)
    check(program)


@pytest.mark.parametrize("n_chosen", [0, N_EXPERTS + 1])
def test_as_many_experts_are_chosen_as_there_are(n_chosen: int) -> None:
    program, step = routed()
    program.route(step.scores, n_chosen, normalises=True)
    with pytest.raises(ValueError, match=f"{n_chosen} experts of {N_EXPERTS}"):
        check(program)


@pytest.mark.parametrize(
    ("field", "width", "dtype"),
    [
        ("experts", N_CHOSEN, torch.float32),
        ("weights", N_CHOSEN, torch.bfloat16),
        ("weights", N_CHOSEN - 1, torch.float32),
        ("scores", N_EXPERTS, torch.int64),
    ],
)
def test_a_choice_that_the_library_would_misread_is_refused(
    field: str, width: int, dtype: torch.dtype
) -> None:
    program, step = routed()
    wrong: dict[str, Any] = {field: program.buffer(width, dtype)}
    program.steps.append(replace(step, **wrong))
    with pytest.raises(ValueError, match=r"experts of|scores of"):
        check(program)


@pytest.mark.parametrize("n_experts", [N_EXPERTS, N_EXPERTS - 1])
def test_scores_of_experts_that_are_not_there_are_refused(library: Ops, n_experts: int) -> None:
    gate_up = pack_gated(torch.zeros(128, HIDDEN), "silu")
    expert = Expert(Gated.of(gate_up), pack(torch.zeros(HIDDEN, 64)), None)
    program, step = routed()
    program.steps.append(step)
    x = program.buffer(HIDDEN)
    program.run_experts([expert] * n_experts, x, step.experts, step.weights)
    if n_experts == N_EXPERTS:
        check(program)
        return
    with pytest.raises(ValueError, match="8 scores for 7 experts"):
        check(program)
