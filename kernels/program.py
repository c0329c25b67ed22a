"""A stage as a program: a flat list of steps over buffers, from tokens to logits.

When the weights of a model have been read, each module of the model adds its steps to the program
once (`Program` has a method for each kind of step in `kernels.steps`). `Ops.runner` then returns an
object that runs the program. `kernels.pytorch.interpreter` runs one step after the other. The
native library runs several steps in one call; a call ends before a step that the library cannot
run. A computation for which there is no kind of step is a named `Call` of a Python function.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.forms.attention import AttentionForm
from kernels.forms.delta_net import LENGTH_EPS, DeltaNetForm
from kernels.forms.experts import StackedExperts
from kernels.forms.head_norms import HeadNorms
from kernels.forms.rotary_angles import RotaryAngles
from kernels.forms.routing import RoutingForm
from kernels.steps import (
    ACTIVATIONS,
    Activate,
    Add,
    AddPositions,
    AllGather,
    AllReduce,
    ApplyGate,
    Attend,
    Buffer,
    Call,
    CopyPart,
    Embed,
    EmbedPacked,
    EmbedShare,
    ExpertMatrices,
    GateForm,
    Heads,
    LayerNorm,
    LookUpAngles,
    Mul,
    Multiply,
    MultiplyHeads,
    RMSNorm,
    RMSNormPart,
    RotaryWriteKV,
    Route,
    RouteInGroups,
    RunDeltaNet,
    RunExperts,
    RunStackedExperts,
    Scale,
    ScaleByPosition,
    Select,
    SigmoidAndMul,
    SoftCap,
    TurnHeads,
    Widen,
    WriteKV,
    WriteLatents,
)
from kernels.steps.recorded import RecordedSteps
from kernels.weights.gated_in_two import GatedInTwo, GatedMatrix
from kernels.weights.head_products import HeadProducts
from kernels.weights.linear import Clamp, Gate, LinearWeight, TableWeight

_ALL_POSITIONS = 2**62
"""A number that is greater than every position."""


class Program(RecordedSteps):
    """The steps of one rank's share of a stage.

    Most methods add a step and return the buffer of the step's result, [n, width]. If a method says
    that a buffer may be overwritten, the step may write its result into that buffer, and the method
    may return it.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        rotaries: Sequence[RotaryAngles] = (),
        groups: Sequence[int] = (),
        *,
        tp_size: int = 1,
    ) -> None:
        """Creates an empty program whose hidden states are of `dtype`.

        `rotaries` has one entry for each kind of rotary embedding. `groups` has the index of each
        layer's K/V group, and is empty if there is only one group. `tp_size` is the number of ranks
        that share the layers.
        """
        super().__init__(dtype)
        self.rotaries = rotaries
        self.groups = groups
        self.tp_size = tp_size
        self._angles: dict[int, tuple[Buffer, Buffer]] = {}

    def copy(self) -> Program:
        """Returns a program with the same steps and weights, to which steps can be added."""
        made = copy.copy(self)
        made.steps, made.buffers = list(self.steps), list(self.buffers)
        made._angles = dict(self._angles)
        return made

    def group_of(self, layer: int) -> int:
        """Returns the index of the K/V group of a layer on this stage."""
        return self.groups[layer] if self.groups else 0

    def embed(self, table: Tensor) -> Buffer:
        """Adds a step that looks up the batch's tokens in `table` [vocab_size, width]."""
        out = self.buffer(table.shape[1])
        self.steps.append(Embed(table, out))
        return out

    def embed_packed(self, table: TableWeight) -> Buffer:
        """Adds a step that looks up the batch's tokens in `table` [vocab_size, width], which may be
        packed."""
        out = self.buffer(table.shape[1])
        self.steps.append(EmbedPacked(table, out))
        return out

    def embed_share(
        self, table: TableWeight, share: range, vocab_size: int, *, is_open: bool = False
    ) -> Buffer:
        """Adds a step that looks up the batch's tokens in `table` [len(share), width], which has
        only the rows of the tokens in the range `share`. The result is zeros for other tokens.

        If `is_open`, tokens from `vocab_size` on are looked up as token 0.
        """
        out = self.buffer(table.shape[1])
        self.steps.append(EmbedShare(table, share, vocab_size, is_open, out))
        return out

    def add_positions(self, table: Tensor, x: Buffer) -> Buffer:
        """Adds a step that adds to each row of `x` the row of `table` [n_positions, width] at the
        token's position. `x` may be overwritten."""
        self.steps.append(AddPositions(table, x))
        return x

    def rms_norm(self, x: Buffer, weight: Tensor, eps: float) -> Buffer:
        """Adds a step that computes `Ops.rms_norm` of `x`."""
        out = self._like(x)
        self.steps.append(RMSNorm(x, weight, eps, out))
        return out

    def rms_norm_parts(
        self, x: Buffer, first: int, weight: Tensor, eps: float, *, n: int = 1
    ) -> None:
        """Adds a step that normalises `n` parts of each row of `x` in place, as `Ops.rms_norm`
        does.

        Each part has `len(weight)` elements. The parts are adjacent and begin at the element
        `first` of the row.
        """
        self.steps.append(RMSNormPart(x, first, n, len(weight), weight, eps))

    def layer_norm(self, x: Buffer, weight: Tensor, bias: Tensor, eps: float) -> Buffer:
        """Adds a step that computes `Ops.layer_norm` of `x`."""
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
        """Adds a step that computes `x @ weight.T + bias + residual`. The residual may be
        overwritten."""
        out = self._like(x, weight.shape[0]) if residual is None else residual
        self.steps.append(Multiply(x, weight, bias, residual, out))
        return out

    def gated(self, weight: GatedMatrix, x: Buffer) -> Buffer:
        """Adds steps that multiply `x` by the gate and up matrices of a gated MLP and apply the
        gate: one step if the gate is fused with the product, otherwise two."""
        if isinstance(weight, GatedInTwo):
            return self.gate(weight.gate, self.multiply(weight.weight, x, weight.bias))
        out = self._like(x, weight.shape[0] // 2)
        self.steps.append(Multiply(x, weight, None, None, out))
        return out

    def activate(self, function: str, x: Buffer) -> Buffer:
        """Adds a step that applies the activation with the name `function` to `x`, which may be
        overwritten."""
        self.steps.append(Activate(x, ACTIVATIONS.index(function)))
        return x

    def gate(self, gate: Gate | Clamp, x: Buffer) -> Buffer:
        """Adds a step that applies a gate function. The first half of each row of `x` is the gate
        of the second half. The result has half the width."""
        out = self._like(x, x.width // 2)
        self.steps.append(ApplyGate(x, GateForm.of(gate), out))
        return out

    def rotary_write_kv(
        self, qkv: Buffer, heads: Heads, norms: HeadNorms | None, *, rotary: int, layer: int
    ) -> None:
        """Adds a step that rotates the queries and keys in `qkv`, and stores keys and values in the
        storage of a layer. The angles are from the rotary embedding with the index `rotary`.

        The rotated queries replace the queries in `qkv`.
        """
        cos, sin = self._angles_of(rotary, heads.head_dim)
        self.steps.append(RotaryWriteKV(qkv, cos, sin, heads, norms, layer))

    def write_kv(self, qkv: Buffer, heads: Heads, *, layer: int) -> None:
        """Adds a step that stores the keys and values in `qkv` in the storage of a layer."""
        self.steps.append(WriteKV(qkv, heads, layer))

    def attend(
        self,
        qkv: Buffer,
        heads: Heads,
        form: AttentionForm,
        sinks: Tensor | None,
        *,
        layer: int,
        n_shared: int = 0,
    ) -> Buffer:
        """Adds a step that computes attention over the storage of a layer, [n_tokens, n_heads *
        value_dim].

        If `n_shared` is above 0, the value of a token is the first `n_shared` elements of the
        token's key. If `n_shared` is 0, values are stored in a tensor of their own and have the
        size of keys.
        """
        out = self._like(qkv, heads.n_heads * (n_shared or heads.head_dim))
        self.steps.append(Attend(qkv, heads, form, sinks, layer, n_shared, out))
        return out

    def turn_heads(self, x: Buffer, out: Buffer, *, n_heads: int, rotary: int, size: int) -> None:
        """Adds a step that rotates the last `size` elements of each head of `x`, and writes the
        result to the last `size` elements of each head of `out`."""
        cos, sin = self._angles_of(rotary, size)
        self.steps.append(TurnHeads(x, cos, sin, n_heads, out))

    def multiply_heads(self, weight: HeadProducts, x: Buffer, out: Buffer) -> None:
        """Adds a step that multiplies the first elements of each head of `x` by the head's matrix
        in `weight`, and writes the product to the first elements of each head of `out`."""
        self.steps.append(MultiplyHeads(x, weight, out))

    def write_latents(self, x: Buffer, *, layer: int) -> None:
        """Adds a step that stores each row of `x` in the storage of a layer, as a key that all
        heads share."""
        self.steps.append(WriteLatents(x, layer))

    def delta_net(self, projected: Buffer, form: DeltaNetForm, *, layer: int) -> Buffer:
        """Adds a step that computes `Ops.delta_net` of `projected` and updates the states of
        `layer`."""
        out = self._like(projected, form.n_out)
        self.steps.append(RunDeltaNet(projected, form, form.kernel_size, LENGTH_EPS, layer, out))
        return out

    def add(self, x: Buffer, y: Buffer, factor: float = 1.0) -> Buffer:
        """Adds a step that computes `x + factor * y`. `x` may be overwritten."""
        self.steps.append(Add(x, y, factor))
        return x

    def scale(self, x: Buffer, factor: float) -> Buffer:
        """Adds a step that computes `x * factor`. `x` may be overwritten."""
        self.steps.append(Scale(x, factor))
        return x

    def scale_by(self, x: Buffer, factor: Tensor) -> Buffer:
        """Adds a step that computes `x * factor` for a `factor` [1] of the type of `x`. `x` may be
        overwritten."""
        self.scale_by_position(x, x.width, factor, _ALL_POSITIONS)
        return x

    def scale_by_position(self, x: Buffer, size: int, factors: Tensor, length: int) -> None:
        """Adds a step that multiplies the first `size` elements of each row of `x` by
        `factors[position // length]`, in place. `position` is the position of the row's token."""
        self.steps.append(ScaleByPosition(x, size, factors, length))

    def widened(self, x: Buffer) -> Buffer:
        """Returns `x` if it is float32. Otherwise adds a step that converts `x` to float32 and
        returns the result."""
        if x.dtype == torch.float32:
            return x
        out = self.buffer(x.width, torch.float32, is_of_sampled=x.is_of_sampled)
        self.steps.append(Widen(x, out))
        return out

    def soft_cap(self, x: Buffer, cap: float) -> Buffer:
        """Adds a step that computes `Ops.soft_cap` of `x`, in float32."""
        out = self.buffer(x.width, torch.float32, is_of_sampled=x.is_of_sampled)
        self.steps.append(SoftCap(x, cap, out))
        return out

    def route(self, scores: Buffer, n_chosen: int, *, normalises: bool) -> tuple[Buffer, Buffer]:
        """Adds a step that chooses experts by `Ops.route`. Returns the chosen experts and their
        weights, [n_tokens, n_chosen] each."""
        experts = self.buffer(n_chosen, torch.int64)
        weights = self.buffer(n_chosen, torch.float32)
        self.steps.append(Route(scores, int(normalises), experts, weights))
        return experts, weights

    def route_in_groups(self, logits: Buffer, form: RoutingForm) -> tuple[Buffer, Buffer]:
        """Adds a step that chooses experts by `Ops.route_in_groups`. Returns the chosen experts and
        their weights, [n_tokens, n_chosen] each."""
        experts = self.buffer(form.n_chosen, torch.int64)
        weights = self.buffer(form.n_chosen, torch.float32)
        self.steps.append(RouteInGroups(logits, form, experts, weights))
        return experts, weights

    def run_experts(
        self, matrices: ExpertMatrices, x: Buffer, experts: Buffer, weights: Buffer
    ) -> Buffer:
        """Adds a step that runs the chosen `experts` [n_tokens, n_chosen] of each token and
        computes the sum of their outputs, weighted by `weights` [n_tokens, n_chosen]."""
        if isinstance(matrices, StackedExperts):
            out = self._like(x)
            self.steps.append(RunStackedExperts(x, experts, weights, matrices, out))
            return out
        size = matrices[0].down.shape[1]
        self.steps.append(
            RunExperts(
                x,
                experts,
                weights,
                matrices,
                gathered=self._like(x),
                both=self._like(x, 2 * size),
                inner=self._like(x, size),
                outer=self._like(x),
                sums=self.buffer(x.width, torch.float32),
                out=(out := self._like(x)),
            )
        )
        return out

    def mul(self, x: Buffer, y: Buffer, first: int = 0) -> Buffer:
        """Adds a step that computes `x * y[:, first : first + x.width]`. `x` may be overwritten."""
        self.steps.append(Mul(x, y, first))
        return x

    def sigmoid_and_mul(self, gates: Buffer, x: Buffer, first: int = 0) -> Buffer:
        """Adds a step that computes `sigmoid(gates[:, first:]) * x`. `x` may be overwritten."""
        self.steps.append(SigmoidAndMul(gates, first, x))
        return x

    def all_reduce(self, x: Buffer) -> Buffer:
        """Adds a step that sums `x` over the ranks that share the layers. Adds no step if there is
        only one rank. `x` may be overwritten."""
        if self.tp_size > 1:
            self.steps.append(AllReduce(x))
        return x

    def all_gather(self, x: Buffer, width: int) -> Buffer:
        """Adds a step that joins the rows of all ranks side by side into rows of `width` elements.
        Returns `x` itself if there is only one rank.

        A rank has `ceil(width / tp_size)` elements of each row. The last ranks may have fewer.
        """
        if self.tp_size == 1:
            return x
        out = self._like(x, width)
        self.steps.append(AllGather(x, -(-width // self.tp_size), out))
        return out

    def call(
        self,
        name: str,
        function: Callable[..., Tensor | tuple[Tensor, ...]],
        inputs: Sequence[Buffer],
        *outputs: Buffer,
    ) -> None:
        """Adds a step that calls a Python function with the buffers `inputs`, as `Call` describes.
        `name` identifies the computation."""
        self.steps.append(Call(name, function, tuple(inputs), outputs))

    def take_part(self, x: Buffer, first: int, width: int) -> Buffer:
        """Adds a step that copies `width` elements of each row of `x`, from the element
        `first` on."""
        out = self._like(x, width)
        self.copy_part(x, first, width, out, 0)
        return out

    def copy_part(self, x: Buffer, first: int, size: int, out: Buffer, out_first: int) -> None:
        """Adds a step that copies the elements `first : first + size` of each row of `x` to the
        elements `out_first : out_first + size` of the same row of `out`."""
        self.steps.append(CopyPart(x, first, size, out, out_first))

    def join(self, *parts: Buffer) -> Buffer:
        """Adds steps that copy the rows of the buffers `parts` side by side into wide rows. Returns
        the buffer of the wide rows."""
        out = self._like(parts[0], sum(part.width for part in parts))
        first = 0
        for part in parts:
            self.copy_part(part, 0, part.width, out, first)
            first += part.width
        return out

    def select(self, hidden: Buffer) -> Buffer:
        """Adds a step that copies the rows of sampled tokens. The result is the input of the
        head."""
        self.selected = out = self.buffer(hidden.width, is_of_sampled=True)
        self.steps.append(Select(hidden, out))
        return out

    def _angles_of(self, rotary: int, size: int) -> tuple[Buffer, Buffer]:
        """Returns the buffers of cosines and sines of the rotary embedding with the index `rotary`.

        The program looks up the angles once, before all other steps. Raises ValueError if the same
        angles were already requested with another `size`.
        """
        if rotary not in self._angles:
            cos, sin = self.buffer(size), self.buffer(size)
            self.steps.insert(0, LookUpAngles(rotary, cos, sin))
            self._angles[rotary] = cos, sin
        cos, sin = self._angles[rotary]
        if cos.width != size:
            raise ValueError(f"angles of kind {rotary} are of {cos.width} elements, not {size}")
        return cos, sin
