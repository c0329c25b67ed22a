"""A source of a model's tensors that adds low-rank adapters to the matrix products of a stage.

A model asks its source for the matrices of its products, and names the tensors of which a matrix is
made. So the source knows which modules a product has, which outputs or inputs of the modules belong
to this rank, and in which order. When the program of the stage is complete, `adapted` adds a step
after each product that an adapter changes.

A product may have several modules, such as queries, keys and values. An adapter then has a pair of
matrices for each module, which changes the outputs of the module. If ranks divide the outputs, each
has its rows of B. If they divide the inputs, each has its columns of A, and the sum over the ranks
that ends such a product includes the adapter's part.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from kernels.forms.experts import ExpertForm
from kernels.packing.linear import pack
from kernels.program import Program
from kernels.steps import ExpertMatrices, LowRank, Multiply
from kernels.weights.gated_in_two import GatedInTwo, GatedMatrix
from kernels.weights.linear import Gate, LinearWeight, TableWeight
from services.worker.models.adapters.adapter import Adapter, LoraModule
from services.worker.models.weights import Part, TensorSource

_SUFFIX = ".weight"

_WRAPPED = re.compile(r"^(model\.)?language_model\.")

_Weight = TypeVar("_Weight", LinearWeight, TableWeight)


@dataclass(frozen=True, slots=True)
class ModulePlaces:
    """Which modules of a model belong to this stage, and the name of the head's module."""

    layers_name: str
    n_layers: int
    layers: range  # the layers of this stage
    head: str  # the module of the head
    has_head: bool  # whether the head belongs to this stage
    aliases: Mapping[str, str]  # other modules whose matrix is that of a product's module

    def is_elsewhere(self, module: str) -> bool:
        """Returns whether a module belongs to another stage."""
        if module == self.head:
            return not self.has_head
        found = re.match(rf"{re.escape(self.layers_name)}\.([0-9]{{1,9}})\.", module)
        if found is None:
            return False
        return int(found[1]) < self.n_layers and int(found[1]) not in self.layers


@dataclass(frozen=True, slots=True)
class _Product:
    """The matrix of a product, and the tensors of which the matrix was made."""

    weight: object
    parts: Sequence[Part]
    order: Tensor | None


def check_head(adapters: Sequence[Adapter], places: ModulePlaces) -> None:
    """Raises AdapterError, which names the adapter, if one changes the head."""
    for adapter in adapters:
        if places.head in _by_name(adapter.modules):
            raise adapter.error(f"scores of `yes-no` are not served with a change of {places.head}")


class AdaptedTensors(TensorSource):
    """A source that returns the tensors of another source, and adds adapters to the products with
    them."""

    def __init__(
        self,
        source: TensorSource,
        adapters: Sequence[Adapter],
        places: ModulePlaces,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Programs refer to an adapter by its index in `adapters`."""
        super().__init__(source.tp_rank, source.tp_size, source.quantization, source.activations)
        self._source = source
        self._adapters = adapters
        self._places = places
        self._dtype = dtype
        self._device = device
        self._products: dict[int, _Product] = {}  # by the id of the matrix
        self._modules = [_by_name(adapter.modules) for adapter in adapters]

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
        if any(self._modules_of(parts, modules) for modules in self._modules):
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
        """Adds the steps of adapters to the program of a stage, and returns the program.

        Raises:
            AdapterError: an adapter has a module that is no linear layer of the model, or matrices
                of other sizes than the module's.
        """
        used: list[set[str]] = [set() for _ in self._adapters]
        for step in [step for step in program.steps if isinstance(step, Multiply)]:
            product = self._products.get(id(step.weight))
            if product is None:
                continue
            each: list[LowRank] = []
            for index, adapter in enumerate(self._adapters):
                modules = self._modules_of(product.parts, self._modules[index])
                used[index].update(modules)
                for name, module in modules.items():
                    each += self._low_rank(index, adapter, product, name, module)
            if each:
                program.add_low_rank(step, each)
        for adapter, modules, found in zip(self._adapters, self._modules, used, strict=True):
            self._refuse_unused(adapter, modules, found)
        return program

    def _refuse_unused(
        self, adapter: Adapter, modules: Mapping[str, LoraModule], used: set[str]
    ) -> None:
        wrong = [
            module.name
            for name, module in modules.items()
            if name not in used and not self._places.is_elsewhere(name)
        ]
        if wrong:
            raise adapter.error(
                f"{wrong[0]} is no linear layer of the model that adapters can change"
                + (f", nor are {len(wrong) - 1} others" if wrong[1:] else "")
            )

    def _noted(
        self, weight: _Weight, parts: Sequence[Part], order: Tensor | None = None
    ) -> _Weight:
        self._products[id(weight)] = _Product(weight, parts, order)
        return weight

    def _modules_of(
        self, parts: Sequence[Part], modules: Mapping[str, LoraModule]
    ) -> dict[str, LoraModule]:
        """Returns the modules of an adapter that are among the parts of a product, by their
        names."""
        names = [self._name(part) for part in parts]
        return {name: modules[name] for name in names if name in modules}

    def _name(self, part: Part) -> str:
        name = part.name.removesuffix(_SUFFIX)
        return self._places.aliases.get(name, name)

    def _low_rank(
        self, index: int, adapter: Adapter, product: _Product, name: str, module: LoraModule
    ) -> Iterator[LowRank]:
        """Yields this rank's share of an adapter's matrices for a module of a product. Yields
        nothing if the rank has no outputs of the module."""
        n_out = sum(part.out_shape[0] for part in product.parts)
        is_changed, up = torch.zeros(n_out, dtype=torch.bool), torch.zeros(n_out, module.rank)
        a, b = adapter.matrices(module.name)
        inputs, begin = range(0), 0
        for part in product.parts:
            end = begin + part.out_shape[0]
            if self._name(part) == name:
                inputs, outputs = _shares(adapter, part, module)
                is_changed[begin:end] = True
                up[begin:end] = b[outputs.start : outputs.stop].float() * module.scale
            begin = end
        if product.order is not None:
            is_changed, up = is_changed[product.order], up[product.order]
        changed = is_changed.nonzero().flatten().tolist()
        if changed:
            first, last = changed[0], changed[-1]
            down = a[:, inputs.start : inputs.stop]
            yield LowRank(index, first, self._packed(down), self._packed(up[first : last + 1]))

    def _packed(self, matrix: Tensor) -> LinearWeight:
        return pack(matrix.to(device=self._device, dtype=self._dtype))

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        return self._source._allocate(shape, dtype)

    def _read(self, part: Part, out: Tensor) -> None:
        self._source._read(part, out)


def _shares(adapter: Adapter, part: Part, module: LoraModule) -> tuple[range, range]:
    """Returns this rank's inputs and outputs of a module. Raises AdapterError if the adapter's
    matrices have other sizes than the module."""
    sizes, spans = (part.shape, part.spans)
    if part.is_transposed:
        sizes, spans = sizes[::-1], spans[::-1]
    if sizes != (module.n_out, module.n_in):
        raise adapter.error(
            f"{module.name} has {module.n_in} inputs and {module.n_out} outputs, and "
            f"{sizes[1]} and {sizes[0]} in the model"
        )
    return spans[1], spans[0]


def _by_name(modules: Mapping[str, LoraModule]) -> dict[str, LoraModule]:
    """Returns the modules by the names that families give them. Adapters of models with a vision
    part have the word "language_model" before or after the first word."""
    return {_WRAPPED.sub(r"\1", name): module for name, module in modules.items()}
