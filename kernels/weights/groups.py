"""Quantised matrices: small whole numbers with a scale for each group of neighbouring inputs.

A weight is `value * scale + offset`. A number of eight bits is the value itself. A number of four
bits is the index of one of sixteen values, by default -8 to 7. All layouts of quantised checkpoints
can be converted to this form: a zero point or a minimum becomes an offset.

Here each number takes a byte, even a number of four bits. `kernels.native.groups` and
`kernels.triton.linear_groups` pack the numbers for products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Bits = Literal[4, 8]

WHOLE = tuple(range(-8, 8))
"""Default values of the sixteen four-bit numbers: -8 to 7."""

MULTIPLE = 8
"""The native library needs groups whose number of inputs is a multiple of this number, unless each
output has only one group."""

LONGEST = 128
"""For the native library, longer groups are split into groups of this number of inputs, where that
is possible."""

HALF_STEP = 2.0**-11
"""Largest relative error of rounding a number to float16."""


@dataclass(frozen=True, slots=True)
class GroupForm:
    """The meaning of the numbers of a quantised matrix, and the number of inputs that share a
    scale."""

    bits: Bits
    size: int  # inputs of a group; the last group may have fewer
    values: tuple[int, ...] = WHOLE  # the value of each number of four bits, in the range of int8
    rounds_inputs: bool = False  # whether products round inputs to int8, where the device can

    def n_groups(self, n_in: int) -> int:
        """Returns the number of groups of each output in a matrix with `n_in` inputs."""
        return -(-n_in // self.size)

    @property
    def can_round_inputs(self) -> bool:
        """Whether products with these numbers can round inputs to int8 and sum whole numbers. The
        numbers must have four bits and consecutive values."""
        first = self.values[0]
        return self.bits == 4 and self.values == tuple(range(first, first + len(self.values)))


@dataclass(frozen=True, slots=True)
class GroupedMatrix:
    """A matrix [n_out, n_in] that is quantised in groups of inputs."""

    form: GroupForm
    numbers: Tensor  # [n_out, n_in]: uint8 below 16 for four bits, int8 for eight bits
    scales: Tensor  # [n_out, n_groups] float32
    offsets: Tensor | None = None  # [n_out, n_groups] float32

    @property
    def shape(self) -> tuple[int, int]:
        """The sizes n_out and n_in."""
        n_out, n_in = self.numbers.shape
        return n_out, n_in

    def dequantised(self) -> Tensor:
        """Returns the matrix in float32, [n_out, n_in]."""
        groups = torch.arange(self.shape[1], device=self.numbers.device) // self.form.size
        weight = self.values().float() * self.scales[:, groups]
        return weight if self.offsets is None else weight + self.offsets[:, groups]

    def values(self) -> Tensor:
        """Returns the value that each number represents, [n_out, n_in] int8."""
        if self.form.bits == 8:
            return self.numbers
        table = torch.tensor(self.form.values, dtype=torch.int8, device=self.numbers.device)
        return table.index_select(0, self.numbers.flatten().int()).view(self.numbers.shape)

    def to(self, device: torch.device) -> GroupedMatrix:
        """Returns the matrix on `device`. Its tensors are copied only if they are on another
        device."""
        offsets = None if self.offsets is None else self.offsets.to(device)
        return replace(
            self,
            numbers=self.numbers.to(device),
            scales=self.scales.to(device),
            offsets=offsets,
        )

    def rows(self, order: Tensor | slice) -> GroupedMatrix:
        """Returns a matrix with the selected outputs. `order` has the indices of these outputs, in
        the order of the result."""
        offsets = None if self.offsets is None else self.offsets[order]
        return replace(
            self, numbers=self.numbers[order], scales=self.scales[order], offsets=offsets
        )

    def rounding_inputs(self) -> GroupedMatrix:
        """Returns the matrix with a form whose products round inputs to int8. If its numbers do not
        allow that, returns the matrix unchanged."""
        if not self.form.can_round_inputs:
            return self
        return replace(self, form=replace(self.form, rounds_inputs=True))

    def without_zeros(self) -> GroupedMatrix:
        """Returns the matrix without offsets if all offsets are zero. Otherwise returns the matrix
        unchanged."""
        return self if self.offsets is None or self.offsets.any() else replace(self, offsets=None)

    def in_groups_of(self, size: int) -> GroupedMatrix:
        """Returns the matrix with each group split into groups of `size` inputs.

        `size` must divide the present size of groups, unless each output has only one group.
        """
        if size == self.form.size:
            return self
        n_groups = -(-self.shape[1] // size)
        places = torch.arange(n_groups, device=self.scales.device) * size // self.form.size
        offsets = None if self.offsets is None else self.offsets[:, places]
        form = replace(self.form, size=size)
        return replace(self, form=form, scales=self.scales[:, places], offsets=offsets)

    def in_short_groups(self) -> GroupedMatrix:
        """Returns the matrix with long groups split into groups of `LONGEST` inputs.

        Groups are split if `LONGEST` divides their size, or if each output has only one group.
        Otherwise the size of groups stays as it is.
        """
        n_in, size = self.shape[1], self.form.size
        if self.form.n_groups(n_in) == 1:
            whole = -(-n_in // MULTIPLE) * MULTIPLE
            one = replace(self, form=replace(self.form, size=max(size, whole)))
            return one.in_groups_of(min(whole, LONGEST))
        return self.in_groups_of(LONGEST if size % LONGEST == 0 else size)

    def scale_type(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the type in which scales and offsets should be stored, for tokens of `dtype`.

        The type is float16 if `fits_half` accepts scales and offsets, else float32. For float32
        tokens, float16 is used only if it represents every number exactly.
        """
        tolerance = 0.0 if dtype == torch.float32 else HALF_STEP
        numbers = [self.scales] if self.offsets is None else [self.scales, self.offsets]
        return torch.float16 if all(fits_half(n, tolerance) for n in numbers) else torch.float32


