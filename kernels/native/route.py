"""The experts of every token, on the CPU."""

import ctypes

import torch
from torch import Tensor

from kernels.native.call import ELEMENT, declare
from kernels.route import route


class Router:
    """Implements `kernels.route`; of equal scores the first one counts."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._route = declare(library, "route", "ipppiiii")

    def route(self, scores: Tensor, n_chosen: int, normalises: bool) -> tuple[Tensor, Tensor]:
        if scores.dtype not in ELEMENT:
            return route(scores, n_chosen, normalises)
        scores = scores.contiguous()
        weights = torch.empty(len(scores), n_chosen)
        experts = torch.empty(len(scores), n_chosen, dtype=torch.int64)
        self._route(
            ELEMENT[scores.dtype],
            scores.data_ptr(),
            experts.data_ptr(),
            weights.data_ptr(),
            *scores.shape,
            n_chosen,
            normalises,
        )
        return weights, experts
