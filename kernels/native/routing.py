"""The choice of experts for every token, on the CPU."""

import ctypes

import torch
from torch import Tensor

from kernels.forms.routing import RoutingForm
from kernels.native.call import ELEMENT, declare
from kernels.pytorch.routing import route, route_in_groups


class NativeRouter:
    """The operations `Ops.route` and `Ops.route_in_groups` on the CPU. Of experts with equal
    scores, the one with the lower index is chosen."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._route = declare(
            library,
            "route",
            "element scores experts weights n_tokens n_experts n_chosen normalises",
        )
        self._in_groups = declare(
            library,
            "route_in_groups",
            "logits bias experts weights n_tokens n_experts n_chosen is_softmax normalises "
            "factor n_groups n_chosen_groups n_best",
        )

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

    def route_in_groups(self, logits: Tensor, form: RoutingForm) -> tuple[Tensor, Tensor]:
        if logits.dtype != torch.float32:
            return route_in_groups(logits, form)
        logits = logits.contiguous()
        weights = torch.empty(len(logits), form.n_chosen)
        experts = torch.empty(len(logits), form.n_chosen, dtype=torch.int64)
        self._in_groups(
            logits.data_ptr(),
            None if form.bias is None else form.bias.data_ptr(),
            experts.data_ptr(),
            weights.data_ptr(),
            *logits.shape,
            form.n_chosen,
            form.is_softmax,
            form.normalises,
            form.factor,
            form.n_groups,
            form.n_chosen_groups,
            form.n_best,
        )
        return weights, experts
