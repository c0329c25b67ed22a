"""Steps of programs: what the native library computes, and what is refused before it runs."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from kernels import native_ops
from kernels.native.checks import check
from kernels.packed_linear import pack, pack_gated
from kernels.program import Program
from kernels.steps import Expert, Gated, RMSNormPart, Route

HIDDEN, N_EXPERTS, N_CHOSEN = 16, 8, 2


@dataclass
class Batch:
    """A batch for layers without attention."""

    positions: torch.Tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n_tokens", [1, 3, 700])
@pytest.mark.parametrize(("first", "size"), [(0, 23), (0, 16), (3, 17), (22, 1)])
def test_a_part_of_a_row_is_normalised_alone(
    first: int, size: int, n_tokens: int, dtype: torch.dtype
) -> None:
    ops = native_ops()
    if ops is None:
        pytest.skip("no native kernels")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n_tokens, 23, generator=generator).to(dtype)
    weight = torch.randn(size, generator=generator)
    program = Program(dtype)
    hidden = program.take_in(23)
    program.rms_norm_part(hidden, first, weight, 1e-5)
    program.end_layers(hidden)
    assert ops.fuse_layers is not None
    fused = ops.fuse_layers(program)
    assert fused is not None
    batch: Any = Batch(torch.zeros(n_tokens, dtype=torch.int64))
    expected = x.clone()
    part = expected[:, first : first + size]
    part.copy_(ops.rms_norm(part, weight, 1e-5))
    n_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(fused(x, batch, []), expected)
    finally:
        torch.set_num_threads(n_threads)


@pytest.mark.parametrize("first", [-1, 8])
def test_a_part_that_leaves_its_row_is_refused(first: int) -> None:
    program = Program(torch.float32)
    program.rms_norm_part(program.take_in(HIDDEN), first, torch.ones(9), 1e-5)
    with pytest.raises(ValueError, match="9 elements"):
        check(program)


def test_a_part_needs_a_weight_for_each_element() -> None:
    program = Program(torch.float32)
    x = program.take_in(HIDDEN)
    program.steps.append(RMSNormPart(x, 0, 8, torch.ones(9), 1e-5))
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
def test_scores_of_experts_that_are_not_there_are_refused(n_experts: int) -> None:
    ops = native_ops()
    if ops is None:
        pytest.skip("no native kernels")
    gate_up = pack_gated(torch.zeros(128, HIDDEN), "silu", ops.silu_and_mul)
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
