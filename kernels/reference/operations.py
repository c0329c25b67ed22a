"""A slow and obvious version of every operation, with which tests compare the fast versions.

The code is written to be read: it computes one request and one formula at a time. The serving
system does not use it.
"""

import math

import torch
from torch import Tensor

from kernels.forms.delta_net import DeltaNetForm
from kernels.forms.experts import PLAIN_EXPERTS, ExpertForm
from kernels.forms.routing import RoutingForm
from kernels.weights.linear import Clamp


def embedding(table: Tensor, token_ids: Tensor, first: int) -> Tensor:
    """Returns each token's row of `table`, or zeros for a token whose row is not in `table`. The
    table's first row belongs to the token `first`."""
    own = range(first, first + len(table))
    nothing = torch.zeros(table.shape[1], dtype=table.dtype, device=table.device)
    rows = [table[token - first] if token in own else nothing for token in token_ids.tolist()]
    return torch.stack(rows)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns `x / sqrt(mean(x^2) + eps) * weight` for `x` [..., size]. The quotient is computed in
    float32."""
    wide = x.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normal.to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns `x` with each pair (x[i], x[i + head_dim / 2]) rotated. `Ops.rotary` describes `cos`
    and `sin`."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cos[..., half:], sin[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Returns `gate * sigmoid(gate) * up`. Each row of `gate_up` holds `gate` and then `up`."""
    size = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :size], gate_up[..., size:]
    return gate * torch.sigmoid(gate) * up


def sigmoid_and_mul(gate: Tensor, x: Tensor) -> Tensor:
    """Returns `sigmoid(gate) * x`. If each token has only one gate, that gate applies to all
    elements of the token."""
    return (torch.sigmoid(gate.float()) * x.float()).to(x.dtype)