def joined(parts: Sequence[GroupedMatrix]) -> GroupedMatrix:
    """Returns the matrices joined along their outputs, without any loss of precision.

    All parts must have an equal number of inputs. If the numbers of the parts stand for different
    values, all numbers are converted to eight bits. The size of groups becomes the greatest common
    divisor of the parts' sizes.
    """
    n_in = parts[0].shape[1]
    sizes = {part.form.size if part.form.n_groups(n_in) > 1 else 0 for part in parts}
    size = math.gcd(*sizes) or max(part.form.size for part in parts)
    values = {part.form.values if part.form.bits == 4 else () for part in parts}
    if len(values) > 1:
        parts = [_widened(part) for part in parts]
    parts = [part.in_groups_of(size) for part in parts]
    offsets = None
    if any(part.offsets is not None for part in parts):
        offsets = torch.cat(
            [torch.zeros_like(p.scales) if p.offsets is None else p.offsets for p in parts]
        )
    return GroupedMatrix(
        parts[0].form,
        torch.cat([part.numbers for part in parts]),
        torch.cat([part.scales for part in parts]),
        offsets,
    )


def _widened(matrix: GroupedMatrix) -> GroupedMatrix:
    """Returns the matrix with its numbers converted to eight bits."""
    return replace(matrix, form=GroupForm(8, matrix.form.size), numbers=matrix.values())


def fits_half(numbers: Tensor, tolerance: float = HALF_STEP) -> bool:
    """Returns whether float16 is precise enough for `numbers` [n_out, n_groups].

    No rounding error may be larger than `tolerance` times the largest absolute number of the same
    output.
    """
    if not numbers.numel():
        return True
    error = (numbers.half().float() - numbers).abs()
    return bool((error <= tolerance * numbers.abs().amax(1, keepdim=True)).all())
