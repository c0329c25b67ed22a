"""A stage as a program: a flat list of steps over buffers, which can be run in one call.

Layers record their steps once, when they have been read, in the order in which they would call
operations (`Program` has a method for each kind of `kernels.steps`). An implementation
(`Ops.fuse_layers`) may then run them all without Python in between. What there is no step for is a
`Call`, for which it returns to Python: so any stage can be recorded, and those of known pieces are
quick.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention_form import AttentionForm
from kernels.expert_form import Clamp
from kernels.gated_in_two import GatedInTwo
from kernels.head_norms import HeadNorms
from kernels.linear_weight import Gate, GatedWeight, LinearWeight, PanelTable, TableWeight
from kernels.steps import (
    ACTIVATIONS,
    Activate,
    Add,
    AddPositions,
    ApplyGate,
    Attend,
    Buffer,
    Call,
    Embed,
    EmbedPacked,
    Expert,
    GateForm,
    Greedy,
    Heads,
    LayerNorm,
    LookUpAngles,
    Multiply,
    RMSNorm,
    RMSNormPart,
    RotaryWriteKV,
    Route,
    RunExperts,
    Scale,
    Select,
    SigmoidAndMul,
    SoftCap,
    WriteKV,
)


@dataclass(slots=True)
class Angles:
    """The angles of positions from the first on, as `kernels.rotary` takes those of a token.

    They may be replaced by those of more positions between calls.
    """

    cos: Tensor  # [n_positions, 1, head_dim], as the next
    signed_sin: Tensor


class Program:
    """The steps of a stage, while they are recorded.

    A method returns the buffer of its result, [n, width]. What it says is used up is where the
    result may be.
    """

    def __init__(
        self, dtype: torch.dtype, angles: Sequence[Angles] = (), groups: Sequence[int] = ()
    ) -> None:
        """Begins a program whose hidden states are of `dtype`; `angles` has one entry for each kind
        of rotary embedding, and `groups` the K/V group of each layer, or none if there is but one.
        """
        self.dtype = dtype
        self.angles = angles
        self.groups = groups
        self.steps: list[object] = []
        self.buffers: list[Buffer] = []
        self.inputs: Buffer | None = None
        """The hidden states that come in; None if tokens do."""
        self.hidden: Buffer | None = None
        """The hidden states after the last layer."""
        self.n_hidden_steps = 0
        """The steps that make these; further ones make logits."""
        self.logits: Buffer | None = None
        """Logits of sampled tokens; None where there is no head or Python computes it."""
        self.has_calls = False
        """Whether there are steps of Python."""
        self._angles: dict[int, tuple[Buffer, Buffer]] = {}
        self._n_hidden_buffers = 0

    def group_of(self, layer: int) -> int:
        """Returns the K/V group of a layer of the stage."""
        return self.groups[layer] if self.groups else 0

    def buffer(
        self, width: int, dtype: torch.dtype | None = None, *, is_of_sampled: bool = False
    ) -> Buffer:
        """Returns a new buffer, by default of the type of hidden states."""
        made = Buffer(len(self.buffers), width, dtype or self.dtype, is_of_sampled)
        self.buffers.append(made)
        return made

    def take_in(self, hidden_size: int) -> Buffer:
        """Returns the buffer of the hidden states that come in."""
        self.inputs = self.buffer(hidden_size)
        return self.inputs

    def embed(self, table: Tensor) -> Buffer:
        """Looks up the batch's tokens in `table` [vocab_size, width]."""
        out = self.buffer(table.shape[1])
        self.steps.append(Embed(table, out))
        return out

    def embed_packed(self, table: TableWeight) -> Buffer | None:
        """Looks up the batch's tokens in `table` [vocab_size, width]; returns None if it is in no
        form that there is a step for."""
        if not isinstance(table, PanelTable):
            return None
        out = self.buffer(table.shape[1])
        self.steps.append(EmbedPacked(table, out))
        return out

    def add_positions(self, table: Tensor, x: Buffer) -> Buffer:
        """Adds rows of `table` [n_positions, width] to `x`, which is used up."""
        self.steps.append(AddPositions(table, x))
        return x

    def rms_norm(self, x: Buffer, weight: Tensor, eps: float) -> Buffer:
        """Returns `kernels.rms_norm` of `x`."""
        out = self._like(x)
        self.steps.append(RMSNorm(x, weight, eps, out))
        return out

    def rms_norm_part(self, x: Buffer, first: int, weight: Tensor, eps: float) -> None:
        """Normalises the elements of each row of `x` from `first` on that `weight` has."""
        self.steps.append(RMSNormPart(x, first, len(weight), weight, eps))

    def layer_norm(self, x: Buffer, weight: Tensor, bias: Tensor, eps: float) -> Buffer:
        """Returns `kernels.layer_norm` of `x`."""
        out = self._like(x)
        self.steps.append(LayerNorm(x, weight, bias, eps, out))
        return out

    def multiply(
        self,
        weight: LinearWeight,
        x: Buffer,
        bias: Tensor | None = None,
        residual: Buffer | None = None,
    ) -> Buffer:
        """Returns `x @ weight.T + bias + residual`; the residual is used up."""
        out = self._like(x, weight.shape[0]) if residual is None else residual
        self.steps.append(Multiply(x, weight, bias, residual, out))
        return out

    def gated(self, weight: GatedWeight, x: Buffer) -> Buffer:
        """Returns the first half of a gated MLP."""
        if isinstance(weight, GatedInTwo):
            return self.gate(weight.gate, self.multiply(weight.weight, x, weight.bias))
        out = self._like(x, weight.shape[0] // 2)
        self.steps.append(Multiply(x, weight, None, None, out))
        return out

    def activate(self, function: str, x: Buffer) -> Buffer:
        """Applies one of `ACTIVATIONS` to `x`, which is used up."""
        self.steps.append(Activate(x, ACTIVATIONS.index(function)))
        return x

    def gate(self, gate: Gate | Clamp, x: Buffer) -> Buffer:
        """Returns the second half of `x`, gated by the first."""
        out = self._like(x, x.width // 2)
        self.steps.append(ApplyGate(x, GateForm.of(gate), out))
        return out

    def rotary_write_kv(
        self, qkv: Buffer, heads: Heads, norms: HeadNorms | None, *, rotary: int, layer: int
    ) -> None:
        """Turns queries and keys by angles of the kind `rotary`, and stores keys and values."""
        if rotary not in self._angles:
            cos, sin = self.buffer(heads.head_dim), self.buffer(heads.head_dim)
            self.steps.append(LookUpAngles(rotary, cos, sin))
            self._angles[rotary] = cos, sin
        self.steps.append(RotaryWriteKV(qkv, *self._angles[rotary], heads, norms, layer))

    def write_kv(self, qkv: Buffer, heads: Heads, *, layer: int) -> None:
        """Stores keys and values."""
        self.steps.append(WriteKV(qkv, heads, layer))

    def attend(
        self, qkv: Buffer, heads: Heads, form: AttentionForm, sinks: Tensor | None, *, layer: int
    ) -> Buffer:
        """Returns attention over the storage of a layer, [n_tokens, n_heads * head_dim]."""
        out = self._like(qkv, heads.n_heads * heads.head_dim)
        self.steps.append(Attend(qkv, heads, form, sinks, layer, out))
        return out

    def add(self, x: Buffer, y: Buffer, factor: float = 1.0) -> Buffer:
        """Returns `x + factor * y`; `x` is used up."""
        self.steps.append(Add(x, y, factor))
        return x

    def scale(self, x: Buffer, factor: float) -> Buffer:
        """Returns `x * factor`; `x` is used up."""
        self.steps.append(Scale(x, factor))
        return x

    def soft_cap(self, x: Buffer, cap: float) -> Buffer:
        """Returns `kernels.soft_cap` of `x`, in float32."""
        out = self.buffer(x.width, torch.float32, is_of_sampled=x.is_of_sampled)
        self.steps.append(SoftCap(x, cap, out))
        return out

    def route(self, scores: Buffer, n_chosen: int, *, normalises: bool) -> tuple[Buffer, Buffer]:
        """Returns the chosen experts and their weights, [n_tokens, n_chosen] each."""
        experts = self.buffer(n_chosen, torch.int64)
        weights = self.buffer(n_chosen, torch.float32)
        self.steps.append(Route(scores, int(normalises), experts, weights))
        return experts, weights

    def run_experts(
        self, each: Sequence[Expert], x: Buffer, experts: Buffer, weights: Buffer
    ) -> Buffer:
        """Returns the weighted sum of the experts that `route` has chosen."""
        size = each[0].down.shape[1]
        self.steps.append(
            RunExperts(
                x,
                experts,
                weights,
                each,
                gathered=self._like(x),
                both=self._like(x, 2 * size),
                inner=self._like(x, size),
                outer=self._like(x),
                sums=self.buffer(x.width, torch.float32),
                out=(out := self._like(x)),
            )
        )
        return out

    def sigmoid_and_mul(self, gates: Buffer, x: Buffer) -> Buffer:
        """Returns `sigmoid(gates) * x`; `x` is used up."""
        self.steps.append(SigmoidAndMul(gates, x))
        return x

    def call(self, function: Callable[..., None], *buffers: Buffer) -> None:
        """Calls Python at this step, as `Call` says."""
        self.has_calls = True
        self.steps.append(Call(function, buffers))

    def end_layers(self, hidden: Buffer) -> None:
        """Says that `hidden` are the hidden states after the last layer."""
        self.hidden = hidden
        self.n_hidden_steps, self._n_hidden_buffers = len(self.steps), len(self.buffers)

    def select(self, hidden: Buffer) -> Buffer:
        """Returns the rows of sampled tokens."""
        out = self.buffer(hidden.width, is_of_sampled=True)
        self.steps.append(Select(hidden, out))
        return out

    def end_head(self, logits: Buffer | None) -> None:
        """Says that `logits` are those of sampled tokens; None takes the head's steps back."""
        self.logits = logits
        if logits is None:
            del self.steps[self.n_hidden_steps :], self.buffers[self._n_hidden_buffers :]
        else:
            self.steps.append(Greedy(logits))

    def _like(self, x: Buffer, width: int | None = None) -> Buffer:
        return self.buffer(
            x.width if width is None else width, x.dtype, is_of_sampled=x.is_of_sampled
        )
