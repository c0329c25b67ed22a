"""Symmetric quantisation of a matrix, with a scale for each output or for each group of inputs.

With a scale for each output, its largest weight becomes 127, so that the scale is its 127th part.
Every form of int8 weights that rounds inputs too begins with this. Groups have a scale each: with
eight bits it is found alike, with four it is the one of several that leaves the smallest sum of
squared errors. How they are multiplied is the form's business.
"""

import torch
from torch import Tensor

from kernels.weights.groups import Bits, GroupedMatrix, GroupForm, fits_half

LARGEST = 127  # of an int8 that has its negative

GROUP_SIZES: dict[Bits, int] = {4: 32, 8: 128}
"""Inputs of a group, by the bits of a number."""

_NOTHING = 1e-30  # all of a row below this is zero
_ROWS_AT_ONCE = 1024
_WEIGHTS_AT_ONCE = 1 << 18  # what is computed of them stays in a cache

# Of a group's largest weight, which becomes -8 times the scale and may be cut off a little.
_CUTS = (1.0, 0.93, 0.86, 0.79, 1.08)


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `weight` [n_out, n_in] as int8 of the same shape, and scales [n_out] in float32.

    A row times its scale is what it was, up to half the scale.
    """
    pieces = [_quantised(rows.float()) for rows in torch.split(weight, _ROWS_AT_ONCE)]
    whole, scales = zip(*pieces, strict=True)
    return torch.cat(whole), torch.cat(scales)


def _quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    largest = rows.abs().amax(1)
    steps = torch.where(largest > _NOTHING, largest.new_tensor(LARGEST) / largest, 0.0)
    # By a tensor: by a number CUDA multiplies with its inverse, and scales would differ.
    return (rows * steps[:, None]).round_().to(torch.int8), largest / largest.new_tensor(LARGEST)


def in_groups(weight: Tensor, bits: Bits) -> GroupedMatrix:
    """Returns `weight` [n_out, n_in] with numbers of `bits`, in groups of `GROUP_SIZES`.

    Scales are numbers of float16 where that is precise enough.
    """
    form = GroupForm(bits, GROUP_SIZES[bits])
    n_rows = max(1, _WEIGHTS_AT_ONCE // max(weight.shape[1], 1))
    pieces = [_in_groups(rows.float(), form) for rows in torch.split(weight, n_rows)]
    numbers, scales = zip(*pieces, strict=True)
    return GroupedMatrix(form, torch.cat(numbers), torch.cat(scales))


def _in_groups(rows: Tensor, form: GroupForm) -> tuple[Tensor, Tensor]:
    """Returns the numbers [n_rows, n_in] of rows, and scales [n_rows, n_groups] in float32."""
    n_rows, n_in = rows.shape
    missing = -n_in % form.size
    groups = torch.nn.functional.pad(rows, (0, missing)).view(n_rows, -1, form.size)
    scales = groups.abs().amax(2) / LARGEST if form.bits == 8 else _four_bit_scales(groups)
    halves = scales.half().float()
    if fits_half(scales):
        scales = halves
    whole = _rounded(groups, scales, form.bits)
    numbers = whole.to(torch.int8) if form.bits == 8 else (whole + 8).to(torch.uint8)
    return numbers.flatten(1)[:, :n_in], scales


def _four_bit_scales(groups: Tensor) -> Tensor:
    """Returns the best scales of groups [n_rows, n_groups, size], which may be negative."""
    places = groups.abs().argmax(2, keepdim=True)
    largest = groups.gather(2, places).squeeze(2)
    best, best_gain = torch.zeros_like(largest), torch.zeros_like(largest)
    for cut in _CUTS:
        whole = _rounded(groups, largest * (cut / -8), 4)
        # The scale with the least error for these numbers, and how much less than with none.
        products, squares = (groups * whole).sum(2), whole.square().sum(2)
        scale = torch.where(squares > 0, products / squares, 0.0)
        gain = scale * products
        is_better = gain > best_gain
        best, best_gain = torch.where(is_better, scale, best), torch.maximum(gain, best_gain)
    return best


def _rounded(groups: Tensor, scales: Tensor, bits: Bits) -> Tensor:
    """Returns groups divided by their scales as whole numbers, [n_rows, n_groups, size]."""
    steps = torch.where(scales.abs() > _NOTHING, 1 / scales, 0.0)
    low, high = (-8, 7) if bits == 4 else (-LARGEST, LARGEST)
    return (groups * steps[..., None]).round_().clamp_(low, high)
