"""Symmetric quantisation of a matrix to int8, with a scale for each output.

An output's largest weight becomes 127, so that the scale is its 127th part. Every form of int8
weights begins with this; how they are multiplied is the form's business.
"""

import torch
from torch import Tensor

LARGEST = 127  # of an int8 that has its negative

_NOTHING = 1e-30  # all of a row below this is zero
_ROWS_AT_ONCE = 1024


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
