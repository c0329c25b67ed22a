"""Symmetric quantisation of a matrix, with a scale for each output or for each group of inputs.

With a scale for each output (`quantised`), the scale is the output's largest absolute weight
divided by 127. This quantisation is used by int8 weights on a GPU, and on a CPU if products also
quantise their inputs. With a scale for each group (`in_groups`), a scale for eight bits is the
group's largest absolute weight divided by 127. For four bits several scales are tried, and the
scale with the smallest sum of squared errors is taken. The modules of the packed forms describe the
products.
"""

import torch
from torch import Tensor

from kernels.weights.groups import Bits, GroupedMatrix, GroupForm, fits_half

LARGEST = 127  # the largest int8 whose negative is an int8, too

GROUP_SIZES: dict[Bits, int] = {4: 32, 8: 128}
"""Number of inputs that share a scale, for each number of bits."""

_NOTHING = 1e-30  # a row whose absolute weights are all at most this becomes zeros
_ROWS_AT_ONCE = 1024
_WEIGHTS_AT_ONCE = 1 << 18  # so few that intermediate results stay in a cache

# Factors that are tried: `-8 * scale` is a factor times the group's largest weight. With a factor
# below 1 the largest weight is clipped a little.
_CUTS = (1.0, 0.93, 0.86, 0.79, 1.08)


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `weight` [n_out, n_in] as int8 of the same shape, and scales [n_out] in float32.

    A quantised row times its scale differs from the original row by at most half of the scale.
    """
    pieces = [_quantised(rows.float()) for rows in torch.split(weight, _ROWS_AT_ONCE)]
    whole, scales = zip(*pieces, strict=True)
    return torch.cat(whole), torch.cat(scales)


def _quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    largest = rows.abs().amax(1)
    steps = torch.where(largest > _NOTHING, largest.new_tensor(LARGEST) / largest, 0.0)
    # The divisor is a tensor: CUDA multiplies by the inverse of a Python number, which would give
    # other scales.
    return (rows * steps[:, None]).round_().to(torch.int8), largest / largest.new_tensor(LARGEST)


def in_groups(weight: Tensor, bits: Bits) -> GroupedMatrix:
    """Returns `weight` [n_out, n_in] quantised to `bits`, in groups of `GROUP_SIZES[bits]` inputs.

    Scales are rounded to float16 if `fits_half` accepts them.
    """
    form = GroupForm(bits, GROUP_SIZES[bits])
    n_rows = max(1, _WEIGHTS_AT_ONCE // max(weight.shape[1], 1))
    pieces = [_in_groups(rows.float(), form) for rows in torch.split(weight, n_rows)]
    numbers, scales = zip(*pieces, strict=True)
    return GroupedMatrix(form, torch.cat(numbers), torch.cat(scales))


def _in_groups(rows: Tensor, form: GroupForm) -> tuple[Tensor, Tensor]:
    """Quantises `rows` [n_rows, n_in] in groups. Returns the numbers [n_rows, n_in], and the scales
    of the groups, [n_rows, n_groups] in float32."""
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
    """Returns scales [n_rows, n_groups] for `groups` [n_rows, n_groups, size]: for each group the
    one with the smallest sum of squared errors, of those that are tried. A scale may be negative.
    If a group contains a number that is not finite, its scale is not finite, so that its results
    are not finite either."""
    places = groups.abs().argmax(2, keepdim=True)
    largest = groups.gather(2, places).squeeze(2)  # NaN counts as the largest
    best, best_gain = torch.zeros_like(largest), torch.zeros_like(largest)
    for cut in _CUTS:
        whole = _rounded(groups, largest * (cut / -8), 4)
        # The scale with the least squared error for these numbers, and the decrease of the error
        # from that of a scale of zero.
        products, squares = (groups * whole).sum(2), whole.square().sum(2)
        scale = torch.where(squares > 0, products / squares, 0.0)
        gain = scale * products
        is_better = gain > best_gain
        best, best_gain = torch.where(is_better, scale, best), torch.maximum(gain, best_gain)
    return torch.where(largest.isfinite(), best, torch.nan)


def _rounded(groups: Tensor, scales: Tensor, bits: Bits) -> Tensor:
    """Divides groups by their scales, and rounds the quotients to whole numbers within the range of
    `bits`, [n_rows, n_groups, size]."""
    steps = torch.where(scales.abs() > _NOTHING, 1 / scales, 0.0)
    low, high = (-8, 7) if bits == 4 else (-LARGEST, LARGEST)
    return (groups * steps[..., None]).round_().nan_to_num_(0).clamp_(low, high)
