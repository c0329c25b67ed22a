"""Steps that write a part of each row, and the joining of such steps into one.

Latent attention, for example, writes a product to the first elements of each head of a buffer and
rotated elements to the other elements. On a GPU, a separate copy for each part would cost a launch
per part. So `joined` finds neighbouring steps whose parts together fill the rows. It replaces these
steps by one step that computes all parts and then concatenates them with one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from kernels.pytorch.frame import NOTHING, Frame, in_heads
from kernels.steps import Buffer, CopyPart, MultiplyHeads, RMSNormPart, TurnHeads, buffers_of

PartStep = RMSNormPart | TurnHeads | MultiplyHeads | CopyPart


@dataclass(frozen=True, slots=True)
class RowPart:
    """The elements [first, end) of each head of each row of the buffer `out`. A row has `n_heads`
    heads of equal size."""

    out: Buffer
    n_heads: int
    first: int
    end: int

    @property
    def head_size(self) -> int:
        """Number of elements of a head."""
        return self.out.width // self.n_heads


@dataclass(frozen=True, slots=True)
class WritePart:
    """A step that writes a part of each row of a buffer, and the function that computes that
    part."""

    place: RowPart
    buffers: tuple[Buffer, ...]  # the buffers that the step reads or writes
    step: PartStep
    compute: Callable[[Any, Frame], Tensor]


@dataclass(frozen=True, slots=True)
class JoinParts:
    """A step that computes several parts, which together fill the rows of `out`. `parts` are in the
    order in which they lie in a row."""

    out: Buffer
    buffers: tuple[Buffer, ...]  # the buffers that the parts' steps read or write
    parts: tuple[WritePart, ...]

    @property
    def is_copied(self) -> bool:
        """Whether the parts must be copied into new rows. This is needed if several parts are
        concatenated, or if the only part is a view of other rows."""
        return len(self.parts) > 1 or isinstance(self.parts[0].step, CopyPart)


def joined(steps: Sequence[object]) -> Iterator[object]:
    """Yields steps that compute the results of `steps`.

    Neighbouring steps whose parts together fill rows are replaced by one `JoinParts`. Every other
    step that writes a part of rows is replaced by a `WritePart`.
    """
    neighbours: list[PartStep] = []
    for step in steps:
        if not isinstance(step, PartStep) or not _goes_with(neighbours, step):
            yield from _at_once(neighbours)
            neighbours = []
        if isinstance(step, PartStep):
            neighbours.append(step)
        else:
            yield step
    yield from _at_once(neighbours)


def write_part(part: WritePart, at: Frame) -> None:
    """Computes a part of each row and writes it into its buffer. Creates the rows if the buffer has
    none."""
    computed, place = part.compute(part.step, at), part.place
    index = place.out.index
    if at.rows[index] is NOTHING:
        at.rows[index] = computed.new_empty(len(computed), place.out.width)
    heads = in_heads(at.rows[index], place.n_heads)
    heads[..., place.first : place.end].copy_(computed)


def join_parts(whole: JoinParts, at: Frame) -> None:
    """Computes all parts of each row, concatenates them, and stores the complete rows in the
    frame."""
    computed = [part.compute(part.step, at) for part in whole.parts]
    rows = torch.cat(computed, -1) if whole.is_copied else computed[0]
    at.rows[whole.out.index] = rows.flatten(1)


def _goes_with(neighbours: Sequence[PartStep], step: PartStep) -> bool:
    """Returns whether `step` can be joined with `neighbours`. All of these steps must write
    different parts of the heads of one buffer, and `step` must not read parts that `neighbours`
    write."""
    place, others = place_of(step), [place_of(each) for each in neighbours]
    return all(
        (other.out, other.n_heads) == (place.out, place.n_heads)
        and (other.end <= place.first or place.end <= other.first)
        for other in others
    ) and not (others and isinstance(step, CopyPart | MultiplyHeads) and step.x == step.out)


def _at_once(neighbours: Sequence[PartStep]) -> Iterator[JoinParts | WritePart]:
    """Yields one `JoinParts` if the parts of `neighbours` together fill rows. Otherwise yields a
    `WritePart` for each of `neighbours`."""
    parts = [_part(step) for step in neighbours]
    in_order = tuple(sorted(parts, key=lambda part: part.place.first))
    places = [part.place for part in in_order]
    if places and sum(each.end - each.first for each in places) == places[0].head_size:
        buffers = tuple(buffer for part in in_order for buffer in part.buffers)
        yield JoinParts(places[0].out, buffers, in_order)
    else:
        yield from parts


def _part(step: PartStep) -> WritePart:
    compute = compute_part.dispatch(type(step))
    return WritePart(place_of(step), tuple(buffers_of(step)), step, compute)


@singledispatch
def place_of(step: Any) -> RowPart:
    """Returns the part of rows that a step writes. Raises TypeError for a step that writes whole
    rows."""
    raise TypeError(f"{type(step).__name__} writes no part of a row")


@place_of.register
def _(step: RMSNormPart) -> RowPart:
    return RowPart(step.x, 1, step.first, step.first + step.n * step.size)


@place_of.register
def _(step: TurnHeads) -> RowPart:
    head_size = step.out.width // step.n_heads
    return RowPart(step.out, step.n_heads, head_size - step.cos.width, head_size)


@place_of.register
def _(step: MultiplyHeads) -> RowPart:
    n_heads, n_out, _ = step.weight.shape
    return RowPart(step.out, n_heads, 0, n_out)


@place_of.register
def _(step: CopyPart) -> RowPart:
    return RowPart(step.out, 1, step.out_first, step.out_first + step.size)


@singledispatch
def compute_part(step: Any, at: Frame) -> Tensor:
    """Returns the elements of the part that a step writes, [n_tokens, n_heads, size]. For a
    `CopyPart` the result is a view of the source rows."""
    raise TypeError(f"{type(step).__name__} writes no part of a row")


@compute_part.register
def _(step: RMSNormPart, at: Frame) -> Tensor:
    x = at.rows[step.x.index][:, step.first : step.first + step.n * step.size]
    if step.n > 1:
        x = in_heads(x, step.n)
    normed = at.ops.rms_norm(x, step.weight, step.eps)
    return normed.view(len(x), 1, step.n * step.size)


@compute_part.register
def _(step: TurnHeads, at: Frame) -> Tensor:
    cos, sin = at.rows[step.cos.index], at.rows[step.sin.index]
    heads = in_heads(at.rows[step.x.index], step.n_heads)
    return at.ops.rotary(heads[..., -step.cos.width :], cos, sin)


@compute_part.register
def _(step: MultiplyHeads, at: Frame) -> Tensor:
    n_heads, _, n_in = step.weight.shape
    heads = in_heads(at.rows[step.x.index], n_heads)
    return step.weight(heads[..., :n_in])


@compute_part.register
def _(step: CopyPart, at: Frame) -> Tensor:
    return at.rows[step.x.index][:, None, step.first : step.first + step.size]
