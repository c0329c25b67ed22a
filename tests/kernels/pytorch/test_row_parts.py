"""Steps that write parts of rows: which are joined, and that it makes no difference."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import TORCH
from kernels.program import Program
from kernels.pytorch.frame import Frame
from kernels.pytorch.heads import PlainHeads
from kernels.pytorch.row_parts import JoinParts, WritePart, joined
from kernels.pytorch.step_functions import run_step
from kernels.steps import Buffer, CopyPart, MultiplyHeads, RMSNormPart, TurnHeads
from tests.worker.programs import batch_of

N_TOKENS, N_HEADS = 3, 2


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


WEIGHT = random(3)
PRODUCTS = PlainHeads(random(N_HEADS, 4, 5))
COS, SIN = random(N_TOKENS, 1, 4), random(N_TOKENS, 1, 4)


class Angles:
    """Angles of a kind that has no tables."""

    angles = None

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return COS[positions], SIN[positions]

    def cover(self, positions: Tensor) -> None:
        """Nothing is to be covered."""


def latent_keys(to: Program, x: Buffer) -> Buffer:
    """The first elements are normalised and the last ones turn."""
    to.rms_norm_parts(x, 0, WEIGHT, 1e-5, n=4)
    to.turn_heads(x, x, n_heads=1, rotary=0, size=4)
    return x


def latent_queries(to: Program, x: Buffer) -> Buffer:
    """Each head has products and turned elements."""
    out = to.buffer(N_HEADS * 8)
    to.multiply_heads(PRODUCTS, x, out)
    to.turn_heads(x, out, n_heads=N_HEADS, rotary=0, size=4)
    return out


def copies(to: Program, x: Buffer) -> Buffer:
    """The end before the beginning."""
    out = to.buffer(16)
    to.copy_part(x, 0, 6, out, 10)
    to.copy_part(x, 6, 10, out, 0)
    return out


def a_part(to: Program, x: Buffer) -> Buffer:
    """Rows that must be no view of `x`, which changes afterwards."""
    out = to.take_part(x, 3, 12)
    to.scale(x, 2.0)
    return out


def heads_that_turn(to: Program, x: Buffer) -> Buffer:
    """All elements turn."""
    to.turn_heads(x, x, n_heads=4, rotary=0, size=4)
    return x


def some_norms(to: Program, x: Buffer) -> Buffer:
    """Some elements stay as they are."""
    to.rms_norm_parts(x, 0, WEIGHT, 1e-5)
    to.rms_norm_parts(x, 3, WEIGHT, 1e-5, n=2)
    return x


def twice(to: Program, x: Buffer) -> Buffer:
    """Parts overlap."""
    to.rms_norm_parts(x, 0, WEIGHT, 1e-5, n=5)
    to.rms_norm_parts(x, 13, WEIGHT, 1e-5)
    return x


def shifted(to: Program, x: Buffer) -> Buffer:
    """The second copy reads what the first one has written."""
    to.copy_part(x, 0, 8, x, 8)
    to.copy_part(x, 8, 8, x, 0)
    return x


DESCRIPTIONS = pytest.mark.parametrize(
    ("describe", "kinds"),
    [
        (latent_keys, [JoinParts]),
        (latent_queries, [JoinParts]),
        (copies, [JoinParts]),
        (heads_that_turn, [JoinParts]),
        (some_norms, [WritePart] * 2),
        (twice, [WritePart] * 2),
        (shifted, [WritePart] * 2),
    ],
)


def program_of(describe: Callable[[Program, Buffer], Buffer]) -> Program:
    program = Program(torch.float32, [Angles()])
    program.end_layers(describe(program, program.take_in(16)))
    return program


@DESCRIPTIONS
def test_parts_that_fill_rows_are_joined(
    describe: Callable[[Program, Buffer], Buffer], kinds: list[type]
) -> None:
    steps = [type(step) for step in joined(program_of(describe).steps)]
    assert [kind for kind in steps if kind in (JoinParts, WritePart)] == kinds


def by_hand(step: Any, frame: Frame) -> None:
    """Writes a part element by element of a row."""
    rows, index = frame.rows, step.x.index
    for token in range(N_TOKENS):
        row = rows[index][token]
        if isinstance(step, RMSNormPart):
            for i in range(step.n):
                first = step.first + i * step.size
                part = row[first : first + step.size].clone()
                scale = (part.square().mean() + step.eps).rsqrt()
                row[first : first + step.size] = part * scale * step.weight
        elif isinstance(step, CopyPart):
            part = row[step.first : step.first + step.size].clone()
            rows[step.out.index][token, step.out_first : step.out_first + step.size] = part
        elif isinstance(step, MultiplyHeads):
            for head, matrix in enumerate(PRODUCTS.weight):
                out = rows[step.out.index][token, head * 8 :][:4]
                out.copy_(matrix @ row[head * 8 :][:5])
        else:
            cos, sin = COS[token, 0], SIN[token, 0]
            n, of_head = step.n_heads, step.x.width // step.n_heads
            for head in range(n):
                part = row[(head + 1) * of_head - 4 : (head + 1) * of_head].clone()
                end = (head + 1) * step.out.width // n
                turned = part * cos + part.roll(2) * sin
                rows[step.out.index][token, end - 4 : end] = turned


@pytest.mark.parametrize(
    "describe",
    [latent_keys, latent_queries, copies, a_part, heads_that_turn, some_norms, twice, shifted],
)
def test_parts_of_rows_are_what_they_are_by_hand(
    describe: Callable[[Program, Buffer], Buffer],
) -> None:
    program, x = program_of(describe), random(N_TOKENS, 16)
    frame = Frame.of(program, TORCH, x.clone(), batch_of(N_TOKENS), ())
    frame.rows[1:] = [torch.zeros(N_TOKENS, buffer.width) for buffer in program.buffers[1:]]
    for step in program.steps:
        if isinstance(step, RMSNormPart | CopyPart | MultiplyHeads | TurnHeads):
            by_hand(step, frame)
        else:
            run_step(step, frame)
    assert program.hidden is not None
    result = TORCH.runner(program)(x.clone(), batch_of(N_TOKENS), ())
    torch.testing.assert_close(result, frame.rows[program.hidden.index])
