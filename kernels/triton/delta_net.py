"""The recurrent part of a Gated DeltaNet layer on a GPU, without the projections before and after
it.

`kernels.pytorch.delta_net` has the formulas. A program keeps some columns of a value head's state
in registers from the first token of a span to the last: 16 KiB for keys of 128, read and written
once. For each token the program reads the channels of its head `kernel_size` times, mostly from the
cache, and computes 7 operations per element of the state. Decodes are limited by the bandwidth for
the states. A long prompt is limited by its length, because its tokens are computed one after the
other. Spans, heads and columns run in parallel.

A second launch normalises and gates the output of each head. It is needed because the norm covers
all columns. A third launch stores the last inputs, after all programs of the first launch have read
the old ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.forms.delta_net import LENGTH_EPS, DeltaNetForm
from kernels.forms.state_spans import StateSpans
from kernels.triton.activations import sigmoid, silu

_CHANNELS = 256  # channels that a program of `_keep_inputs` copies

_COLUMNS = 32  # columns of a state that a program computes

# Maximum number of state elements per thread. A thread needs further registers for vectors.
_STATE_ELEMENTS = 32


@triton.jit
def _convolved(
    projected,
    inputs,
    conv,
    token,
    is_new,
    channel,
    is_there,
    WIDTH: tl.constexpr,
    N_CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
):
    """Returns SiLU of the convolution of a token's channels, [n].

    `token` is the token's index in its span. `projected` points to the channels of the token,
    `inputs` to the channels of the tokens before the span.
    """
    total = tl.zeros(channel.shape, tl.float32)
    for j in tl.static_range(TAPS):
        place = token - (TAPS - 1) + j
        ago = (TAPS - 1 - j) * WIDTH
        here = tl.load(projected - ago + channel, is_there & (place >= 0), 0.0)
        before = tl.load(
            inputs + (TAPS - 1 + place) * N_CHANNELS + channel,
            is_there & (place < 0) & (is_new == 0),
            0.0,
        )
        weight = tl.load(conv + j * N_CHANNELS + channel, is_there, 0.0)
        total += (here.to(tl.float32) + before.to(tl.float32)) * weight
    return silu(total)


@triton.jit
def _delta_net(
    projected,
    inputs,
    states,
    first_tokens,
    n_tokens,
    rows,
    start_positions,
    conv,
    decay_rate,
    step_bias,
    reads,
    length_eps,
    N_KEY_HEADS: tl.constexpr,
    N_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    N_OUT: tl.constexpr = N_VALUE_HEADS * VALUE_DIM
    N_CHANNELS: tl.constexpr = 2 * N_KEY_HEADS * KEY_DIM + N_OUT
    WIDTH: tl.constexpr = N_CHANNELS + N_OUT + 2 * N_VALUE_HEADS
    span, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(first_tokens + span)
    row = tl.load(rows + span).to(tl.int64)
    is_new = (tl.load(start_positions + span) == 0).to(tl.int32)
    key, value = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    q_channel = head // (N_VALUE_HEADS // N_KEY_HEADS) * KEY_DIM + key
    k_channel = N_KEY_HEADS * KEY_DIM + q_channel
    v_channel = 2 * N_KEY_HEADS * KEY_DIM + head * VALUE_DIM + value
    projected += first * WIDTH
    reads += first * N_OUT + head * VALUE_DIM + value
    inputs += row * (TAPS - 1) * N_CHANNELS
    place = states + (row * N_VALUE_HEADS + head) * KEY_DIM * VALUE_DIM
    place += key[:, None] * VALUE_DIM + value[None, :]
    is_element = is_key[:, None] & is_value[None, :]
    state = tl.load(place, is_element & (is_new == 0), 0.0)  # [KEYS, VALUES]
    rate = tl.load(decay_rate + head)
    bias = tl.load(step_bias + head)

    for token in range(tl.load(n_tokens + span).to(tl.int32)):
        q = _convolved(
            projected,
            inputs,
            conv,
            token,
            is_new,
            q_channel,
            is_key,
            WIDTH,
            N_CHANNELS,
            TAPS,
        )
        k = _convolved(
            projected,
            inputs,
            conv,
            token,
            is_new,
            k_channel,
            is_key,
            WIDTH,
            N_CHANNELS,
            TAPS,
        )
        v = _convolved(
            projected,
            inputs,
            conv,
            token,
            is_new,
            v_channel,
            is_value,
            WIDTH,
            N_CHANNELS,
            TAPS,
        )
        q *= tl.rsqrt(tl.sum(q * q, 0) + length_eps) * (KEY_DIM**-0.5)
        k *= tl.rsqrt(tl.sum(k * k, 0) + length_eps)
        others = projected + N_CHANNELS
        b = tl.load(others + N_OUT + head).to(tl.float32)
        a = tl.load(others + N_OUT + N_VALUE_HEADS + head).to(tl.float32) + bias
        step = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
        state *= tl.exp(rate * step)
        change = (v - tl.sum(k[:, None] * state, 0)) * sigmoid(b)
        state += k[:, None] * change[None, :]
        tl.store(reads, tl.sum(q[:, None] * state, 0), is_value)
        projected += WIDTH
        reads += N_OUT
    tl.store(place, state, is_element)


@triton.jit
def _finish(
    reads,
    projected,
    norm,
    out,
    eps,
    width,
    N_CHANNELS: tl.constexpr,
    N_OUT: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    value = tl.arange(0, VALUES)
    is_value = value < VALUE_DIM
    place = tl.program_id(1) * VALUE_DIM + value
    read = tl.load(reads + token * N_OUT + place, is_value, 0.0)
    z = tl.load(projected + token * width + N_CHANNELS + place, is_value, 0.0).to(tl.float32)
    scale = tl.load(norm + value, is_value, 0.0)
    normal = read * tl.rsqrt(tl.sum(read * read, 0) / VALUE_DIM + eps)
    tl.store(out + token * N_OUT + place, normal * scale * silu(z), is_value)


@triton.jit
def _keep_inputs(
    projected,
    inputs,
    first_tokens,
    n_tokens,
    rows,
    start_positions,
    width,
    N_CHANNELS: tl.constexpr,
    N_BEFORE: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    span = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_there = channel < N_CHANNELS
    row = tl.load(rows + span).to(tl.int64)
    n, first = tl.load(n_tokens + span), tl.load(first_tokens + span)
    is_old = tl.load(start_positions + span) > 0
    inputs += row * N_BEFORE * N_CHANNELS + channel
    # Each entry is read from a later entry, which the loop has not overwritten yet.
    for i in tl.static_range(N_BEFORE):
        place = n - N_BEFORE + i
        here = tl.load(projected + (first + place) * width + channel, is_there & (place >= 0), 0.0)
        before = tl.load(
            inputs + (N_BEFORE + place) * N_CHANNELS, is_there & (place < 0) & is_old, 0.0
        )
        tl.store(inputs + i * N_CHANNELS, tl.where(place >= 0, here, before), is_there)


def delta_net(
    projected: Tensor,
    inputs: Tensor,
    states: Tensor,
    spans: StateSpans,
    form: DeltaNetForm,
) -> Tensor:
    """Launches the recurrent part of a Gated DeltaNet layer, as `Ops.delta_net` describes."""
    projected = projected.contiguous()
    (n_tokens, width), device = projected.shape, projected.device
    reads = torch.empty((n_tokens, form.n_out), dtype=torch.float32, device=device)
    out = torch.empty((n_tokens, form.n_out), dtype=projected.dtype, device=device)
    keys, values = (triton.next_power_of_2(dim) for dim in (form.key_dim, form.value_dim))
    n_columns = min(_COLUMNS, values)
    n_spans = len(spans.rows)
    columns = spans.first_tokens, spans.n_tokens, spans.rows, spans.start_positions
    _delta_net[(n_spans, form.n_value_heads, triton.cdiv(form.value_dim, n_columns))](
        projected,
        inputs,
        states,
        *columns,
        form.conv,
        form.decay_rate,
        form.step_bias,
        reads,
        LENGTH_EPS,
        N_KEY_HEADS=form.n_key_heads,
        N_VALUE_HEADS=form.n_value_heads,
        KEY_DIM=form.key_dim,
        VALUE_DIM=form.value_dim,
        TAPS=form.kernel_size,
        KEYS=keys,
        VALUES=n_columns,
        num_warps=min(8, max(1, keys * n_columns // (32 * _STATE_ELEMENTS))),
    )
    _finish[(n_tokens, form.n_value_heads)](
        reads,
        projected,
        form.norm,
        out,
        form.eps,
        width,
        N_CHANNELS=form.n_channels,
        N_OUT=form.n_out,
        VALUE_DIM=form.value_dim,
        VALUES=values,
        num_warps=1,
    )
    if form.kernel_size > 1:
        _keep_inputs[(n_spans, triton.cdiv(form.n_channels, _CHANNELS))](
            projected,
            inputs,
            *columns,
            width,
            N_CHANNELS=form.n_channels,
            N_BEFORE=form.kernel_size - 1,
            CHANNELS=_CHANNELS,
            num_warps=4,
        )
    return out