def write_kv(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Stores each token's key and value in its slot."""
    block_size = key_cache.shape[1]
    for token, slot in enumerate(slots.tolist()):
        key_cache[slot // block_size, slot % block_size] = k[token]
        value_cache[slot // block_size, slot % block_size] = v[token]


def attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    start_positions: list[int],
    n_tokens: list[int],
    block_tables: list[list[int]],
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    is_causal: bool = True,
) -> Tensor:
    """Returns the attention of all spans, [n_tokens, n_heads, value_dim]. `q` is [n_tokens,
    n_heads, head_dim]. Unless `is_causal`, a query also sees the later tokens of its span.

    The sink of a head, an entry of `sinks` [n_heads], is the score of one additional key whose
    value is zero.
    """
    n_heads, head_dim = q.shape[1:]
    group_size = n_heads // key_cache.shape[2]
    attended = []
    spans = torch.split(q, n_tokens)
    for span, start, table in zip(spans, start_positions, block_tables, strict=True):
        n_keys = start + len(span)
        keys = key_cache[table].flatten(0, 1)[:n_keys]  # [n_keys, n_kv_heads, head_dim]
        values = value_cache[table].flatten(0, 1)[:n_keys]
        keys = keys.repeat_interleave(group_size, 1).float()  # [n_keys, n_heads, head_dim]
        values = values.repeat_interleave(group_size, 1).float()
        scores = torch.einsum("qhd,khd->hqk", span.float(), keys) * (scale or head_dim**-0.5)
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        query_position = torch.arange(start, n_keys)[:, None]
        is_hidden = (torch.arange(n_keys) > query_position) & is_causal  # [n_queries, n_keys]
        if window is not None:
            is_hidden |= torch.arange(n_keys) <= query_position - window
        scores = scores.masked_fill(is_hidden, -torch.inf)
        if sinks is not None:
            of_sinks = sinks.float()[:, None, None].expand(-1, len(span), 1)
            scores = torch.cat((scores, of_sinks), -1)  # [n_heads, n_queries, n_keys + 1]
        weights = scores.softmax(-1)[:, :, :n_keys]
        attended.append(torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype))
    return torch.cat(attended)


def head_products(x: Tensor, weight: Tensor) -> Tensor:
    """Returns `weight[h] @ x[t, h]` for every token and head. `weight` is [n_heads, n_out,
    n_in]."""
    return torch.einsum("thi,hoi->tho", x.float(), weight.float()).to(x.dtype)


def delta_net(projected: Tensor, form: DeltaNetForm) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the output, the last inputs and the state of a whole sequence.

    Their shapes are [n_tokens, n_value_heads * value_dim], [kernel_size - 1, n_channels] and
    [n_value_heads, key_dim, value_dim]. `Ops.delta_net` describes `projected`.
    """
    n_before, n_heads = form.kernel_size - 1, form.n_value_heads
    widths = [form.n_channels, form.n_out, n_heads, n_heads]
    mixed, z, b, a = torch.split(projected, widths, -1)
    mixed = torch.cat((mixed.new_zeros(n_before, form.n_channels), mixed))
    states = torch.zeros(n_heads, form.key_dim, form.value_dim)
    out = torch.empty(len(projected), n_heads, form.value_dim)
    n_keys = form.n_key_heads * form.key_dim
    for token in range(len(projected)):
        convolved = (mixed[token : token + form.kernel_size].float() * form.conv).sum(0)
        activated = convolved * torch.sigmoid(convolved)
        q, k, v = torch.split(activated, [n_keys, n_keys, form.n_out])
        for head in range(n_heads):
            key_head = head * form.n_key_heads // n_heads
            key_place = slice(key_head * form.key_dim, (key_head + 1) * form.key_dim)
            place = slice(head * form.value_dim, (head + 1) * form.value_dim)
            key = k[key_place] / (k[key_place].pow(2).sum() + 1e-6).sqrt()
            query = q[key_place] / (q[key_place].pow(2).sum() + 1e-6).sqrt() / form.key_dim**0.5
            step = math.log1p(math.exp(float(a[token, head] + form.step_bias[head])))
            state = states[head] * math.exp(float(form.decay_rate[head]) * step)
            change = (v[place] - key @ state) * torch.sigmoid(b[token, head].float())
            states[head] = state + torch.outer(key, change)
            read, gate = query @ states[head], z[token, place].float()
            normal = read / (read.pow(2).mean() + form.eps).sqrt()
            out[token, head] = normal * form.norm * gate * torch.sigmoid(gate)
    return out.flatten(1).to(projected.dtype), mixed[len(projected) :], states


def gelu(x: Tensor) -> Tensor:
    """Returns `x` times the standard normal distribution function at `x` (Hendrycks & Gimpel,
    2016)."""
    wide = x.double()
    return (0.5 * wide * torch.erfc(-wide / 2**0.5)).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """Returns the tanh approximation of `gelu(x)` (Hendrycks & Gimpel, 2016)."""
    wide = x.float()
    inner = (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)
    return (0.5 * wide * (1 + torch.tanh(inner))).to(x.dtype)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Returns `gelu_tanh(gate) * up`. Each row of `gate_up` holds `gate` and then `up`."""
    size = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :size].float(), gate_up[..., size:].float()
    return (gelu_tanh(gate) * up).to(gate_up.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Returns `(x - mean) / sqrt(variance + eps) * weight + bias` for `x` [..., size]. The result
    is computed in float32 and has the type of `x`."""
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    normal = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    return (normal * weight.float() + bias.float()).to(x.dtype)


def int8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Returns `x @ weight.T` in float32. Each row of `x` and of `weight` is first rounded to
    multiples of a 127th of its largest absolute value."""

    def whole(rows: Tensor) -> tuple[Tensor, Tensor]:
        largest = rows.float().abs().amax(1, keepdim=True)
        # `127 / largest` with a Python number is computed as `127 * (1 / largest)`: rounded twice.
        steps = torch.where(largest > 0, torch.tensor(127.0) / largest, 0.0)
        return (rows.float() * steps).round().int(), largest / 127

    (x_whole, x_step), (w_whole, w_step) = whole(x), whole(weight)
    return (x_whole @ w_whole.t()).float() * x_step * w_step.t()


def clamp_and_mul(gate_up: Tensor, clamp: Clamp) -> Tensor:
    """Returns `(up + 1) * gate * sigmoid(slope * gate)`, where `gate` and `up` are clamped first as
    `Clamp` describes. Each row of `gate_up` holds `gate` and then `up`."""
    size = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :size].float(), gate_up[..., size:].float()
    gate = torch.minimum(gate, torch.tensor(clamp.limit))
    up = torch.maximum(torch.minimum(up, torch.tensor(clamp.limit)), torch.tensor(-clamp.limit))
    return ((up + 1) * gate * torch.sigmoid(clamp.slope * gate)).to(gate_up.dtype)


