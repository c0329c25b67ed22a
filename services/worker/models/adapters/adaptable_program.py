"""The program of a stage (the steps that `kernels` runs), in variants with different adapters.

The program without adapters and its weights stay unchanged. A variant has the same steps, and one
more step after each matrix product that one of its adapters changes. So a rank can change its
adapters between two iterations, by running another variant.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.packing.linear import pack
from kernels.program import Program
from kernels.steps import LowRank, Multiply
from kernels.weights.linear import LinearWeight
from services.worker.models.adapters.adapter import Adapter, AdapterTensors, LoraModule
from services.worker.models.adapters.adapter_config import LoraConfig
from services.worker.models.adapters.weights_header import MAX_HEADER_BYTES
from services.worker.models.weights import Part

_SUFFIX = ".weight"

_WRAPPED = re.compile(r"^(model\.)?language_model\.")


@dataclass(frozen=True, slots=True)
class ModulePlaces:
    """Says which modules of a model belong to this stage, and which module is the language-model
    head."""

    layers_name: str
    n_layers: int
    layers: range  # the layers of this stage
    head: str  # the module of the head
    has_head: bool  # whether the head belongs to this stage
    aliases: Mapping[str, str]  # of modules with a shared matrix: the module that multiplies by it
    may_change_head: bool = True  # whether an adapter may change the head, on whichever stage

    def is_elsewhere(self, module: str) -> bool:
        """Returns whether a module belongs to another stage."""
        if module == self.head:
            return not self.has_head
        found = re.match(rf"{re.escape(self.layers_name)}\.([0-9]{{1,9}})\.", module)
        if found is None:
            return False
        return int(found[1]) < self.n_layers and int(found[1]) not in self.layers

    def module_of(self, part: Part) -> str:
        """Returns the name of the module to which the matrix of `part` belongs."""
        name = part.name.removesuffix(_SUFFIX)
        return self.aliases.get(name, name)

    def check(self, adapter: Adapter) -> None:
        """Raises AdapterError if `adapter` changes the head and `may_change_head` is false."""
        if not self.may_change_head and self.head in modules_by_name(adapter):
            raise adapter.error(f"scores of `yes-no` are not served with a change of {self.head}")


@dataclass(frozen=True, slots=True)
class Product:
    """The matrix of a matrix product, and the parts of tensors of which the matrix was made."""

    weight: object
    parts: Sequence[Part]
    order: Tensor | None


@dataclass(frozen=True, slots=True)
class FittedAdapter:
    """A rank's share of an adapter: the low-rank matrices for each matrix product that the adapter
    changes."""

    digest: str
    index: int
    """Number by which batches name the adapter."""
    products: Mapping[int, Sequence[LowRank]]
    """The low-rank matrices, by the index of the product's step in the program without adapters."""


class AdaptableProgram:
    """Fits adapters to the program of a stage, and returns variants of the program with adapters.
    The program itself stays as it is."""

    def __init__(
        self,
        program: Program,
        products: Mapping[int, Product],
        places: ModulePlaces,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`products` are the products that adapters may change, by the `id` of their `weight`."""
        self._program = program
        self._products = products
        self._places = places
        self._dtype = dtype
        self._device = device

    def max_weights_bytes(self, config: LoraConfig) -> int:
        """Returns an upper bound of the size of an adapter's weights file, in bytes. It assumes
        that the adapter changes all linear layers of the model with the largest rank in `config`,
        in the largest element type. The bound is several times the usual size, and keeps a rank
        from reading gigabytes for a small model."""
        places = self._places
        n_stages = math.ceil(places.n_layers / max(1, len(places.layers)))
        n_rows = sum(sum(part.shape) for one in self._products.values() for part in one.parts)
        return MAX_HEADER_BYTES + 8 * config.largest_rank * 2 * n_rows * n_stages

    def fit(self, adapter: Adapter, index: int) -> FittedAdapter:
        """Reads an adapter, and returns this rank's share of its matrices. May be called in any
        thread.

        Raises:
            AdapterError: the adapter has a module that is no linear layer of the model, matrices of
                other sizes than the module's, numbers that are not finite, or a product that
                adapters cannot change; or its files have changed.
        """
        self._places.check(adapter)
        modules, tensors = modules_by_name(adapter), adapter.read()
        used: set[str] = set()
        products: dict[int, Sequence[LowRank]] = {}
        for place, step in enumerate(self._program.steps):
            product = self._product_of(step)
            if product is None:
                continue
            names = dict.fromkeys(self._places.module_of(part) for part in product.parts)
            found = [name for name in names if name in modules]
            used.update(found)
            shares = [
                share
                for name in found
                for share in self._share(index, adapter, tensors, product, name, modules[name])
            ]
            if shares:
                products[place] = shares
        self._refuse_unused(adapter, modules, used)
        fitted = FittedAdapter(adapter.digest, index, products)
        try:
            self.with_adapters([fitted])
        except ValueError as error:  # found now, and not between two iterations
            raise adapter.error(str(error)) from error
        return fitted

    def with_adapters(self, adapters: Iterable[FittedAdapter]) -> Program:
        """Returns the variant of the program with `adapters`, which must have different indices.
        Raises ValueError if a product cannot be changed."""
        made, each = self._program.copy(), list(adapters)
        for place, step in enumerate(self._program.steps):
            shares = [share for one in each for share in one.products.get(place, ())]
            if shares and isinstance(step, Multiply):
                made.add_low_rank(step, shares)
        return made

    def _product_of(self, step: object) -> Product | None:
        return self._products.get(id(step.weight)) if isinstance(step, Multiply) else None

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

    def _share(
        self,
        index: int,
        adapter: Adapter,
        tensors: AdapterTensors,
        product: Product,
        name: str,
        module: LoraModule,
    ) -> Iterator[LowRank]:
        """Yields this rank's share of an adapter's matrices for the module `name`, which is one of
        the modules of `product`. Yields nothing if the rank has no outputs of the module."""
        n_out = sum(part.out_shape[0] for part in product.parts)
        is_changed, up = torch.zeros(n_out, dtype=torch.bool), torch.zeros(n_out, module.rank)
        a, b = tensors.matrices(module.name)
        inputs, begin = range(0), 0
        for part in product.parts:
            end = begin + part.out_shape[0]
            if self._places.module_of(part) == name:
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


def _shares(adapter: Adapter, part: Part, module: LoraModule) -> tuple[range, range]:
    """Returns the range of a module's inputs and the range of its outputs that this rank has.
    Raises AdapterError if the adapter's matrices have other sizes than the module."""
    sizes, spans = (part.shape, part.spans)
    if part.is_transposed:
        sizes, spans = sizes[::-1], spans[::-1]
    if sizes != (module.n_out, module.n_in):
        raise adapter.error(
            f"{module.name} has {module.n_in} inputs and {module.n_out} outputs, and "
            f"{sizes[1]} and {sizes[0]} in the model"
        )
    return spans[1], spans[0]


def modules_by_name(adapter: Adapter) -> dict[str, LoraModule]:
    """Returns the modules of an adapter by the names that families give them. In adapters of models
    with a vision part, names begin with "language_model." or "model.language_model."; families
    leave this word out."""
    return {_WRAPPED.sub(r"\1", name): module for name, module in adapter.modules.items()}
