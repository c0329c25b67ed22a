"""Gated DeltaNet between its projections (Yang et al., 2025): attention with a state and no keys.

A token's queries, keys and values go through a convolution over the last tokens, each channel by
itself, and SiLU. Queries and keys are scaled to length 1, and queries by `key_dim ** -0.5`. Then
each value head changes its state S [key_dim, value_dim], zeros before position 0, and reads it:

    S = decay * S;  S += outer(k, beta * (v - k @ S));  out = q @ S
    decay = exp(decay_rate * softplus(a + step_bias)),  beta = sigmoid(b)

What is read is normalised by its mean square, and multiplied by the norm's scale and by `silu(z)`.

One token comes after the other, and none is computed together with another one. So a request's
numbers do not depend on how it is cut into spans. A form in chunks would need fewer passes over the
state, and would round elsewhere for each cut.
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
    """Returns [n_tokens, n_value_heads * value_dim], and leaves the state after each span.

    `projected` [n_tokens, n_channels + n_value_heads * (value_dim + 2)] has a token's queries,
    keys, values, z, b and a, one after the other. `inputs` [n_rows, kernel_size - 1, n_channels],
    of the same type, are the last tokens' queries, keys and values of each row; `states` [n_rows,
    n_value_heads, key_dim, value_dim] are float32. Both are dense.
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
    """Returns the output of one span [n_tokens, n_out]; `inputs` and `state` are its row's."""
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
    """Returns the heads of queries or keys, [n_tokens, n_key_heads, key_dim], of length 1."""
    heads = x.view(len(x), form.n_key_heads, form.key_dim)
    return heads * torch.rsqrt(heads.pow(2).sum(-1, keepdim=True) + LENGTH_EPS)
