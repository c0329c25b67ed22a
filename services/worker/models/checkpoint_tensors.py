"""A rank's share of a stage's tensors, read from the files of a checkpoint.

Names and shapes are checked before any tensor is read. A matrix that the files store quantised
stays quantised if the device can multiply by weights with a scale for each group of inputs.
Exceptions are matrices for which the settings request fewer bits than the files have, matrices
whose groups are not of neighbouring inputs, and matrices whose values would be rounded although the
settings request no quantisation. All other tensors are dequantised while they are read, a block at
a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from kernels.forms.experts import ExpertForm
from kernels.packing.experts import pack_grouped_experts
from kernels.packing.linear import can_group, pack_grouped, pack_grouped_gated
from kernels.steps import Expert, ExpertMatrices, Gated
from kernels.weights.gated_in_two import GatedMatrix
from kernels.weights.groups import LONGEST, GroupedMatrix, GroupForm, joined
from kernels.weights.linear import Activations, Gate, LinearWeight, Quantization, TableWeight
from services.worker.models.quantised.find import find_stored
from services.worker.models.stored_tensor import GroupedTensor, Spans, StoredTensor
from services.worker.models.tensor_files import CheckpointError, TensorFiles, enumerate_problems
from services.worker.models.weight_cache import CachedShare
from services.worker.models.weight_format import WeightFormat
from services.worker.models.weights import (
    OnProgress,
    Part,
    Progress,
    TensorSource,
    WantedTensors,
    pieces,
)

_Matrix = TypeVar("_Matrix")

_MAX_BITS: dict[Quantization, int] = {"none": 8, "int8": 8, "int4": 4}
"""Largest number of bits with which stored weights may stay quantised, for each requested
quantization."""


class CheckpointTensors(TensorSource):
    """Reads the tensors that a model needs from the files of a checkpoint, in a given element type
    and onto a given device."""

    def __init__(
        self,
        files: TensorFiles,
        wanted: WantedTensors,
        *,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: OnProgress,
        quantization: Quantization = "none",
        activations: Activations = "rounded",
        weight_format: WeightFormat | None = None,
        cached: CachedShare | None = None,
    ) -> None:
        """Checks the names and shapes of tensors in the files. Raises CheckpointError if they do
        not match. Matrices that `cached` has are not read from the files."""
        super().__init__(wanted.tp_rank, wanted.tp_size, quantization, activations)
        self._dtype = dtype
        self._device = device
        self._cached = cached
        self._file = str(files)
        self._stored = _stored_tensors(wanted, files, weight_format)
        n_bytes = self._check(wanted)
        files.close()
        self._progress = Progress(n_bytes, on_progress)

    def weight(self, parts: Sequence[Part], order: Tensor | None = None) -> LinearWeight:
        kind = "weight" if order is None else f"weight in the order {order.tolist()}"
        return self._kept(kind, parts, lambda: self._weight(parts, order))

    def gated(self, parts: Sequence[Part], gate: Gate) -> GatedMatrix:
        return self._kept(f"gated by {gate}", parts, lambda: self._gated(parts, gate))

    def _weight(self, parts: Sequence[Part], order: Tensor | None) -> LinearWeight:
        matrix = self._grouped(parts)
        if matrix is None:
            return super().weight(parts, order)
        matrix = matrix if order is None else matrix.rows(order)
        return pack_grouped(matrix, self._device, self._dtype)

    def _gated(self, parts: Sequence[Part], gate: Gate) -> GatedMatrix:
        matrix = self._grouped(parts)
        if matrix is None:
            return super().gated(parts, gate)
        return pack_grouped_gated(matrix, self._device, self._dtype, gate)

    def experts(self, gate_up: Sequence[Sequence[Part]], down: Sequence[Part]) -> ExpertMatrices:
        matrices = (*gate_up, *([part] for part in down))
        # On a GPU one operation computes all experts, and needs plain matrices.
        if self._device.type != "cpu" or any(self.group_forms(each) is None for each in matrices):
            return super().experts(gate_up, down)
        firsts = [Gated.of(self.gated(parts, "silu")) for parts in gate_up]
        seconds = [self.weight([part]) for part in down]
        return [Expert(*both, None) for both in zip(firsts, seconds, strict=True)]

    def stacked_experts(
        self, gate_up: Part, down: Part, order: Tensor, form: ExpertForm
    ) -> ExpertMatrices:
        if self._device.type != "cpu" or self.group_forms([gate_up, down]) is None:
            return super().stacked_experts(gate_up, down, order, form)
        experts = range(gate_up.shape[0])
        return pack_grouped_experts(
            (self._expert(gate_up, i).rows(order) for i in experts),
            (self._expert(down, i) for i in experts),
            self._dtype,
            form,
        )

    def head(self, part: Part) -> LinearWeight:
        return super().head(part) if self.group_forms([part]) is None else self.table(part)

    def table(self, part: Part) -> TableWeight:
        return self._kept("table", [part], lambda: self._table(part))

    def rows(self, part: Part) -> TableWeight:
        return super().rows(part) if self.group_forms([part]) is None else self.table(part)

    def _table(self, part: Part) -> TableWeight:
        matrix = self._grouped([part])
        if matrix is None:
            return super().table(part)
        return pack_grouped(matrix, self._device, self._dtype)

    def _kept(self, kind: str, parts: Sequence[Part], make: Callable[[], _Matrix]) -> _Matrix:
        """Returns the matrix that is made of `parts`: from the cache if it is there, otherwise from
        `make`. `kind` distinguishes different matrices that are made of the same parts."""
        if self._cached is None:
            return make()
        name = hashlib.sha256(f"{kind}: {list(parts)}".encode()).hexdigest()
        if self._cached.has(name):
            self._progress.add(sum(self._n_bytes(part) for part in parts))
        return self._cached.matrix(name, make)

    def group_forms(self, parts: Sequence[Part]) -> list[GroupForm] | None:
        """Returns the quantised form (bits, group size and values) of each part. Returns None if
        any of the parts must be dequantised."""
        forms = []
        for part in parts:
            stored = self._stored[part.name]
            if not isinstance(stored, GroupedTensor) or part.is_transposed or not part.n_elements:
                return None
            if stored.is_rounded and self.quantization == "none":
                return None
            form = stored.group_form(part.spans)
            if form is None or form.bits > _MAX_BITS[self.quantization]:
                return None
            forms.append(form)
        return forms if can_group(self._device) else None

    def grouped_bytes(self, parts: Sequence[Part]) -> int | None:
        """Returns an upper bound for the bytes of memory that `parts` take if they stay quantised.
        Returns None if any of them must be dequantised."""
        forms = self.group_forms(parts)
        if forms is None:
            return None
        n_elements = sum(part.n_elements for part in parts)
        bits, size = max(form.bits for form in forms), min(form.size for form in forms)
        stored = (self._stored[part.name] for part in parts)
        has_offsets = any(isinstance(each, GroupedTensor) and each.has_offsets for each in stored)
        scale_bytes = self._dtype.itemsize * (2 if has_offsets else 1)
        return n_elements * bits // 8 + -(-n_elements // min(size, LONGEST)) * scale_bytes

    def form_in_words(self, part: Part) -> str:
        """Returns a text that says how a part is stored in the files, and whether it stays so in
        memory."""
        stored = self._stored[part.name]
        if not isinstance(stored, GroupedTensor):
            return "not quantised"
        forms = self.group_forms([part])
        if forms is None:
            return "quantised, and dequantised while it loads"
        return f"{forms[0].bits} bits in groups of {forms[0].size}"

    def _grouped(self, parts: Sequence[Part]) -> GroupedMatrix | None:
        """Reads `parts` and joins them into one quantised matrix in CPU memory. Returns None if any
        of them must be dequantised."""
        forms = self.group_forms(parts)
        if forms is None:
            return None
        numbers = [self._numbers(part, form) for part, form in zip(parts, forms, strict=True)]
        return self._for_products(joined(numbers))

    def _expert(self, part: Part, index: int) -> GroupedMatrix:
        """Returns the quantised matrix of one expert. `part` has the shape [n_experts, n_out,
        n_in]."""
        stored = self._stored[part.name]
        form = stored.group_form(part.spans) if isinstance(stored, GroupedTensor) else None
        if not isinstance(stored, GroupedTensor) or form is None:
            raise TypeError(f"{part.name} has no numbers")
        spans = (range(index, index + 1), *part.spans[1:])
        scales, offsets = self._scales(part, stored, spans, form)
        numbers = stored.read_numbers(spans)
        self._progress.add(stored.n_bytes(spans))
        offsets = None if offsets is None else offsets[0]
        return self._for_products(GroupedMatrix(form, numbers[0], scales[0], offsets))

    def _for_products(self, matrix: GroupedMatrix) -> GroupedMatrix:
        return matrix.rounding_inputs() if self.activations == "rounded" else matrix

    def _numbers(self, part: Part, form: GroupForm) -> GroupedMatrix:
        stored, whole = self._stored[part.name], part.spans
        if not isinstance(stored, GroupedTensor):
            raise TypeError(f"{part.name} has no numbers")
        numbers = torch.empty(part.out_shape, dtype=torch.uint8 if form.bits == 4 else torch.int8)
        for spans in stored.pieces(whole):
            numbers[_place(spans, whole)] = stored.read_numbers(spans)
            self._progress.add(stored.n_bytes(spans))
        rows, columns = whole
        scales, offsets = [], []
        for begin, end in pieces(len(rows), len(columns)):
            span = range(rows.start + begin, rows.start + end), columns
            of_rows, offsets_of_rows = self._scales(part, stored, span, form)
            scales.append(of_rows)
            if offsets_of_rows is not None:
                offsets.append(offsets_of_rows)
        return GroupedMatrix(
            form, numbers, torch.cat(scales), torch.cat(offsets) if offsets else None
        )

    def _scales(
        self, part: Part, stored: GroupedTensor, spans: Spans, form: GroupForm
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the scales for the range `spans` of a part, and the offsets or None. Raises
        CheckpointError for values that are not finite."""
        scales, offsets = stored.read_scales(spans, form)
        self._check_finite(part, scales)
        if offsets is not None:
            self._check_finite(part, offsets)
        return scales, offsets

    def _check_finite(self, part: Part, values: Tensor) -> None:
        if not values.isfinite().all():
            raise CheckpointError(
                f"{self._file}: the scales or numbers of {part.name} are not finite"
            )

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self._dtype, device=self._device)

    def _read(self, part: Part, out: Tensor) -> None:
        stored = self._stored[part.name]
        whole = part.spans
        for spans in stored.pieces(whole):
            piece = stored.read(spans)
            if isinstance(stored, GroupedTensor):
                self._check_finite(part, piece)
            out[_place(spans, whole)].copy_(piece)
            self._progress.add(stored.n_bytes(spans))

    def _check(self, wanted: WantedTensors) -> int:
        """Checks the shapes and element types of the wanted tensors in the files. Returns how many
        bytes the wanted parts have there. Raises CheckpointError for a tensor that does not match.
        """
        problems = [
            problem
            for part in wanted.parts
            for problem in self._stored[part.name].problems(part.shape)
        ]
        if problems:
            named = enumerate_problems(list(dict.fromkeys(problems)))
            raise CheckpointError(f"{self._file}: {named}")
        return sum(self._n_bytes(part) for part in wanted.parts)

    def _n_bytes(self, part: Part) -> int:
        """Returns how many bytes a part has in the files."""
        stored = self._stored[part.name]
        return sum(stored.n_bytes(spans) for spans in stored.pieces(part.spans))


def _place(spans: Spans, whole: Spans) -> tuple[slice, ...]:
    """Returns the index ranges of `spans` within the ranges `whole`, which contain `spans`."""
    return tuple(
        slice(span.start - all_.start, span.stop - all_.start)
        for span, all_ in zip(spans, whole, strict=True)
    )


def _stored_tensors(
    wanted: WantedTensors, files: TensorFiles, weight_format: WeightFormat | None
) -> dict[str, StoredTensor]:
    """Returns how each wanted tensor is stored. Raises CheckpointError if a tensor is missing, or
    if the files have biases that the model would leave out."""
    stored: dict[str, StoredTensor] = {}
    missing = []
    for part in {part.name: part for part in wanted.parts}.values():
        found = find_stored(part, files, weight_format)
        if found is None:
            missing.append(part.name)
        else:
            stored[part.name] = found
    if missing:
        raise CheckpointError(f"{files} lacks {enumerate_problems(missing)}")
    # Of the ranks that share a layer, the first reads all biases.
    unread = [] if wanted.tp_rank else files.unread_biases()
    if unread:
        raise CheckpointError(
            f"{files} has biases that are not computed: {enumerate_problems(unread)}"
        )
    return stored
