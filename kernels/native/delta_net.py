"""The recurrent part of a Gated DeltaNet layer on the CPU. The projections before and after it are
separate steps."""

import ctypes

import torch
from torch import Tensor

from kernels.forms.delta_net import LENGTH_EPS, DeltaNetForm
from kernels.forms.state_spans import StateSpans
from kernels.native.call import ELEMENT, declare
from kernels.pytorch.delta_net import delta_net


class NativeDeltaNet:
    """The operation `Ops.delta_net` on the CPU: the recurrent part of a Gated DeltaNet layer."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._delta_net = declare(
            library,
            "delta_net",
            "element projected inputs states first_tokens n_tokens rows start_positions out "
            "n_spans n_key_heads n_value_heads key_dim value_dim kernel_size conv decay_rate "
            "step_bias norm eps length_eps",
        )

    def delta_net(
        self,
        projected: Tensor,
        inputs: Tensor,
        states: Tensor,
        spans: StateSpans,
        form: DeltaNetForm,
    ) -> Tensor:
        is_dense = projected.is_contiguous() and inputs.is_contiguous() and states.is_contiguous()
        if projected.dtype not in ELEMENT or inputs.dtype != projected.dtype or not is_dense:
            return delta_net(projected, inputs, states, spans, form)
        out = torch.empty((len(projected), form.n_out), dtype=projected.dtype)
        self._delta_net(
            ELEMENT[projected.dtype],
            projected.data_ptr(),
            inputs.data_ptr(),
            states.data_ptr(),
            spans.first_tokens.data_ptr(),
            spans.n_tokens.data_ptr(),
            spans.rows.data_ptr(),
            spans.start_positions.data_ptr(),
            out.data_ptr(),
            len(spans.rows),
            form.n_key_heads,
            form.n_value_heads,
            form.key_dim,
            form.value_dim,
            form.kernel_size,
            form.conv.data_ptr(),
            form.decay_rate.data_ptr(),
            form.step_bias.data_ptr(),
            form.norm.data_ptr(),
            form.eps,
            LENGTH_EPS,
        )
        return out
