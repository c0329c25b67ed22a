"""The recurrent part of a Gated DeltaNet layer, without the projections before and after it (Yang
et al., 2025).

Gated DeltaNet replaces attention over stored keys by a state of fixed size. A token's queries, keys
and values pass through a convolution over the last tokens, independently for each channel, and
through SiLU. Queries and keys are then scaled to length 1, and queries by `key_dim ** -0.5`. Each
value head has a state S [key_dim, value_dim], which is zero before position 0. For each token the
head updates S and computes its output:

    S = decay * S;  S += outer(k, beta * (v - k @ S));  out = q @ S
    decay = exp(decay_rate * softplus(a + step_bias)),  beta = sigmoid(b)

The output is divided by its root mean square, and multiplied by the norm's scale and by `silu(z)`.

Tokens are computed one at a time, so the results do not depend on how a request is divided into
spans. Computing several tokens at once would need fewer passes over the state, but the rounding
would depend on the division.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.forms.delta_net import LENGTH_EPS, DeltaNetForm
from kernels.forms.state_spans import StateSpans


def delta_net(
    projected: Tensor,
    inputs: Tensor,
    states: Tensor,
    spans: StateSpans,
    form: DeltaNetForm,
) -> Tensor:
    """Returns the layer's output [n_tokens, n_value_heads * value_dim], and updates `inputs` and
    `states` in place, so that they hold the last inputs and the states after each span.

    `projected` [n_tokens, n_channels + n_value_heads * (value_dim + 2)] holds, for each token, its
    queries, keys, values, z, b and a in this order. `inputs` [n_rows, kernel_size - 1, n_channels],
    of the type of `projected`, holds the queries, keys and values of the last tokens of each row.
    `states` [n_rows, n_value_heads, key_dim, value_dim] is float32. `inputs` and `states` are
    dense.
    """
    out = projected.new_empty(len(projected), form.n_out)
    columns = (spans.first_tokens, spans.n_tokens, spans.rows, spans.start_positions)
    for first, n_tokens, row, start in zip(*(each.tolist() for each in columns), strict=True):
        if start == 0:
            inputs[row].zero_()
            states[row].zero_()
        here = slice(first, first + n_tokens)
        out[here] = _run_span(projected[here], inputs[row], states[row], form)
    return out


def _run_span(projected: Tensor, inputs: Tensor, state: Tensor, form: DeltaNetForm) -> Tensor:
    """Returns the output of one span [n_tokens, n_out], and updates `inputs` and `state` of the
    span's row."""
    n_tokens, n_heads = len(projected), form.n_value_heads
    widths = [form.n_channels, form.n_out, n_heads, n_heads]
    mixed, z, b, a = torch.split(projected, widths, -1)
    seen = torch.cat((inputs, mixed))  # [kernel_size - 1 + n_tokens, n_channels]
    inputs.copy_(seen[n_tokens:])
    windows = seen.float().unfold(0, form.kernel_size, 1)  # [n_tokens, n_channels, kernel_size]
    convolved = F.silu((windows * form.conv.t()).sum(-1))
    n_keys = form.n_key_heads * form.key_dim
    q, k, v = torch.split(convolved, [n_keys, n_keys, form.n_out], -1)
    group_size = n_heads // form.n_key_heads
    q, k = (_unit_heads(x, form).repeat_interleave(group_size, 1) for x in (q, k))
    q = q * form.key_dim**-0.5  # [n_tokens, n_value_heads, key_dim]
    v = v.view(n_tokens, n_heads, form.value_dim)
    decay = (form.decay_rate * F.softplus(a.float() + form.step_bias)).exp()
    beta = b.float().sigmoid()  # [n_tokens, n_value_heads]
    read = torch.empty_like(v)
    for token in range(n_tokens):
        key = k[token, :, :, None]  # [n_value_heads, key_dim, 1]
        state.mul_(decay[token, :, None, None])
        change = (v[token] - (key * state).sum(1)) * beta[token, :, None]
        state.add_(key * change[:, None])
        read[token] = (q[token, :, :, None] * state).sum(1)
    normal = read * torch.rsqrt(read.pow(2).mean(-1, keepdim=True) + form.eps)
    gates = F.silu(z.float()).view_as(read)
    return (normal * form.norm * gates).flatten(1).to(projected.dtype)


def _unit_heads(x: Tensor, form: DeltaNetForm) -> Tensor:
    """Splits queries or keys into heads [n_tokens, n_key_heads, key_dim], and scales each head to
    length 1."""
    heads = x.view(len(x), form.n_key_heads, form.key_dim)
    return heads * torch.rsqrt(heads.pow(2).sum(-1, keepdim=True) + LENGTH_EPS)