def expert_mlp(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    experts: Tensor,
    weights: Tensor,
    form: ExpertForm = PLAIN_EXPERTS,
) -> Tensor:
    """Returns the weighted sum of the outputs of each token's experts, which are computed one token
    and one expert at a time."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for token, chosen in enumerate(experts.tolist()):
        for i, expert in enumerate(chosen):
            inner = gate_up[expert].float() @ x[token].float()
            if form.gate_up_bias is not None:
                inner += form.gate_up_bias[expert].float()
            gate = silu_and_mul if form.gate == "silu" else gelu_and_mul
            gated = gate(inner) if form.clamp is None else clamp_and_mul(inner, form.clamp)
            outer = down[expert].float() @ gated
            if form.down_bias is not None:
                outer += form.down_bias[expert].float()
            out[token] += weights[token, i].float() * outer
    return out.to(x.dtype)


def add_scaled(x: Tensor, y: Tensor, factor: float) -> Tensor:
    """Returns `x + factor * y` in the type of `x`. The sum is computed in float32."""
    return (x.float() + factor * y.float()).to(x.dtype)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Returns `cap * tanh(x / cap)` in float32."""
    return cap * torch.tanh(x.float() / cap)


def route(scores: Tensor, n_chosen: int, normalises: bool) -> tuple[Tensor, Tensor]:
    """Returns the weights and the experts of each token. Among experts with equal scores, the first
    one is chosen."""
    weights, experts = [], []
    for row in scores.double().tolist():
        shares = [math.exp(score - max(row)) for score in row]
        chosen = sorted(range(len(row)), key=lambda i: (-row[i], i))[:n_chosen]
        total = sum(shares[i] for i in chosen) if normalises else sum(shares)
        experts.append(chosen)
        weights.append([shares[i] / total for i in chosen])
    return torch.tensor(weights), torch.tensor(experts)


def route_in_groups(logits: Tensor, form: RoutingForm) -> tuple[Tensor, Tensor]:
    """Returns the weights and the experts of each token. Among groups or experts with equal scores,
    the first one is chosen."""
    n_experts = logits.shape[1]
    size = n_experts // form.n_groups
    bias = [0.0] * n_experts if form.bias is None else form.bias.double().tolist()
    weights, experts = [], []
    for row in logits.double():
        scores = (row.softmax(0) if form.is_softmax else row.sigmoid()).tolist()
        compared = [score + extra for score, extra in zip(scores, bias, strict=True)]
        groups = [range(first, first + size) for first in range(0, n_experts, size)]
        of_groups = [
            sum(sorted((compared[i] for i in group), reverse=True)[: form.n_best])
            for group in groups
        ]
        best = sorted(range(form.n_groups), key=lambda i: -of_groups[i])[: form.n_chosen_groups]
        allowed = [i for group in sorted(best) for i in groups[group]]
        chosen = sorted(allowed, key=lambda i: -compared[i])[: form.n_chosen]
        total = sum(scores[i] for i in chosen) if form.normalises else 1.0
        experts.append(chosen)
        weights.append([form.factor * scores[i] / total for i in chosen])
    return torch.tensor(weights), torch.tensor(experts)
