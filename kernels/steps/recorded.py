"""The steps of a program in order, with their buffers, and the places where layers and head end."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.steps.buffer import Buffer
from kernels.steps.low_rank import AddLowRank, LowRank
from kernels.steps.rows import Multiply


class RecordedSteps:
    """The steps of one rank's share of a stage, in the order in which they run.

    The first `n_hidden_steps` steps compute `hidden`, and the steps after them compute `logits`.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """Creates an empty list of steps, without buffers. `dtype` is the type of hidden states."""
        self.dtype = dtype
        self.steps: list[object] = []
        self.buffers: list[Buffer] = []
        self.inputs: Buffer | None = None
        """Buffer of the hidden states that the stage receives. None on a first stage, whose inputs
        are tokens."""
        self.hidden: Buffer | None = None
        """Buffer of the hidden states after the last layer. None until `end_layers` is called."""
        self.n_hidden_steps = 0
        """Number of steps that compute `hidden`. The steps after them compute `logits`."""
        self.selected: Buffer | None = None
        """Buffer of the hidden states of sampled tokens, which are the input of the head."""
        self.logits: Buffer | None = None
        """Buffer of the logits of sampled tokens. None on a stage without a head."""

    @property
    def has_adapters(self) -> bool:
        """Whether a step of the program depends on the adapters of tokens."""
        return any(isinstance(step, AddLowRank) for step in self.steps)

    def buffer(
        self, width: int, dtype: torch.dtype | None = None, *, is_of_sampled: bool = False
    ) -> Buffer:
        """Returns a new buffer. Its element type is `dtype`, by default the type of hidden
        states."""
        made = Buffer(len(self.buffers), width, dtype or self.dtype, is_of_sampled)
        self.buffers.append(made)
        return made

    def take_in(self, hidden_size: int) -> Buffer:
        """Returns a new buffer for the hidden states that the stage receives, and stores it in
        `inputs`."""
        self.inputs = self.buffer(hidden_size)
        return self.inputs

    def end_layers(self, hidden: Buffer) -> None:
        """Sets `hidden`, the buffer of the hidden states after the last layer. All steps that are
        added later compute logits."""
        self.hidden = hidden
        self.n_hidden_steps = len(self.steps)

    def end_head(self, logits: Buffer) -> None:
        """Sets `logits`, the buffer of the logits of sampled tokens."""
        self.logits = logits

    def add_low_rank(self, product: Multiply, each: Sequence[LowRank]) -> None:
        """Inserts an `AddLowRank` after the step `product`. The new step adds the low-rank product
        of each row's adapter to the result of `product`. `each` has the adapters' matrices and must
        not be empty.

        Raises ValueError if the product overwrites its inputs, or has a fused gate.
        """
        x, out = product.x, product.out
        if x.index == out.index or product.weight.shape[0] != out.width:
            raise ValueError("an adapter cannot change a product that is gated or in place")
        rank = max(one.down.shape[0] for one in each)
        scratch = (self._like(x), self._like(x, rank), self._like(out))
        place = next(i for i, step in enumerate(self.steps) if step is product)
        self.steps.insert(place + 1, AddLowRank(x, each, *scratch, out))
        if place < self.n_hidden_steps:
            self.n_hidden_steps += 1

    def _like(self, x: Buffer, width: int | None = None) -> Buffer:
        return self.buffer(
            x.width if width is None else width, x.dtype, is_of_sampled=x.is_of_sampled
        )
