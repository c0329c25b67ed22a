"""A source of a model's tensors that records, for each matrix product, the modules of the matrix.

A model asks its source for the matrices of its products, and names the tensors of which a matrix is
made. So the source knows which modules a product has, and which outputs or inputs of these modules
belong to this rank, in which order. When the program of the stage is complete, `adapted` makes an
`AdaptableProgram` of it, and returns the variant with the adapters that the source was given.

A product may have several modules, such as queries, keys and values. An adapter then has a pair of
matrices for each module, which changes the outputs of the module. If ranks divide the outputs of a
module, each rank has its rows of B. If ranks divide the inputs, each rank has its columns of A, and
the all-reduce after the product also adds up the adapter's part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from kernels.forms.experts import ExpertForm
from kernels.program import Program
from kernels.steps import ExpertMatrices
from kernels.weights.gated_in_two import GatedInTwo, GatedMatrix
from kernels.weights.linear import Gate, LinearWeight, TableWeight
from services.worker.models.adapters.adaptable_program import (
    AdaptableProgram,
    FittedAdapter,
    ModulePlaces,
    Product,
    modules_by_name,
)
from services.worker.models.adapters.adapter import Adapter
from services.worker.models.weights import Part, TensorSource

_Weight = TypeVar("_Weight", LinearWeight, TableWeight)


class AdaptedTensors(TensorSource):
    """A source that returns the tensors of another source, and records the matrix products, so that
    adapters can be added to them."""

    adaptable: AdaptableProgram
    """The program of the stage. It is assigned by `adapted`, when the program is complete."""
    fitted: Sequence[FittedAdapter] = ()
    """This rank's shares of the adapters that the source was given."""

    def __init__(
        self,
        source: TensorSource,
        adapters: Sequence[Adapter],
        places: ModulePlaces,
        *,
        dtype: torch.dtype,
        device: torch.device,
        takes_any: bool = False,
    ) -> None:
        """Programs refer to an adapter by its index in `adapters`. With `takes_any`, any adapter
        may be added later, so no product is fused with the operation after it."""
        super().__init__(source.tp_rank, source.tp_size, source.quantization, source.activations)
        self._source = source
        self._adapters = adapters
        self._places = places
        self._dtype = dtype
        self._device = device
        self._takes_any = takes_any
        self._products: dict[int, Product] = {}  # by the id of the matrix
        self._changed = {name for adapter in adapters for name in modules_by_name(adapter)}

    def joined(
        self,
        parts: Sequence[Part],
        order: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        return self._source.joined(parts, order, dtype=dtype)

    def weight(self, parts: Sequence[Part], order: Tensor | None = None) -> LinearWeight:
        return self._noted(self._source.weight(parts, order), parts, order)

    def gated(self, parts: Sequence[Part], gate: Gate) -> GatedMatrix:
        names = {self._places.module_of(part) for part in parts}
        if self._takes_any or not self._changed.isdisjoint(names):
            return GatedInTwo(self.weight(parts), gate)  # an adapter adds to the product before
        return self._source.gated(parts, gate)

    def head(self, part: Part) -> LinearWeight:
        return self._noted(self._source.head(part), [part])

    def table(self, part: Part) -> TableWeight:
        return self._noted(self._source.table(part), [part])

    def rows(self, part: Part) -> TableWeight:
        return self._source.rows(part)

    def experts(self, gate_up: Sequence[Sequence[Part]], down: Sequence[Part]) -> ExpertMatrices:
        return self._source.experts(gate_up, down)

    def stacked_experts(
        self, gate_up: Part, down: Part, order: Tensor, form: ExpertForm
    ) -> ExpertMatrices:
        return self._source.stacked_experts(gate_up, down, order, form)

    def adapted(self, program: Program) -> Program:
        """Returns the variant of `program`, the program of a stage, with the adapters that this
        source was given. Sets `adaptable` and `fitted`. Raises AdapterError as
        `AdaptableProgram.fit` does."""
        self.adaptable = AdaptableProgram(
            program, self._products, self._places, dtype=self._dtype, device=self._device
        )
        self.fitted = [self.adaptable.fit(one, index) for index, one in enumerate(self._adapters)]
        return self.adaptable.with_adapters(self.fitted)

    def _noted(
        self, weight: _Weight, parts: Sequence[Part], order: Tensor | None = None
    ) -> _Weight:
        self._products[id(weight)] = Product(weight, parts, order)
        return weight

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        return self._source._allocate(shape, dtype)

    def _read(self, part: Part, out: Tensor) -> None:
        self._source._read(part, out)
